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

// The bytes of x as two pairs. across: 0 and 2, 1 and 3; else 0 and 1, 2 and 3.
template <Stored stored, bool across>
__device__ __forceinline__ void widen_bytes(unsigned x, unsigned& left, unsigned& right) {
  constexpr unsigned second = across ? 2 : 1, third = across ? 1 : 2;
  if constexpr (stored == Stored::int8) {
    // The float16 1024 + 128 + n has n + 128, a byte, in its low bits.
    const auto half = [byte = x ^ 0x80808080u](unsigned a, unsigned b) {
      unsigned pair = __byte_perm(byte, 0x64u, 0x4040u | a | b << 8);
      asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x64806480u));
      return pair;
    };
    left = half(0, second);
    right = half(third, 3);
  } else {
#if __CUDA_ARCH__ >= 890
    const unsigned sorted = across ? __byte_perm(x, 0, 0x3120) : x;
    asm("{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(left), "=r"(right)
        : "r"(sorted));
#else
    // In a float16 of the same bits the exponent says 8 less. All ones but the sign, NaN, is the one that
    // carries.
    const auto half = [x](unsigned a, unsigned b) {
      const unsigned high = __byte_perm(x, 0, 0x0404u | a << 4 | b << 12);
      const unsigned bits = high & 0x80008000u | high >> 1 & 0x3F803F80u;
      return bits | bits + 0x00800080u & 0x40004000u;
    };
    left = half(0, second);
    right = half(third, 3);
#endif
  }
}

}  // namespace tessera::ptx
