// Single instructions that CUTLASS has no (light) wrapper for.
#pragma once

#include "core/attention_config.h"

namespace tessera::ptx {

inline constexpr float infinity = __builtin_bit_cast(float, 0x7F800000u);
inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;

// 2^x; -inf gives 0, NaN stays.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Of what is not denormal.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The lowest bits set, `count` of them: none if it is negative, at most 32.
[[nodiscard]] __device__ __forceinline__ unsigned lowest_bits(int count) {
  unsigned y;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(y) : "r"(max(count, 0)));
  return y;
}

// What is the same in all lanes, in a register, by a shuffle, which the compiler does not see through. By
// whole warps. An address, which it would work out anew at every use, or take for one that lanes disagree on:
[[nodiscard]] __device__ __forceinline__ unsigned kept(unsigned x) { return __shfl_sync(~0u, x, 0); }
// A number of the parameters, which it would load again where it is used, and wait. The other lanes give 0,
// or it would see that all agree.
[[nodiscard]] __device__ __forceinline__ float kept(float x) {
  return __shfl_sync(~0u, threadIdx.x % 32 == 0 ? x : 0.0f, 0);
}

// Two floats as two 16-bit numbers, low in the low bits.
template <Half type>
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned y;
  if constexpr (type == Half::bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}
template <Half type>
__device__ __forceinline__ float widen(unsigned short x) {
  float y;
  if constexpr (type == Half::bfloat16) {
    y = __uint_as_float(static_cast<unsigned>(x) << 16);
  } else {
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  }
  return y;
}
template <Half type>
__device__ __forceinline__ float2 widen_pair(unsigned x) {
  if constexpr (type == Half::bfloat16) return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)};
  return {widen<type>(static_cast<unsigned short>(x)), widen<type>(static_cast<unsigned short>(x >> 16))};
}
template <Half type>
__device__ __forceinline__ unsigned short narrow(float x) {
  return static_cast<unsigned short>(pack<type>(x, 0.0f));
}

// blockIdx.x, read anew at every call.
__device__ __forceinline__ unsigned block_index() {
  unsigned x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// threadIdx.x, read anew at every call.
[[nodiscard]] __device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
// threadIdx.x / 32, so that the compiler knows that a warp's lanes agree on it.
[[nodiscard]] __device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }
// The same, worked out anew at every call.
[[nodiscard]] __device__ __forceinline__ int warp_index_again() {
  return __shfl_sync(~0u, thread_index() / 32, 0);
}

#if __CUDA_ARCH__ >= 900
// Adds four neighbouring floats in memory.
__device__ __forceinline__ void add_global(float* address, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
#endif

[[nodiscard]] __device__ __forceinline__ int load_acquire(const int* address) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}
[[nodiscard]] __device__ __forceinline__ int load_relaxed(const int* address) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}
__device__ __forceinline__ void add_relaxed(int* address, int x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}
// One more; what was there before. Not by an addition: the compiler would gather those of a warp's lanes, and
// wait for the result at once.
[[nodiscard]] __device__ __forceinline__ unsigned count_up(int* address) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0xfffffffe;"
               : "=r"(before)
               : "l"(address)
               : "memory");
  return before;
}
// All that this thread has written or seen, also by others, is before all that it does behind it. Half of
// what __threadfence does, which also gives all such fences one order.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void store_release(int* address, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

}  // namespace tessera::ptx
