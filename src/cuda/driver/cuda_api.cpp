#include "cuda/driver/cuda_api.h"

#include <pthread.h>

#include <atomic>

#include "cuda/driver/find.h"

namespace tessera::cuda {
namespace {

std::atomic<bool> forked{false};  // since the driver was initialised

struct Opened {
  CudaApi api{};
  Status status;
};

Opened open_once() {
  Opened opened;
  const Result<Library> library = open_driver();
  if (!library.ok()) return {{}, library.status()};
  const Result<CudaApi> api = resolve_cuda(library.value());
  if (!api.ok()) return {{}, api.status()};
  opened.api = api.value();
  if (const CuResult result = opened.api.init(0); result != cu::success) {
    std::string text = "cuInit: " + error_text(opened.api, result);
    if (result == cu::not_initialized) text += " (was CUDA used in this process's parent, before fork()?)";
    opened.status = Status(Code::unsupported, text);
    return opened;
  }
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
  return opened;
}

}  // namespace

Result<CudaApi> resolve_cuda(const Library& library) {
  CudaApi api{};
  const char* missing = nullptr;
  const auto need = [&](auto*& function, const char* name) {
    if (!library.resolve(function, name) && missing == nullptr) missing = name;
  };
  need(api.init, "cuInit");
  need(api.driver_get_version, "cuDriverGetVersion");
  need(api.get_error_name, "cuGetErrorName");
  need(api.get_error_string, "cuGetErrorString");
  need(api.device_get_count, "cuDeviceGetCount");
  need(api.device_get, "cuDeviceGet");
  need(api.device_get_name, "cuDeviceGetName");
  need(api.device_get_attribute, "cuDeviceGetAttribute");
  need(api.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  need(api.ctx_get_current, "cuCtxGetCurrent");
  need(api.ctx_get_device, "cuCtxGetDevice");
  need(api.ctx_push_current, "cuCtxPushCurrent_v2");
  need(api.ctx_pop_current, "cuCtxPopCurrent_v2");
  need(api.module_load_data, "cuModuleLoadData");
  need(api.module_get_function, "cuModuleGetFunction");
  need(api.module_unload, "cuModuleUnload");
  need(api.func_set_attribute, "cuFuncSetAttribute");
  need(api.launch_kernel, "cuLaunchKernel");
  need(api.occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  need(api.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  need(api.mem_alloc, "cuMemAlloc_v2");
  need(api.mem_free, "cuMemFree_v2");
  need(api.memset_d8, "cuMemsetD8Async");
  need(api.memcpy_to_device, "cuMemcpyHtoDAsync_v2");
  need(api.memcpy_to_host, "cuMemcpyDtoHAsync_v2");
  need(api.stream_synchronize, "cuStreamSynchronize");
  library.resolve(api.ctx_get_id, "cuCtxGetId");
  library.resolve(api.launch_kernel_ex, "cuLaunchKernelEx");
  library.resolve(api.tensor_map_encode, "cuTensorMapEncodeTiled");
  if (missing != nullptr)
    return Status(Code::unsupported,
                  library.file() + ": has no " + missing + ", expected a newer NVIDIA driver");
  return api;
}

std::string error_text(const CudaApi& api, CuResult error) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.get_error_name(error, &name) != cu::success || name == nullptr) name = "CUDA error";
  if (api.get_error_string(error, &text) != cu::success || text == nullptr) text = "unknown to this driver";
  return std::string(name) + " (" + std::to_string(error) + "): " + text;
}

Status checked(const CudaApi& api, CuResult result, const std::string& what) {
  if (result == cu::success) return {};
  return {Code::internal, what + ": " + error_text(api, result)};
}

Result<const CudaApi*> cuda_api() {
  static const Opened opened = open_once();
  if (!opened.status.ok()) return opened.status;
  if (forked.load(std::memory_order_relaxed)) {
    return Status(Code::unsupported,
                  "CUDA was initialised before fork() and cannot be used in the child: start it by spawn, or "
                  "initialise CUDA after fork()");
  }
  return &opened.api;
}

}  // namespace tessera::cuda
