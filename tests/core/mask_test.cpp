#include "core/mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace tessera {
namespace {

// docs/semantics.md: query i sees the keys in [i + shift - left, i + shift + right].
bool sees(const Mask& mask, long long i, long long j) {
  const long long position = i + mask.shift;
  return (mask.left == Mask::unbounded || j >= position - mask.left) &&
         (mask.right == Mask::unbounded || j <= position + mask.right);
}

std::vector<Mask> small_masks() {
  std::vector<Mask> masks;
  for (long long seqlen_q = 0; seqlen_q <= 6; ++seqlen_q) {
    for (long long seqlen_k = 0; seqlen_k <= 6; ++seqlen_k) {
      for (const long long left : {0LL, 1LL, 2LL, 5LL, 100LL, Mask::unbounded}) {
        for (const long long right : {0LL, 1LL, 2LL, 5LL, 100LL, Mask::unbounded}) {
          for (const long long shift : {0LL, seqlen_k - seqlen_q}) {
            masks.push_back({seqlen_q, seqlen_k, left, right, shift});
          }
        }
      }
    }
  }
  return masks;
}

std::vector<Range> ranges_within(long long size) {
  std::vector<Range> ranges;
  for (long long begin = 0; begin <= size; ++begin) {
    for (long long end = begin; end <= size; ++end) ranges.push_back({begin, end});
  }
  return ranges;
}

// range holds exactly the elements of [0, size) that belong, and lies within [0, size].
void expect_members(const Range& range, long long size, const std::function<bool(long long)>& belongs) {
  long long count = 0;
  for (long long x = 0; x < size; ++x) {
    ASSERT_EQ(range.contains(x), belongs(x)) << x;
    count += belongs(x) ? 1 : 0;
  }
  ASSERT_EQ(range.size(), count);
  ASSERT_EQ(range.empty(), count == 0);
  ASSERT_GE(range.begin, 0);
  ASSERT_LE(range.end, size);
}

std::string describe(const Mask& m, Range range = {}) {
  return "seqlen_q " + std::to_string(m.seqlen_q) + " seqlen_k " + std::to_string(m.seqlen_k) + " left " +
         std::to_string(m.left) + " right " + std::to_string(m.right) + " shift " + std::to_string(m.shift) +
         " range " + std::to_string(range.begin) + ".." + std::to_string(range.end);
}

TEST(Mask, KeysOfRow) {
  for (const Mask& mask : small_masks()) {
    for (long long i = 0; i < mask.seqlen_q; ++i) {
      SCOPED_TRACE(describe(mask, {i, i + 1}));
      expect_members(mask.keys_of_row(i), mask.seqlen_k, [&](long long j) { return sees(mask, i, j); });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Mask, KeysOfAnyAndOfAll) {
  for (const Mask& mask : small_masks()) {
    for (const Range rows : ranges_within(mask.seqlen_q)) {
      SCOPED_TRACE(describe(mask, rows));
      const auto seen_by = [&](long long j) {
        long long count = 0;
        for (long long i = rows.begin; i < rows.end; ++i) count += sees(mask, i, j) ? 1 : 0;
        return count;
      };
      expect_members(mask.keys_of_any(rows), mask.seqlen_k, [&](long long j) { return seen_by(j) > 0; });
      expect_members(mask.keys_of_all(rows), mask.seqlen_k,
                     [&](long long j) { return !rows.empty() && seen_by(j) == rows.size(); });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Mask, RowsOfAny) {
  for (const Mask& mask : small_masks()) {
    for (const Range keys : ranges_within(mask.seqlen_k)) {
      SCOPED_TRACE(describe(mask, keys));
      expect_members(mask.rows_of_any(keys), mask.seqlen_q, [&](long long i) {
        for (long long j = keys.begin; j < keys.end; ++j) {
          if (sees(mask, i, j)) return true;
        }
        return false;
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Mask, LongSequencesDoNotOverflow) {
  const long long length = (1LL << 31) - 1;
  Mask mask{length, length, Mask::unbounded, Mask::unbounded, 0};
  EXPECT_EQ(mask.keys_of_row(length - 1), (Range{0, length}));
  EXPECT_EQ(mask.rows_of_any({length - 1, length}), (Range{0, length}));
  mask.right = 0;
  EXPECT_EQ(mask.keys_of_row(length - 1), (Range{0, length}));
  EXPECT_EQ(mask.keys_of_row(0), (Range{0, 1}));
  EXPECT_EQ(mask.rows_of_any({length - 1, length}), (Range{length - 1, length}));
}

// Of lengths below 2^29, 32 bits say the same.
TEST(Mask, NarrowSaysTheSame) {
  constexpr int longest = NarrowMask::unbounded - 1;
  for (const int seqlen_q : {0, 1, 70, longest}) {
    for (const int seqlen_k : {0, 1, 90, longest}) {
      for (const int left : {0, 3, longest, NarrowMask::unbounded}) {
        for (const int right : {0, 5, longest, NarrowMask::unbounded}) {
          for (const int shift : {0, seqlen_k - seqlen_q}) {
            const auto wide = [](int side) { return side == NarrowMask::unbounded ? Mask::unbounded : side; };
            const NarrowMask narrow{seqlen_q, seqlen_k, left, right, shift};
            const Mask mask{seqlen_q, seqlen_k, wide(left), wide(right), shift};
            for (const int row : {0, 1, 64, seqlen_q / 2, seqlen_q}) {
              const int end = std::min(seqlen_q, row + 128);
              const NarrowMask::Range any = narrow.keys_of_any({row, end}),
                                      all = narrow.keys_of_all({row, end});
              EXPECT_EQ((Range{any.begin, any.end}), mask.keys_of_any({row, end}));
              EXPECT_EQ((Range{all.begin, all.end}), mask.keys_of_all({row, end}));
              for (const int key : {0, 64, seqlen_k / 2, seqlen_k}) {
                const int past = std::min(seqlen_k, key + 128);
                const NarrowMask::Range rows = narrow.rows_of_any({key, past});
                EXPECT_EQ((Range{rows.begin, rows.end}), mask.rows_of_any({key, past}));
                for (int i = 0; i < 16 && row + i < seqlen_q; i += 15) {
                  for (const int j : {0, 1, 127})
                    EXPECT_EQ(narrow.tile(row, key).sees(i, j), mask.tile(row, key).sees(i, j))
                        << row + i << ' ' << key + j;
                }
              }
            }
          }
        }
      }
    }
  }
}

// FlashAttention's documented example: seqlen_q 5, seqlen_k 2, bottom-right: three empty rows.
TEST(Mask, CausalBottomRightTall) {
  const Mask mask{5, 2, Mask::unbounded, 0, 2 - 5};
  const std::vector<long long> seen = {0, 0, 0, 1, 2};
  for (long long i = 0; i < 5; ++i) EXPECT_EQ(mask.keys_of_row(i).size(), seen[i]) << i;
}

// The mask of a tile says what keys_of_row says.
TEST(Mask, ATileSeesWhatItsRowsSee) {
  for (const long long left : {0LL, 3LL, 40LL, Mask::unbounded}) {
    for (const long long right : {0LL, 5LL, Mask::unbounded}) {
      for (const long long shift : {-9LL, 0LL, 13LL}) {
        const Mask mask{50, 37, left, right, shift};
        for (const long long query : {0LL, 7LL, 32LL}) {
          for (const long long key : {0LL, 8LL, 24LL, 40LL}) {
            const TileMask tile = mask.tile(query, key);
            bool all = true;
            for (int i = 0; i < 16; ++i) {
              for (int j = 0; j < 16; ++j) {
                const bool seen = mask.keys_of_row(query + i).contains(key + j);
                EXPECT_EQ(tile.sees(i, j), seen) << query + i << ' ' << key + j;
                all = all && seen;
              }
            }
            EXPECT_EQ(tile.sees_all(16, 16), all);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
