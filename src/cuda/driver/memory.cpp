// Device memory and streams, for tests and tools.
#include "cuda/driver/cuda_api.h"
#include "cuda/driver/driver.h"

namespace tessera::cuda {
namespace {

CuPointer address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

// body(api), its result checked.
template <class Body>
Status with_driver(const char* what, Body body) {
  const Result<const CudaApi*> api = cuda_api();
  if (!api.ok()) return api.status();
  return checked(*api.value(), body(*api.value()), what);
}

}  // namespace

Result<void*> allocate(std::size_t bytes) {
  CuPointer data = 0;
  const Status status =
      with_driver("cuMemAlloc", [&](const CudaApi& api) { return api.mem_alloc(&data, bytes); });
  if (!status.ok())
    return Status(status.code(), status.message() + ", for " + std::to_string(bytes) + " bytes");
  return reinterpret_cast<void*>(data);  // NOLINT(performance-no-int-to-ptr): CUDA's own type is an integer
}

Status free(void* data) {
  return with_driver("cuMemFree", [&](const CudaApi& api) { return api.mem_free(address(data)); });
}

Status fill(void* data, std::uint8_t value, std::size_t bytes, void* stream) {
  return with_driver("cuMemsetD8Async",
                     [&](const CudaApi& api) { return api.memset_d8(address(data), value, bytes, stream); });
}

Status copy_to_device(void* to, const void* from, std::size_t bytes, void* stream) {
  return with_driver("cuMemcpyHtoDAsync", [&](const CudaApi& api) {
    return api.memcpy_to_device(address(to), from, bytes, stream);
  });
}

Status copy_to_host(void* to, const void* from, std::size_t bytes, void* stream) {
  return with_driver("cuMemcpyDtoHAsync", [&](const CudaApi& api) {
    return api.memcpy_to_host(to, address(from), bytes, stream);
  });
}

Status synchronize(void* stream) {
  return with_driver("cuStreamSynchronize",
                     [&](const CudaApi& api) { return api.stream_synchronize(stream); });
}

}  // namespace tessera::cuda
