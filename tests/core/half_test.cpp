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

// ---- The 8-bit types.

double float8_value(unsigned bits) {
  const unsigned exponent = bits >> 3 & 15u, mantissa = bits & 7u;
  const double sign = bits >> 7 != 0 ? -1.0 : 1.0;
  if ((bits & 0x7Fu) == 0x7Fu) return std::numeric_limits<double>::quiet_NaN();
  return exponent == 0 ? sign * std::ldexp(mantissa, -9)
                       : sign * std::ldexp(8 + mantissa, static_cast<int>(exponent) - 10);
}

TEST(Float8, EveryValueConvertsToFloatAndBack) {
  for (unsigned bits = 0; bits < 256; ++bits) {
    const double expected = float8_value(bits);
    const float actual = to_float(float8_e4m3fn{static_cast<std::uint8_t>(bits)});
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(actual) : actual == expected) << bits;
    EXPECT_EQ(std::signbit(actual), bits >> 7 != 0) << bits;
    EXPECT_EQ(from_float<float8_e4m3fn>(actual).bits, bits);
  }
  EXPECT_EQ(float8_value(0x7E), 448.0);
}

TEST(Float8, RoundsToNearestEvenAndSaturates) {
  for (unsigned bits = 0; bits < 0x7E; ++bits) {
    const auto middle = static_cast<float>((float8_value(bits) + float8_value(bits + 1)) / 2);
    const unsigned even = bits % 2 == 0 ? bits : bits + 1;
    for (const unsigned sign : {0u, 0x80u}) {
      const auto rounded = [&](float x) { return from_float<float8_e4m3fn>(sign != 0 ? -x : x).bits; };
      EXPECT_EQ(rounded(middle), sign | even) << bits;
      EXPECT_EQ(rounded(std::nextafter(middle, 0.0f)), sign | bits) << bits;
      EXPECT_EQ(rounded(std::nextafter(middle, INFINITY)), sign | (bits + 1)) << bits;
    }
  }
  for (const float x : {448.0f, 449.0f, 464.0f, 480.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(from_float<float8_e4m3fn>(x).bits, 0x7E) << x;
    EXPECT_EQ(from_float<float8_e4m3fn>(-x).bits, 0xFE) << x;
  }
  EXPECT_EQ(from_float<float8_e4m3fn>(NAN).bits & 0x7F, 0x7F);
  EXPECT_EQ(from_float<float8_e4m3fn>(-0.0f).bits, 0x80);
}

TEST(Int8, RoundsToNearestEvenAndSaturates) {
  for (int i = -127; i <= 127; ++i) {
    EXPECT_EQ(from_float<std::int8_t>(static_cast<float>(i)), i);
    if (i == 127) break;
    const float middle = static_cast<float>(i) + 0.5f;
    EXPECT_EQ(from_float<std::int8_t>(middle), i % 2 == 0 ? i : i + 1);
    EXPECT_EQ(from_float<std::int8_t>(std::nextafter(middle, -INFINITY)), i);
    EXPECT_EQ(from_float<std::int8_t>(std::nextafter(middle, INFINITY)), i + 1);
  }
  for (const float x : {127.5f, 128.0f, 1e10f, INFINITY}) {
    EXPECT_EQ(from_float<std::int8_t>(x), 127) << x;
    EXPECT_EQ(from_float<std::int8_t>(-x), -127) << x;
  }
  EXPECT_EQ(from_float<std::int8_t>(NAN), 0);
}

}  // namespace
}  // namespace tessera
