#include "core/softcap.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tessera {
namespace {

constexpr double log2_e = 1.4426950408889634;

// softcap * tanh(scale * s / softcap), in powers of two.
double exact(double s, double scale, double softcap) {
  return softcap * std::tanh(scale * s / softcap) * log2_e;
}

TEST(CapInExponent, IsTanhWhereItSaysSo) {
  for (const float softcap : {30.0f, 40.0f, 50.0f, 1000.0f}) {
    for (const float scale : {0.02f, 0.125f, 1.0f}) {
      const CapInExponent cap(scale, softcap);
      ASSERT_TRUE(cap.possible);
      const double end = CapInExponent::up_to * softcap / scale;
      for (int i = -1000; i <= 1000; ++i) {
        const double s = end * i / 1000, wanted = exact(s, scale, softcap);
        EXPECT_NEAR(cap(static_cast<float>(s), 0.0f), wanted, 4e-6 * std::abs(wanted) + 1e-12)
            << s << " * " << scale << ", softcap " << softcap;
      }
      EXPECT_NEAR(cap.highest, exact(end, scale, softcap), 1e-5 * softcap);
    }
  }
}

// Who looks at p alone sees from it whether the score was within reach, and hidden keys stay hidden.
TEST(CapInExponent, RisesWithTheScore) {
  const CapInExponent cap(0.1f, 30.0f);
  float before = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(cap(before, 0.0f), before);
  for (float s = -3000.0f; s < 3000.0f; s += 1.0f) {
    const float now = cap(s, 0.0f);
    EXPECT_GT(now, before) << s;
    before = now;
  }
  EXPECT_EQ(cap(std::numeric_limits<float>::infinity(), 3.0f), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(cap(std::numeric_limits<float>::quiet_NaN(), 0.0f)));
}

// Far below, where it falls and tanh does not, a key weighs nothing beside one of the least that is asked
// for.
TEST(CapInExponent, WhatItGetsWrongWeighsNothing) {
  for (const float softcap : {30.0f, 40.0f, 50.0f}) {
    const CapInExponent cap(1.0f, softcap);
    for (double s = -CapInExponent::up_to * softcap; s > -20 * softcap; s -= 0.01 * softcap) {
      const double off = std::abs(std::exp2(exact(s, 1.0, softcap)) - std::exp2(cap(float(s), 0.0f)));
      EXPECT_LT(off / std::exp2(cap.least), 1e-7) << s << ", softcap " << softcap;
    }
  }
}

TEST(CapInExponent, IsNotForSmallCapsOrStrangeScales) {
  EXPECT_FALSE(CapInExponent(0.1f, 29.0f).possible);
  EXPECT_FALSE(CapInExponent(-0.1f, 30.0f).possible);
  EXPECT_FALSE(CapInExponent(0.0f, 30.0f).possible);
  EXPECT_FALSE(CapInExponent(1e-7f, 30.0f).possible);
  EXPECT_FALSE(CapInExponent().possible);
}

}  // namespace
}  // namespace tessera
