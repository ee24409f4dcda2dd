// Scalar conversions between float and the narrower types: round to nearest even, NaN stays NaN. The 8-bit
// types, those of caches, have no infinity: what is beyond them becomes the nearest that they have, and
// int8's NaN is 0.
#pragma once

#include <bit>
#include <cstdint>

#include "core/eight_bits.h"

namespace tessera {

struct bfloat16 {
  std::uint16_t bits;
};
struct float16 {
  std::uint16_t bits;
};
struct float8_e4m3fn {
  std::uint8_t bits;
};

[[nodiscard]] constexpr float to_float(float x) { return x; }

[[nodiscard]] constexpr float to_float(bfloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

[[nodiscard]] constexpr float to_float(float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal or zero: exact
  return sign != 0 ? -value : value;
}

[[nodiscard]] constexpr float to_float(float8_e4m3fn x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x80u) << 24;
  const std::uint32_t magnitude = x.bits & 0x7Fu;
  if (magnitude == 0x7Fu) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (magnitude >= 0x08u) return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-9f;  // subnormal or zero: exact
  return sign != 0 ? -value : value;
}

[[nodiscard]] constexpr float to_float(std::int8_t x) { return x; }

template <class T>
[[nodiscard]] constexpr T from_float(float x);

template <>
[[nodiscard]] constexpr float from_float<float>(float x) {
  return x;
}

template <>
[[nodiscard]] constexpr bfloat16 from_float<bfloat16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<std::uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

template <>
[[nodiscard]] constexpr float16 from_float<float16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<std::uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 0x477FF000u)
    return {static_cast<std::uint16_t>(sign | 0x7C00u)};  // 65520 and up round to inf
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low mantissa bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u))};
  }
  const std::uint32_t rounded = magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u);
  return {static_cast<std::uint16_t>(sign | rounded >> 13)};
}

template <>
[[nodiscard]] constexpr float8_e4m3fn from_float<float8_e4m3fn>(float x) {
  return {float8_bits(x)};
}

template <>
[[nodiscard]] constexpr std::int8_t from_float<std::int8_t>(float x) {
  return int8_number(x);
}

}  // namespace tessera
