// Standard attention, as one writes it without tiling: S = q k^T, P = softmax(S), o = P v, with S and P of
// batch * heads * seqlen * seqlen elements in memory. What the demo compares with. An honest opponent:
// threads, packed and register-blocked matrix products, a vectorised softmax, and no more copies of the big
// matrices than the formulas need (one forward, two backward).
#pragma once

#include <cstdint>

#include "cli/buffer.h"

namespace tessera::cli {

struct StandardShape {
  std::int64_t batch = 1, seqlen = 0, heads = 1, head_dim = 64;
};

// Tensors are compact float32 (batch, seqlen, heads, head_dim).
class StandardAttention {
 public:
  StandardAttention(const StandardShape& shape, int threads) : shape_(shape), threads_(threads) {}

  // Keeps P for backward().
  void forward(const float* q, const float* k, const float* v, float* o);
  void backward(const float* q, const float* k, const float* v, const float* o, const float* dout, float* dq,
                float* dk, float* dv);

  // Bytes of one batch * heads * seqlen * seqlen matrix: forward holds one, backward two.
  [[nodiscard]] static std::int64_t square_bytes(const StandardShape& shape);

 private:
  StandardShape shape_;
  int threads_;
  Memory p_, ds_;
};

}  // namespace tessera::cli
