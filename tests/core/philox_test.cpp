#include "core/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <tuple>

namespace tessera {
namespace {

// The three vectors for philox4x32 with 7 rounds of Random123's kat_vectors.
TEST(Philox, KnownAnswers) {
  struct Answer {
    Philox::Block counter;
    unsigned key0, key1;
    Philox::Block expected;
  };
  const Answer answers[] = {
      {{{0, 0, 0, 0}}, 0, 0, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
      {{{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0xa4093822,
       0x299f31d0,
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}},
  };
  for (const Answer& answer : answers) {
    const Philox::Block block = Philox::generate(answer.counter, answer.key0, answer.key1);
    for (int w = 0; w < 4; ++w) EXPECT_EQ(block.word[w], answer.expected.word[w]) << w;
  }
}

TEST(Dropout, BitsComeFromTheBlockOfEightKeys) {
  const Dropout dropout = Dropout::make(0.5, 0x123456789ABCDEF0u, 77);
  for (unsigned key = 0; key < 64; ++key) {
    const Philox::Block block = Philox::generate({{key / 8, 5, 3, 77}}, 0x9ABCDEF0u, 0x12345678u);
    EXPECT_EQ(dropout.bits(3, 5, key), block.word[key % 8 / 2] >> (key % 2 == 0 ? 0 : 16) & 0xFFFFu) << key;
  }
}

TEST(Dropout, OffsetsOf36BitsReachTheCounter) {
  const Dropout dropout = Dropout::make(0.5, 0, Philox::max_offset);
  const Philox::Block counter = dropout.counter(1, 2, 3);
  EXPECT_EQ(counter.word[0], 3u | 0xF0000000u);
  EXPECT_EQ(counter.word[3], 0xFFFFFFFFu);
  // No two different elements share a counter, whatever the offset.
  std::set<std::tuple<unsigned, unsigned, unsigned, unsigned>> seen;
  for (const unsigned long long offset : {0ULL, 1ULL, 1ULL << 32, Philox::max_offset}) {
    const Dropout d = Dropout::make(0.5, 0, offset);
    for (unsigned head = 0; head < 4; ++head) {
      for (unsigned query = 0; query < 4; ++query) {
        for (unsigned block = 0; block < 4; ++block) {
          const auto c = d.counter(head, query, block);
          EXPECT_TRUE(seen.emplace(c.word[0], c.word[1], c.word[2], c.word[3]).second);
        }
      }
    }
  }
}

TEST(Dropout, ThresholdAndScale) {
  EXPECT_FALSE(Dropout::make(0.0, 1, 0).active());
  EXPECT_EQ(Dropout::make(1.0, 1, 0).threshold, 0u);
  EXPECT_EQ(Dropout::make(1.0, 1, 0).scale, 0.0f);
  for (const double p : {0.001, 0.1, 0.25, 0.5, 0.9, 0.999}) {
    const Dropout dropout = Dropout::make(p, 1, 0);
    EXPECT_TRUE(dropout.active()) << p;
    EXPECT_LE(std::abs(dropout.threshold / 65536.0 - (1.0 - p)), 0x1p-17) << p;
    EXPECT_NEAR(dropout.scale * (dropout.threshold / 65536.0), 1.0, 1e-6) << p;
  }
}

class DropoutStatistics : public testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(Probabilities, DropoutStatistics, testing::Values(0.001, 0.1, 0.5, 1.0));

// The rate, and that of neighbouring pairs in each direction, within 5 standard deviations.
TEST_P(DropoutStatistics, KeepRateAndIndependence) {
  const Dropout dropout = Dropout::make(GetParam(), 2026, 11);
  const double keep = dropout.threshold / 65536.0;
  const unsigned heads = 8, queries = 128, keys = 512;
  double kept = 0, kept_with_next_key = 0, kept_with_next_query = 0, kept_with_next_head = 0;
  for (unsigned h = 0; h < heads; ++h) {
    for (unsigned i = 0; i < queries; ++i) {
      for (unsigned j = 0; j < keys; ++j) {
        if (!dropout.keeps(h, i, j)) continue;
        kept += 1;
        kept_with_next_key += dropout.keeps(h, i, j + 1) ? 1 : 0;
        kept_with_next_query += dropout.keeps(h, i + 1, j) ? 1 : 0;
        kept_with_next_head += dropout.keeps(h + 1, i, j) ? 1 : 0;
      }
    }
  }
  const double count = static_cast<double>(heads) * queries * keys;
  const auto expect_rate = [&](double hits, double rate) {
    EXPECT_NEAR(hits / count, rate, 5 * std::sqrt(rate * (1 - rate) / count)) << GetParam();
  };
  expect_rate(kept, keep);
  // Pairs overlap, which at most doubles the variance.
  for (const double pairs : {kept_with_next_key, kept_with_next_query, kept_with_next_head}) {
    EXPECT_NEAR(pairs / count, keep * keep, 8 * std::sqrt(keep * keep * (1 - keep * keep) / count))
        << GetParam();
  }
}

TEST(Dropout, SixteenBitsAreUniform) {
  const Dropout dropout = Dropout::make(0.5, 99, 0);
  std::array<double, 256> high{}, low{};
  const unsigned queries = 512, keys = 1024;
  for (unsigned i = 0; i < queries; ++i) {
    for (unsigned j = 0; j < keys; ++j) {
      const unsigned bits = dropout.bits(0, i, j);
      high[bits >> 8] += 1;
      low[bits & 0xFF] += 1;
    }
  }
  const double expected = static_cast<double>(queries) * keys / 256;
  for (const auto& buckets : {high, low}) {
    double chi_square = 0;
    for (const double count : buckets) chi_square += (count - expected) * (count - expected) / expected;
    EXPECT_NEAR(chi_square, 255.0, 5 * std::sqrt(2 * 255.0));
  }
}

TEST(Dropout, AMaskHasTheBitsOfItsKeys) {
  const Dropout dropout = Dropout::make(0.3, 42, 1234567890123);
  for (unsigned block = 0; block < 40; ++block) {
    const unsigned mask = dropout.keep_mask(5, 17, block);
    for (unsigned i = 0; i < 8; ++i) EXPECT_EQ(mask >> i & 1, dropout.keeps(5, 17, block * 8 + i) ? 1u : 0u);
    EXPECT_LT(mask, 256u);
  }
}

}  // namespace
}  // namespace tessera
