// The tensors of a call, one table: what each is called and what must hold of it by itself.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "tessera/tessera.hpp"

namespace tessera {

enum class Role : std::uint8_t { input, output };
// cached: q's dtype or an 8-bit one.
enum class Types : std::uint8_t { floating, any_floating, as_q, cached, as_q_or_float32, float32, int32 };
enum class Last : std::uint8_t { contiguous, strided };  // the stride of the last dimension
enum class Need : std::uint8_t { required, optional };

struct Argument {
  const char* name;
  const Tensor* tensor;
  Role role;
  Need need;
  Types types;
  Last last;
  int min_rank, max_rank;
};

// The table. It points to the call's tensors, and needs no memory of the heap: every call makes one.
class Arguments {
 public:
  static constexpr std::size_t capacity = 20;

  Arguments(std::initializer_list<Argument> list) {
    for (const Argument& argument : list) add(argument);
  }
  void add(const Argument& argument) {
    assert(size_ < capacity);
    list_[size_++] = argument;
  }
  [[nodiscard]] const Argument* begin() const { return list_.data(); }
  [[nodiscard]] const Argument* end() const { return begin() + size_; }

 private:
  std::array<Argument, capacity> list_{};
  std::size_t size_ = 0;
};

[[nodiscard]] bool is_packed(const Options& options);
[[nodiscard]] Arguments arguments(const Forward& x);
[[nodiscard]] Arguments arguments(const Backward& x);
[[nodiscard]] Arguments arguments(const Decode& x);
[[nodiscard]] Arguments arguments(const MergeStates& x);

}  // namespace tessera
