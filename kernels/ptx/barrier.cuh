// Barriers of some of a block's warps, and of shared memory against the copy engine. CUTLASS's wrappers do
// not tell the compiler that they order memory.
#pragma once

#include <cutlass/arch/barrier.h>

namespace tessera::ptx {

// Counts arrivals and bytes; each of its phases has a parity, the first 0.
using Barrier = cutlass::arch::ClusterTransactionBarrier;

__device__ __forceinline__ void wait(const Barrier& barrier, unsigned parity) {
  barrier.wait(parity);
  asm volatile("" ::: "memory");
}
__device__ __forceinline__ void arrive(const Barrier& barrier) {
  asm volatile("" ::: "memory");
  barrier.arrive();
}
// The same by its address in shared memory.
__device__ __forceinline__ void wait(unsigned address, unsigned parity) {
  asm volatile(
      "{\n.reg .pred there;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
      "@!there bra again;\n}" ::"r"(address),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void arrive(unsigned address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}

// By number, 1 to 15. `threads` of them, of whole warps, meet or arrive.
__device__ __forceinline__ void meet(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// What this thread has written becomes visible to TMA and wgmma.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What other blocks of threads have written, and this thread has seen, is before what TMA does to memory from
// here on.
__device__ __forceinline__ void admit_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace tessera::ptx
