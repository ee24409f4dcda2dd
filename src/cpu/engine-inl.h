// The matmul of this object: AMX tiles or float vectors. Either defines Element, the units to which tiles are
// padded, OperandA and OperandB and the functions that make them, multiply_tiles<Into>, and Product<Into>,
// which does the same in steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd-inl.h"

namespace tessera::cpu::TESSERA_CPU_KERNEL {

enum class Into : std::uint8_t {
  overwrite,   // c = a b
  add,         // c = c + a b
  scaled_add,  // c = scale[row] * c + a b
};

// Rows of two tensors that will be wanted next. Between products some of their lines are called into the
// second-level cache: all at once they would hold up everything else.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const View& first, const View& second, std::int64_t b, std::int64_t s, std::int64_t h,
        std::int64_t rows, std::int64_t first_cols, std::int64_t second_cols)
      : part_{{first, b, s, h, first_cols}, {second, b, s, h, second_cols}}, rows_(rows) {}

  void fetch() {
    for (int i = 0; i < lines_at_once && row_ < rows_; ++i) {
      __builtin_prefetch(part_[which_].data + byte_, 0, 2);
      byte_ += 64;
      if (byte_ < part_[which_].row_bytes) continue;
      byte_ = 0;
      part_[which_].data += part_[which_].stride;
      which_ = 1 - which_;
      row_ += which_ == 0 ? 1 : 0;
    }
  }

 private:
  static constexpr int lines_at_once = 8;
  struct Part {
    const std::byte* data = nullptr;
    std::int64_t stride = 0, row_bytes = 0;

    Part() = default;
    Part(const View& view, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t cols) {
      const std::int64_t size = view.dtype == DType::float32 ? 4 : 2;
      data = static_cast<const std::byte*>(view.data) + view.offset(b, s, h) * size;
      stride = view.seq * size;
      row_bytes = cols * size;
    }
  };
  Part part_[2];
  std::int64_t rows_ = 0, row_ = 0, byte_ = 0;
  int which_ = 0;
};

// Rows as they lie in the tensor, or a copy of them.
template <class T>
struct RowsOf {
  const T* data;
  std::int64_t ld;
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL

#if defined(TESSERA_CPU_AMX)
#include "cpu/amx-inl.h"
#else
#include "cpu/matmul-inl.h"
#endif
