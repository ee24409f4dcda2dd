// The numbers of 8-bit caches as float16 ones, four of a register at a time.
#pragma once

#include "core/attention_config.h"

namespace tessera::ptx {

// What a number that widen_bytes has made is to be multiplied by.
[[nodiscard]] __device__ constexpr float byte_unit([[maybe_unused]] Stored stored) {
#if __CUDA_ARCH__ >= 890
  return 1.0f;
#else
  return stored == Stored::float8 ? 256.0f : 1.0f;
#endif
}

// Bytes 0 and 2 of x, and bytes 1 and 3, as pairs.
template <Stored stored>
__device__ __forceinline__ void widen_bytes(unsigned x, unsigned& even, unsigned& odd) {
  if constexpr (stored == Stored::int8) {
    // The float16 1024 + 128 + n has n + 128, a byte, in its low bits.
    constexpr unsigned offset = 0x64806480u;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(even) : "r"(x & 0x00FF00FFu ^ offset), "r"(offset));
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(odd) : "r"(x >> 8 & 0x00FF00FFu ^ offset), "r"(offset));
  } else {
#if __CUDA_ARCH__ >= 890
    const unsigned sorted = __byte_perm(x, 0, 0x3120);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(even) : "h"(static_cast<unsigned short>(sorted)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(odd) : "h"(static_cast<unsigned short>(sorted >> 16)));
#else
    // In a float16 of the same bits the exponent says 8 less. All ones but the sign, NaN, is the one that
    // carries.
    const auto half = [](unsigned high) {
      const unsigned bits = high & 0x80008000u | high >> 1 & 0x3F803F80u;
      return bits | bits + 0x00800080u & 0x40004000u;
    };
    even = half(x << 8);
    odd = half(x);
#endif
  }
}

}  // namespace tessera::ptx
