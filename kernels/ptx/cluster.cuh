// Thread-block clusters, Hopper's: blocks that see each other's shared memory.
#pragma once

namespace tessera::ptx {

#if __CUDA_ARCH__ >= 900
// All threads of all blocks of the cluster; what they wrote to shared memory before is seen behind it.
__device__ __forceinline__ void meet_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// The place in block `rank` of what has this address here.
[[nodiscard]] __device__ __forceinline__ unsigned cluster_address(unsigned address, int rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
[[nodiscard]] __device__ __forceinline__ float4 load_cluster_four(unsigned address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}
[[nodiscard]] __device__ __forceinline__ float2 load_cluster_pair(unsigned address) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
#endif

}  // namespace tessera::ptx
