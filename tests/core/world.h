// A small valid call of either direction, for tests to spoil or to change.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/problem.h"

namespace tessera {

enum class Base : std::uint8_t { dense, packed };

// Memory for a valid call of either direction, filled with a pattern, and the two calls on it.
// Dense: batch 2, seqlen_q 3, seqlen_k 4. Packed: lengths (2, 0, 4) and (3, 2, 4) in totals of 7 and 9.
// 4 query heads, 2 key heads, head_dim 8, head_dim_v 6.
class World {
 public:
  explicit World(Base base) : memory_(1 << 16) {
    std::memset(memory_.data(), 0xA5, memory_.size());
    const bool packed = base == Base::packed;
    const auto tokens = [&](std::int64_t dense_rows, std::int64_t total, std::int64_t heads,
                            std::int64_t dim) {
      return packed ? make(DType::float32, {total, heads, dim})
                    : make(DType::float32, {2, dense_rows, heads, dim});
    };
    const auto rows = [&] { return packed ? make(DType::float32, {4, 7}) : make(DType::float32, {2, 4, 3}); };
    forward.q = backward.q = tokens(3, 7, 4, 8);
    forward.k = backward.k = tokens(4, 9, 2, 8);
    forward.v = backward.v = tokens(4, 9, 2, 6);
    forward.o = backward.o = tokens(3, 7, 4, 6);
    forward.lse = backward.lse = rows();
    backward.dout = tokens(3, 7, 4, 6);
    backward.dlse = rows();
    backward.dq = tokens(3, 7, 4, 8);
    backward.dk = tokens(4, 9, 2, 8);
    backward.dv = tokens(4, 9, 2, 6);
    if (packed) {
      forward.options.cu_seqlens_q = ints({0, 2, 2, 6});
      forward.options.cu_seqlens_k = ints({0, 3, 5, 9});
    }
    used_ = (used_ + 255) / 256 * 256;
    forward.workspace = {take(16384), 16384};
    backward.options = forward.options;
    backward.workspace = forward.workspace;
  }

  Forward forward;
  Backward backward;

  void* take(std::size_t bytes) {
    void* address = memory_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    EXPECT_LE(used_, memory_.size());
    return address;
  }
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t n : shape) elements *= n;
    return {take(static_cast<std::size_t>(elements * size_of(dtype))), dtype, shape};
  }
  Tensor ints(std::initializer_list<std::int32_t> values) {
    const Tensor tensor = make(DType::int32, {static_cast<std::int64_t>(values.size())});
    std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(tensor.data));
    return tensor;
  }
  [[nodiscard]] std::vector<std::byte> snapshot() const { return {memory_.begin(), memory_.end()}; }

 private:
  // Storage in aligned lines: std::vector aligns to no more than 16.
  struct alignas(256) Line {
    std::byte bytes[256];
  };
  class Storage {
   public:
    explicit Storage(std::size_t bytes) : lines_(bytes / 256) {}
    [[nodiscard]] std::byte* data() { return lines_.front().bytes; }
    [[nodiscard]] const std::byte* begin() const { return lines_.front().bytes; }
    [[nodiscard]] const std::byte* end() const { return begin() + size(); }
    [[nodiscard]] std::size_t size() const { return lines_.size() * 256; }

   private:
    std::vector<Line> lines_;
  };
  Storage memory_;
  std::size_t used_ = 0;
};

// What a case that concerns both directions may spoil.
struct Parts {
  World& world;
  Tensor &q, &k, &v, &o, &lse;
  Options& options;
};

template <class Call>
Parts parts_of(World& world, Call& call) {
  return {world, call.q, call.k, call.v, call.o, call.lse, call.options};
}

inline void set(const Tensor& tensor, std::int64_t i, std::int32_t value) {
  static_cast<std::int32_t*>(tensor.data)[i] = value;
}
inline void shift(Tensor& tensor, int bytes) { tensor.data = static_cast<std::byte*>(tensor.data) + bytes; }

inline Status call(const Forward& x) { return forward(x); }
inline Status call(const Backward& x) { return backward(x); }

}  // namespace tessera
