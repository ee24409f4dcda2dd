// Shared memory by its own 32-bit addresses.
//
// CUTLASS wraps these instructions for generic pointers. From those the compiler works out every address of
// an unrolled loop by itself, and keeps each in a register of its own: 21 of them spilled in the forward
// kernel for head dim 128. A base that it cannot look into, plus a constant, costs one register.
#pragma once

namespace tessera::ptx {

[[nodiscard]] __device__ __forceinline__ unsigned shared_address(const void* data) {
  return static_cast<unsigned>(__cvta_generic_to_shared(data));
}
// The same number, from where the compiler cannot tell.
[[nodiscard]] __device__ __forceinline__ unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}
[[nodiscard]] __device__ __forceinline__ float* opaque(float* x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// An 8 x 8 matrix of 16-bit numbers, a row of it in four lanes' registers, becomes its transpose.
[[nodiscard]] __device__ __forceinline__ unsigned transpose(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void store_byte(unsigned address, unsigned x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
[[nodiscard]] __device__ __forceinline__ float2 load_pair(unsigned address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
[[nodiscard]] __device__ __forceinline__ int load_word(unsigned address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ void load(float (&x)[4], unsigned address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address));
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3]));
}
__device__ __forceinline__ void store_matrices_transposed(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
}
__device__ __forceinline__ void store(unsigned address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3]));
}
// Adds floats in shared memory to memory, as the copy engine gets to it; it belongs to the thread's next
// group. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void add_bulk(float* to, unsigned from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}
// The same, but it takes the place of what was there.
__device__ __forceinline__ void store_bulk(float* to, unsigned from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
// Until all groups of the thread but the last `n` are in memory; cute::tma_store_wait waits until they have
// been read.
template <int n>
__device__ __forceinline__ void wait_bulk() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory");
}
#endif
// 16 bytes; of them the first `valid` are read, the others become 0.
__device__ __forceinline__ void copy_async(unsigned address, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(valid));
}
// What is read once: the L2 cache lets go of it first.
[[nodiscard]] __device__ __forceinline__ unsigned long long read_once() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return 0x12F0000000000000u;  // as ptxas makes it; worked out, it lies in registers, and each copy moves it
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#endif
}
__device__ __forceinline__ void copy_async(unsigned address, const void* from, int valid,
                                           unsigned long long policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::64B [%0], [%1], 16, %2, %3;" ::"r"(address),
               "l"(from), "r"(valid), "l"(policy));
}
__device__ __forceinline__ void store(unsigned address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w));
}
__device__ __forceinline__ void store(unsigned address, unsigned x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x));
}

}  // namespace tessera::ptx
