// One attention call made from flags: its tensors, forward and backward.
#pragma once

#include "cli/buffer.h"
#include "cli/flags.h"
#include "core/problem.h"

namespace tessera::cli {

class Call {
 public:
  Call(const CallFlags& flags, Store::Kind kind);

  // Runs with a workspace that is taken for this one call. Throws what the library refuses.
  void forward();
  void backward();
  // Takes the workspaces of these directions now: what follows allocates nothing.
  void reserve(Direction direction);

  [[nodiscard]] const Forward& forward_call() const { return forward_; }
  [[nodiscard]] const Backward& backward_call() const { return backward_; }
  [[nodiscard]] std::size_t bytes() const { return store_.bytes(); }

 private:
  void make_tensors(const CallFlags& flags);
  void make_options(const CallFlags& flags);
  void make_backward();

  Store store_;
  Forward forward_;
  Backward backward_;
  Memory forward_workspace_, backward_workspace_;
};

// Matmul FLOPs as papers count them: 4 * batch * heads * seqlen_q * seqlen_k * head_dim forward, 2.5 times
// that backward, half of either if causal.
[[nodiscard]] double nominal_flops(const CallFlags& flags, Direction direction);

[[nodiscard]] inline const char* name_of(Direction direction) {
  return direction == Direction::forward ? "forward" : "backward";
}

}  // namespace tessera::cli
