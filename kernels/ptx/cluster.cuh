// Thread-block clusters, Hopper's: blocks that see each other's shared memory.
#pragma once

namespace tessera::ptx {

#if __CUDA_ARCH__ >= 900
// All threads of all blocks of the cluster that have not left arrive, then wait for each other; what they
// wrote to shared memory before they arrived is seen behind the wait.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The place in block `rank` of what has this address here.
[[nodiscard]] __device__ __forceinline__ unsigned cluster_address(unsigned address, int rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void store_cluster(unsigned address, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_cluster(unsigned address, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
#endif

}  // namespace tessera::ptx
