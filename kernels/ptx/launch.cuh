// Kernels of a stream that begin before the one before them has ended (programmatic dependent launch), where
// the launch asks for it; otherwise both do nothing.
#pragma once

namespace tessera::ptx {

// In every thread, before what an earlier kernel writes is read: until all of the stream are done.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's blocks may take their places as soon as all of this one's have theirs.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// To the L2 cache, which all see: a hint, right even if the line changes before it is read.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace tessera::ptx
