// Memory of the CPU or of a GPU, for examples. libcuda is opened at run time, as the library does it: neither
// CUDA's headers nor its libraries are needed here.
//
//   Device device("cuda");
//   Buffer q(device, bytes);
//   device.upload(q.data(), host, bytes);
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tessera/tessera.hpp>
#include <type_traits>
#include <utility>

namespace example {

// What is used here of the CUDA driver.
struct CudaDriver {
  using Pointer = unsigned long long;

  int (*init)(unsigned);
  int (*error_name)(int, const char**);
  int (*device_get)(int*, int);
  int (*device_name)(char*, int, int);
  int (*device_attribute)(int*, int, int);
  int (*retain_primary)(void**, int);
  int (*push_context)(void*);
  int (*allocate)(Pointer*, std::size_t);
  int (*free)(Pointer);
  int (*upload)(Pointer, const void*, std::size_t, void*);
  int (*download)(void*, Pointer, std::size_t, void*);
  int (*synchronize)(void*);

  CudaDriver() {
    const char* named = std::getenv("TESSERA_CUDA_DRIVER");  // NOLINT(concurrency-mt-unsafe)
    const std::string path = named != nullptr ? named : "libcuda.so.1";
    void* library = dlopen(path.c_str(), RTLD_NOW);  // stays open
    if (library == nullptr) throw std::runtime_error("--device: cuda, but there is no " + path);
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw std::runtime_error(path + " has no " + name);
    };
    find(init, "cuInit");
    find(error_name, "cuGetErrorName");
    find(device_get, "cuDeviceGet");
    find(device_name, "cuDeviceGetName");
    find(device_attribute, "cuDeviceGetAttribute");
    find(retain_primary, "cuDevicePrimaryCtxRetain");
    find(push_context, "cuCtxPushCurrent_v2");
    find(allocate, "cuMemAlloc_v2");
    find(free, "cuMemFree_v2");
    find(upload, "cuMemcpyHtoDAsync_v2");
    find(download, "cuMemcpyDtoHAsync_v2");
    find(synchronize, "cuStreamSynchronize");
  }

  void check(int error, const std::string& what) const {
    if (error == 0) return;
    const char* name = nullptr;
    if (error_name(error, &name) != 0 || name == nullptr) name = "an error that has no name";
    throw std::runtime_error(what + ": " + name);
  }
};

class Device {
 public:
  // "cpu", or "cuda" for the first GPU.
  explicit Device(const std::string& kind) {
    if (kind != "cuda") return;
    cuda_.emplace();
    cuda_->check(cuda_->init(0), "cuInit");
    cuda_->check(cuda_->device_get(&ordinal_, 0), "cuDeviceGet");
    void* context = nullptr;
    cuda_->check(cuda_->retain_primary(&context, ordinal_), "cuDevicePrimaryCtxRetain");
    cuda_->check(cuda_->push_context(context), "cuCtxPushCurrent");
  }

  [[nodiscard]] bool gpu() const { return cuda_.has_value(); }
  [[nodiscard]] DLDevice place() const { return gpu() ? DLDevice{kDLCUDA, 0} : DLDevice{kDLCPU, 0}; }

  [[nodiscard]] std::string name() const {
    if (!gpu()) return "CPU";
    std::array<char, 256> text{};
    cuda_->check(cuda_->device_name(text.data(), static_cast<int>(text.size()), ordinal_), "cuDeviceGetName");
    return text.data();
  }
  // Bytes a second that a GPU's memory is built for, by its clock and the width of its bus; 0: not known.
  [[nodiscard]] double memory_bandwidth() const {
    constexpr int memory_clock_khz = 36, bus_width_bits = 37;
    int clock = 0, width = 0;
    if (!gpu() || cuda_->device_attribute(&clock, memory_clock_khz, ordinal_) != 0 ||
        cuda_->device_attribute(&width, bus_width_bits, ordinal_) != 0)
      return 0;
    return 2.0 * clock * 1e3 * width / 8;  // two transfers a clock
  }

  // Copies are on the default stream, as everything here.
  void upload(void* to, const void* from, std::size_t bytes) const {
    if (!gpu()) {
      std::memcpy(to, from, bytes);
    } else {
      cuda_->check(cuda_->upload(pointer(to), from, bytes, nullptr), "cuMemcpyHtoDAsync");
    }
  }
  void download(void* to, const void* from, std::size_t bytes) const {
    if (!gpu()) {
      std::memcpy(to, from, bytes);
    } else {
      cuda_->check(cuda_->download(to, pointer(from), bytes, nullptr), "cuMemcpyDtoHAsync");
      wait();
    }
  }
  void wait() const {
    if (gpu()) cuda_->check(cuda_->synchronize(nullptr), "cuStreamSynchronize");
  }

 private:
  friend class Buffer;

  static CudaDriver::Pointer pointer(const void* data) { return reinterpret_cast<CudaDriver::Pointer>(data); }

  [[nodiscard]] void* allocate(std::size_t bytes) const {
    if (gpu()) {
      CudaDriver::Pointer data = 0;
      cuda_->check(cuda_->allocate(&data, bytes), "cuMemAlloc of " + std::to_string(bytes) + " bytes");
      return reinterpret_cast<void*>(data);
    }
    constexpr std::size_t huge_page = 2u << 20;
    const std::size_t unit = bytes < huge_page ? 64 : huge_page;
    const std::size_t rounded = (bytes + unit - 1) / unit * unit;
    void* data = std::aligned_alloc(unit, rounded);
    if (data == nullptr) throw std::bad_alloc();
    // A cache is read all over, and translating its addresses takes time: a wish, no more.
    if (unit == huge_page) madvise(data, rounded, MADV_HUGEPAGE);
    std::memset(data, 0, rounded);
    return data;
  }
  void free(void* data) const {
    if (gpu()) {
      cuda_->free(pointer(data));
    } else {
      std::free(data);  // NOLINT(cppcoreguidelines-no-malloc)
    }
  }

  std::optional<CudaDriver> cuda_;
  int ordinal_ = 0;
};

// Memory of a device, which outlives it.
class Buffer {
 public:
  Buffer(const Device& device, std::size_t bytes)
      : device_(&device), data_(device.allocate(bytes == 0 ? 1 : bytes)), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) device_->free(data_);
  }

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] void* at(std::size_t byte) const { return static_cast<std::byte*>(data_) + byte; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  const Device* device_;
  void* data_;
  std::size_t bytes_;
};

}  // namespace example
