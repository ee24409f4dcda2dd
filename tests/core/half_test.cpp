#include "core/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera {
namespace {

// The format, read afresh from its definition: sign, exponent, mantissa.
struct Format {
  int exponent_bits, mantissa_bits;

  [[nodiscard]] double value(unsigned bits) const {
    const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
    const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    const int top = (1 << exponent_bits) - 1, bias = top / 2;
    const double sign = bits >> 15 != 0 ? -1.0 : 1.0;
    if (exponent == top) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : sign * std::numeric_limits<double>::infinity();
    }
    const double fraction = static_cast<double>(mantissa) / static_cast<double>(1u << mantissa_bits);
    return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                         : sign * std::ldexp(1.0 + fraction, exponent - bias);
  }
  [[nodiscard]] unsigned infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
};

template <class T>
constexpr Format format{};
template <>
constexpr Format format<float16>{5, 10};
template <>
constexpr Format format<bfloat16>{8, 7};

template <class T>
class Half : public testing::Test {};
using Types = testing::Types<float16, bfloat16>;
TYPED_TEST_SUITE(Half, Types);

TYPED_TEST(Half, EveryValueConvertsToFloatExactly) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const double expected = format<TypeParam>.value(bits);
    const float actual = to_float(TypeParam{static_cast<std::uint16_t>(bits)});
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << bits;
    } else {
      ASSERT_EQ(actual, expected) << bits;
      ASSERT_EQ(std::signbit(actual), std::signbit(expected)) << bits;
    }
  }
}

TYPED_TEST(Half, EveryValueSurvivesTheRoundTrip) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const float value = to_float(TypeParam{static_cast<std::uint16_t>(bits)});
    const TypeParam back = from_float<TypeParam>(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(back))) << bits;
    } else {
      ASSERT_EQ(back.bits, bits);
    }
  }
}

// Between each value and the next: the midpoint goes to the even one, its neighbours to the nearer one. The
// step past the largest finite value ends in infinity.
TYPED_TEST(Half, RoundsToNearestEven) {
  const Format f = format<TypeParam>;
  for (unsigned bits = 0; bits < f.infinity(); ++bits) {
    const double low = f.value(bits);
    const double high = bits + 1 == f.infinity() ? 2 * low - f.value(bits - 1) : f.value(bits + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(middle, (low + high) / 2);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    for (const unsigned sign : {0u, 0x8000u}) {
      const auto rounded = [&](float x) { return from_float<TypeParam>(sign != 0 ? -x : x).bits; };
      ASSERT_EQ(rounded(middle), sign | even) << bits;
      ASSERT_EQ(rounded(std::nextafter(middle, 0.0f)), sign | bits) << bits;
      ASSERT_EQ(rounded(std::nextafter(middle, INFINITY)), sign | (bits + 1)) << bits;
    }
  }
}

TYPED_TEST(Half, SpecialValues) {
  const unsigned infinity = format<TypeParam>.infinity();
  const float max = std::numeric_limits<float>::max();
  EXPECT_EQ(from_float<TypeParam>(INFINITY).bits, infinity);
  EXPECT_EQ(from_float<TypeParam>(-INFINITY).bits, 0x8000u | infinity);
  EXPECT_EQ(from_float<TypeParam>(max).bits, infinity);
  EXPECT_EQ(from_float<TypeParam>(-max).bits, 0x8000u | infinity);
  EXPECT_EQ(from_float<TypeParam>(-0.0f).bits, 0x8000u);
  EXPECT_EQ(from_float<TypeParam>(std::numeric_limits<float>::denorm_min()).bits, 0u);
  // Every NaN, those whose payload lies in the low bits alone included.
  for (unsigned payload = 1; payload < 1u << 23; payload *= 2) {
    for (const unsigned sign : {0u, 0x80000000u}) {
      const auto nan = std::bit_cast<float>(sign | 0x7F800000u | payload);
      EXPECT_TRUE(std::isnan(to_float(from_float<TypeParam>(nan)))) << payload;
    }
  }
}

}  // namespace
}  // namespace tessera
