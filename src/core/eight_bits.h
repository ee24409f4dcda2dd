// Rounding to the dtypes of 8-bit caches: to nearest even; what is beyond them becomes the nearest that they
// have. Host and device.
#pragma once

#include "core/host_device.h"

namespace tessera {

// The bits of float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity; NaN has all seven set, and
// stays.
[[nodiscard]] TESSERA_HD constexpr unsigned char float8_bits(float x) {
  const auto bits = __builtin_bit_cast(unsigned, x);
  const unsigned sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<unsigned char>(sign | 0x7Fu);
  if (magnitude >= 0x43E00000u) return static_cast<unsigned char>(sign | 0x7Eu);  // 448, the largest
  if (magnitude < 0x3C800000u) {
    // Subnormal: adding 2^14 leaves the value, rounded to a multiple of 2^-9, in the low mantissa bits.
    const float shifted = __builtin_bit_cast(float, magnitude) + 16384.0f;
    return static_cast<unsigned char>(sign | (__builtin_bit_cast(unsigned, shifted) - 0x46800000u));
  }
  const unsigned rounded = magnitude - (120u << 23) + 0x7FFFFu + (magnitude >> 20 & 1u);
  return static_cast<unsigned char>(sign | rounded >> 20);
}

// From -127 to 127; NaN becomes 0.
[[nodiscard]] TESSERA_HD constexpr signed char int8_number(float x) {
  if (!(x > -127.0f)) return x == x ? -127 : 0;
  if (x >= 127.0f) return 127;
  // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low mantissa bits.
  return static_cast<signed char>(__builtin_bit_cast(unsigned, x + 12582912.0f) - 0x4B400000u);
}

}  // namespace tessera
