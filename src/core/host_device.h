// Marks what host and GPU compile alike.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TESSERA_HD __host__ __device__
#else
#define TESSERA_HD
#endif

namespace tessera {

// The upper half of the 64-bit product. A GPU's compiler makes this and a * b one instruction; a product of
// 64 bits taken apart costs it more.
[[nodiscard]] TESSERA_HD constexpr unsigned multiply_high(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
#endif
}

}  // namespace tessera
