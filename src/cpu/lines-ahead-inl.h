// Lines of the cache that are called for before they are read.
#pragma once

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// Rows in the order in which they will be read, from one of them on, piece by piece.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const void* const* rows, std::int64_t count, std::int64_t row_bytes)
      : rows_(rows), count_(count), row_bytes_(row_bytes) {}

  // The next `bytes`; where there are no more, any.
  HWY_INLINE const char* take(std::int64_t bytes) {
    if (at_ >= end_ && count_ > 0) next_row();
    if (HWY_UNLIKELY(at_ >= end_)) next_rows();
    const char* piece = at_;
    at_ += bytes;
    return piece;
  }

 private:
  const void* const* rows_ = nullptr;
  std::int64_t count_ = 0, row_bytes_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;

  HWY_INLINE void next_row() {
    const auto* row = static_cast<const char*>(*rows_++);
    --count_;
    if (row != end_) at_ = row;
    end_ = row + row_bytes_;
  }
  // Where what was taken last was longer than a row.
  HWY_NOINLINE void next_rows() {
    while (at_ >= end_ && count_ > 0) next_row();
  }
};

// CPUs forget prefetches that they have no room for, so a line is called for three times (NOTES.md).
constexpr int line_calls = 3;
using Calls = LinesAhead[line_calls];

// `lines`: how many lines before it is read a line is called for. rows[0] is read now, `most` of them are
// known ahead.
HWY_INLINE void start_calls(Calls& calls, const std::int64_t (&lines)[line_calls], const void* const* rows,
                            std::int64_t count, std::int64_t row_bytes, std::int64_t most) {
  for (int n = 0; n < line_calls; ++n) {
    const std::int64_t ahead = std::min((lines[n] * 64 + row_bytes - 1) / row_bytes, most);
    calls[n] = LinesAhead(rows + ahead, count - ahead, row_bytes);
  }
}

// What the calls take together: the next bytes of each, a line at a time.
struct Called {
  const char* at[line_calls];

  HWY_INLINE Called(Calls& calls, std::int64_t bytes) {
    for (int n = 0; n < line_calls; ++n) at[n] = calls[n].take(bytes);
  }
  // The next `lines` lines of each, into the first-level cache.
  template <int lines>
  HWY_INLINE void call() {
    HWY_UNROLL(3)
    for (const char*& line : at) {
      HWY_UNROLL(8)
      for (int i = 0; i < lines; ++i) __builtin_prefetch(line + 64 * i, 0, 3);
      line += 64 * lines;
    }
  }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
