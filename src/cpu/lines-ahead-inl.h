// Lines of the cache that are called for before they are read.
#pragma once

#include "cpu/features.h"
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

// CPUs forget prefetches that they have no room for, so a line is called for more than once. How that is best
// done depends on the CPU. A way to do so says, by measurement (NOTES.md),
// - for k and for v how many lines before it is read a line is called for, and into which level of caches
//   (__builtin_prefetch's locality),
// - how many keys go in step in o += p v,
// - whether what is called for meanwhile is taken a line of those keys at a time, which seldom goes on behind
//   a row, or a head, which takes fewer instructions.
struct AskOften {  // Zen 5
  static constexpr int calls = 3, locality = 3;
  // k farther ahead than v: some lines of a block's first keys are passed over by a call each.
  static constexpr std::int64_t k_lines[calls] = {320, 256, 160}, v_lines[calls] = {288, 192, 96};
  static constexpr int value_keys(std::int64_t rows) { return rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }
  static constexpr bool values_by_line = false;
};
struct AskAgain {  // Zen 4, and whoever was not measured
  static constexpr int calls = 2, locality = 2;
  static constexpr std::int64_t k_lines[calls] = {640, 512}, v_lines[calls] = {640, 512};
  static constexpr int value_keys(std::int64_t rows) { return rows <= 2 ? 4 : rows <= 4 ? 8 : 16; }
  static constexpr bool values_by_line = true;
};

// body(way) with the way of this CPU.
template <class Body>
HWY_INLINE void in_way_of_cpu(const Body& body) {
  if (prefetches() == Prefetches::ask_often) return body(AskOften());
  body(AskAgain());
}
// From how long a row of the cache on packs pay.
HWY_INLINE std::int64_t least_row_bytes() { return prefetches() == Prefetches::ask_again ? 256 : 2048; }

template <class Way>
using Calls = LinesAhead[Way::calls];

// The next bytes of each of the calls.
template <class Way>
struct Called {
  const char* at[Way::calls];

  HWY_INLINE Called(Calls<Way>& calls, std::int64_t bytes) {
    for (int n = 0; n < Way::calls; ++n) at[n] = calls[n].take(bytes);
  }
  // Calls for `lines` lines of each. Where the last one is a part of a line, more are called for than were
  // taken.
  template <int lines>
  HWY_INLINE void call() {
    HWY_UNROLL(3)
    for (const char*& line : at) {
      HWY_UNROLL(8)
      for (int i = 0; i < lines; ++i) __builtin_prefetch(line + 64 * i, 0, Way::locality);
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
