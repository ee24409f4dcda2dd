// A libcuda for machines without a GPU: it loads and launches nothing, and counts.
#pragma once

namespace fake {

struct Control {
  // What the next calls do.
  int refuse_loads;  // how many of the next cuModuleLoadData fail
  int load_error;    // with this
  int launch_error;
  int shared_limit;  // cuFuncSetAttribute refuses more
  // What happened.
  int loads, unloads, launches, primary_retained, capture_relaxed_loads;
  unsigned blocks, threads, shared_bytes;
  const void* stream;
  unsigned long long param;
  int depth;  // of the thread's stack of contexts
  // The tensor maps that were made, the first four of them.
  int maps;
  struct Map {
    const void* data;
    unsigned long long extents[4], strides[3];
    unsigned box[4];
    int swizzle;
  } map[4];
  int early = 0;  // launches that may begin before the kernel before them has ended
};

}  // namespace fake

// Two devices, of compute capability 8.6 and 9.0.
extern "C" fake::Control* fake_control();
extern "C" void* fake_create_context(int device);  // not a primary one
extern "C" void fake_reset_primary(int device);    // as cudaDeviceReset does
