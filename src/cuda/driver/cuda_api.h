// The part of the CUDA driver's ABI that is used, declared here so that no CUDA header is needed. The driver
// keeps these signatures for ever; a changed function gets a new name (_v2).
#pragma once

#include <cstddef>
#include <string>

#include "cuda/driver/library.h"

namespace tessera::cuda {

using CuResult = int;
using CuDevice = int;
using CuPointer = unsigned long long;
using CuContext = void*;
using CuModule = void*;
using CuFunction = void*;
using CuStream = void*;

namespace cu {

inline constexpr CuResult success = 0;
inline constexpr CuResult invalid_value = 1;
inline constexpr CuResult not_initialized = 3;
inline constexpr CuResult no_device = 100;
inline constexpr CuResult invalid_image = 200;
inline constexpr CuResult no_binary_for_gpu = 209;
inline constexpr CuResult invalid_ptx = 218;
inline constexpr CuResult unsupported_ptx_version = 222;
inline constexpr CuResult invalid_source = 300;
inline constexpr CuResult not_found = 500;
inline constexpr CuResult not_supported = 801;

// CUdevice_attribute
inline constexpr int multiprocessor_count = 16;
inline constexpr int max_threads_per_multiprocessor = 39;
inline constexpr int l2_cache_size = 38;
inline constexpr int compute_capability_major = 75;
inline constexpr int compute_capability_minor = 76;
inline constexpr int max_shared_memory_per_multiprocessor = 81;
inline constexpr int max_shared_memory_per_block_optin = 97;

// CUfunction_attribute
inline constexpr int max_dynamic_shared_size_bytes = 8;

// CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion and -FloatOOBfill
inline constexpr int tensor_map_uint16 = 1;
inline constexpr int tensor_map_interleave_none = 0;
inline constexpr int tensor_map_swizzle_64b = 2, tensor_map_swizzle_128b = 3;
inline constexpr int tensor_map_promotion_256b = 3;
inline constexpr int tensor_map_fill_zeros = 0;

// CUlaunchAttributeID
inline constexpr int programmatic_stream_serialization = 6;

// CUstreamCaptureMode
inline constexpr int capture_mode_relaxed = 2;

}  // namespace cu

// CUlaunchAttribute and CUlaunchConfig.
struct CuLaunchAttribute {
  int id;
  alignas(8) unsigned char value[64];
};
struct CuLaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  CuStream stream;
  CuLaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(CuLaunchAttribute) == 72 && sizeof(CuLaunchConfig) == 56);

struct CudaApi {
  CuResult (*init)(unsigned flags);
  CuResult (*driver_get_version)(int* version);
  CuResult (*get_error_name)(CuResult error, const char** text);
  CuResult (*get_error_string)(CuResult error, const char** text);
  CuResult (*device_get_count)(int* count);
  CuResult (*device_get)(CuDevice* device, int ordinal);
  CuResult (*device_get_name)(char* name, int size, CuDevice device);
  CuResult (*device_get_attribute)(int* value, int attribute, CuDevice device);
  CuResult (*primary_ctx_retain)(CuContext* context, CuDevice device);
  CuResult (*ctx_get_current)(CuContext* context);
  CuResult (*ctx_get_device)(CuDevice* device);
  CuResult (*ctx_push_current)(CuContext context);
  CuResult (*ctx_pop_current)(CuContext* context);
  CuResult (*ctx_get_id)(CuContext context, unsigned long long* id);  // CUDA 12; null before
  CuResult (*module_load_data)(CuModule* module, const void* image);
  CuResult (*module_get_function)(CuFunction* function, CuModule module, const char* name);
  CuResult (*module_unload)(CuModule module);
  CuResult (*func_set_attribute)(CuFunction function, int attribute, int value);
  CuResult (*launch_kernel)(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                            CuStream stream, void** params, void** extra);
  CuResult (*launch_kernel_ex)(const CuLaunchConfig* config, CuFunction function, void** params,
                               void** extra);  // CUDA 12; null before
  CuResult (*occupancy)(int* blocks, CuFunction function, int threads, std::size_t dynamic_shared);
  CuResult (*exchange_capture_mode)(int* mode);
  CuResult (*tensor_map_encode)(void* map, int type, unsigned rank, void* data,
                                const unsigned long long* extents, const unsigned long long* strides,
                                const unsigned* box, const unsigned* element_strides, int interleave,
                                int swizzle, int promotion, int fill);  // CUDA 12; null before
  CuResult (*mem_alloc)(CuPointer* data, std::size_t bytes);
  CuResult (*mem_free)(CuPointer data);
  CuResult (*memset_d8)(CuPointer data, unsigned char value, std::size_t bytes, CuStream stream);
  CuResult (*memcpy_to_device)(CuPointer to, const void* from, std::size_t bytes, CuStream stream);
  CuResult (*memcpy_to_host)(void* to, CuPointer from, std::size_t bytes, CuStream stream);
  CuResult (*stream_synchronize)(CuStream stream);
};

// Resolves every function; an error names the one that the library lacks.
[[nodiscard]] Result<CudaApi> resolve_cuda(const Library& library);

// "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
[[nodiscard]] std::string error_text(const CudaApi& api, CuResult error);
// ok, or `what: error_text`
[[nodiscard]] Status checked(const CudaApi& api, CuResult result, const std::string& what);

// The driver, opened and initialised once; an error: why there is none. A child of fork() gets an error, too:
// CUDA does not survive it.
[[nodiscard]] Result<const CudaApi*> cuda_api();

}  // namespace tessera::cuda
