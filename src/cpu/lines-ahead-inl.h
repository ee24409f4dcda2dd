// Lines of the cache that are called for before they are read.
#pragma once

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// Rows in the order in which they will be read, from one of them on, piece by piece. The first `count` have
// `row_bytes`, those behind them `other_bytes`.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const void* const* rows, const void* const* end, std::int64_t count, std::int64_t row_bytes,
             std::int64_t other_bytes)
      : rows_(rows),
        rows_end_(end),
        others_(rows + count),
        row_bytes_(row_bytes),
        other_bytes_(other_bytes) {}

  // The next `bytes`, which may go on behind a row; where there are no more, any.
  HWY_INLINE const char* take(std::int64_t bytes) {
    if (at_ >= end_ && rows_ < rows_end_) next_row();
    if (HWY_UNLIKELY(at_ >= end_)) next_rows();
    const char* piece = at_;
    at_ += bytes;
    return piece;
  }

 private:
  const void *const *rows_ = nullptr, *const *rows_end_ = nullptr, *const *others_ = nullptr;
  std::int64_t row_bytes_ = 0, other_bytes_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;

  HWY_INLINE void next_row() {
    const auto* row = static_cast<const char*>(*rows_);
    if (row != end_) at_ = row;
    end_ = row + (rows_ < others_ ? row_bytes_ : other_bytes_);
    ++rows_;
  }
  // Where what was taken last was longer than a row.
  HWY_NOINLINE void next_rows() {
    while (at_ >= end_ && rows_ < rows_end_) next_row();
  }
};

// CPUs forget prefetches that they have no room for, so a line is called for three times (NOTES.md).
constexpr int line_calls = 3;
using Calls = LinesAhead[line_calls];

// The next bytes of each of the calls.
struct Called {
  const char* at[line_calls];

  HWY_INLINE Called(Calls& calls, std::int64_t bytes) {
    for (int n = 0; n < line_calls; ++n) at[n] = calls[n].take(bytes);
  }
  // Calls for `lines` lines of each, into the first-level cache. Where the last one is a part of a line, more
  // are called for than were taken.
  template <int lines>
  HWY_INLINE void call() {
    HWY_UNROLL(3)
    for (const char*& line : at) {
      HWY_UNROLL(8)
      for (int i = 0; i < lines; ++i) __builtin_prefetch(line + 64 * i, 0, 3);
      line += 64 * lines;
    }
  }
  HWY_INLINE void skip(std::int64_t bytes) {
    HWY_UNROLL(3)
    for (const char*& line : at) line += bytes;
  }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
