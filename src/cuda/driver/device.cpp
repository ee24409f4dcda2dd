// Devices and contexts.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/driver/cuda_api.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/library.h"

namespace tessera::cuda {
namespace {

struct Device {
  DeviceFacts facts;
  CuDevice handle = 0;
};

struct Devices {
  std::vector<Device> all;
  std::string why_none;
};

Status read_facts(const CudaApi& api, int id, Device& device) {
  const auto ask = [&](CuResult result) { return checked(api, result, "CUDA device " + std::to_string(id)); };
  if (Status status = ask(api.device_get(&device.handle, id)); !status.ok()) return status;
  std::array<char, 256> name{};
  if (Status status = ask(api.device_get_name(name.data(), static_cast<int>(name.size()) - 1, device.handle));
      !status.ok())
    return status;
  Status first;
  const auto attribute = [&](int which) {
    int value = 0;
    if (Status status = ask(api.device_get_attribute(&value, which, device.handle));
        !status.ok() && first.ok())
      first = std::move(status);
    return value;
  };
  device.facts.id = id;
  device.facts.name = name.data();
  device.facts.arch = 10 * attribute(cu::compute_capability_major) + attribute(cu::compute_capability_minor);
  device.facts.multiprocessors = attribute(cu::multiprocessor_count);
  // For tests: with few of them a block of threads has several tiles even of a small problem.
  const std::string given = environment("TESSERA_MULTIPROCESSORS");
  int most = 0;
  std::from_chars(given.data(), given.data() + given.size(), most);
  if (most > 0) device.facts.multiprocessors = std::min(device.facts.multiprocessors, most);
  device.facts.threads_per_multiprocessor = attribute(cu::max_threads_per_multiprocessor);
  device.facts.shared_per_block = attribute(cu::max_shared_memory_per_block_optin);
  device.facts.shared_per_multiprocessor = attribute(cu::max_shared_memory_per_multiprocessor);
  device.facts.l2_bytes = attribute(cu::l2_cache_size);
  return first;
}

Devices find_devices() {
  const Result<const CudaApi*> api = cuda_api();
  if (!api.ok()) return {{}, api.status().message()};
  int count = 0;
  if (const Status status = checked(*api.value(), api.value()->device_get_count(&count), "cuDeviceGetCount");
      !status.ok())
    return {{}, status.message()};
  if (count == 0) return {{}, "the NVIDIA driver knows no GPU (is CUDA_VISIBLE_DEVICES empty?)"};
  Devices devices;
  for (int id = 0; id < count; ++id) {
    Device device;
    if (const Status status = read_facts(*api.value(), id, device); !status.ok())
      return {{}, status.message()};
    devices.all.push_back(std::move(device));
  }
  return devices;
}

const Devices& devices() {
  static const Devices found = find_devices();
  return found;
}

Result<const Device*> device_of(int id) {
  const Devices& found = devices();
  if (!found.why_none.empty()) return Status(Code::unsupported, "no GPU can be used: " + found.why_none);
  if (id < 0 || static_cast<std::size_t>(id) >= found.all.size()) {
    return Status(Code::invalid_argument,
                  "device: cuda:" + std::to_string(id) +
                      ", expected cuda:0 to cuda:" + std::to_string(found.all.size() - 1));
  }
  return &found.all[static_cast<std::size_t>(id)];
}

// The device's primary context, made current. It is kept: whoever else uses the device through CUDA's runtime
// (PyTorch) lives in it, too.
Status push_primary(const CudaApi& api, const Device& device) {
  static std::mutex mutex;
  static std::map<CuDevice, CuContext> retained;
  const std::scoped_lock lock(mutex);
  const auto found = retained.find(device.handle);
  if (found != retained.end() && api.ctx_push_current(found->second) == cu::success) return {};
  // Never retained, or destroyed since by somebody's reset of the device.
  CuContext context = nullptr;
  if (Status status =
          checked(api, api.primary_ctx_retain(&context, device.handle), "cuDevicePrimaryCtxRetain");
      !status.ok())
    return status;
  retained[device.handle] = context;
  return checked(api, api.ctx_push_current(context), "cuCtxPushCurrent");
}

// Whether the thread's current context is one of the device.
bool is_current(const CudaApi& api, const Device& device, CuContext& context) {
  CuDevice current = 0;
  return api.ctx_get_current(&context) == cu::success && context != nullptr &&
         api.ctx_get_device(&current) == cu::success && current == device.handle;
}

}  // namespace

const std::string& unavailable() { return devices().why_none; }

int device_count() { return static_cast<int>(devices().all.size()); }

Result<const DeviceFacts*> device_facts(int device_id) {
  const Result<const Device*> device = device_of(device_id);
  if (!device.ok()) return device.status();
  return &device.value()->facts;
}

std::string driver_version() {
  const Result<const CudaApi*> api = cuda_api();
  int version = 0;
  if (!api.ok() || api.value()->driver_get_version(&version) != cu::success) return "";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Result<Context> Context::enter(int device_id) {
  const Result<const Device*> device = device_of(device_id);
  if (!device.ok()) return device.status();
  const Result<const CudaApi*> driver = cuda_api();
  if (!driver.ok()) return driver.status();  // after fork()
  const CudaApi& api = *driver.value();

  CuContext context = nullptr;
  const bool pushed = !is_current(api, *device.value(), context);
  if (pushed) {
    if (Status status = push_primary(api, *device.value()); !status.ok()) return status;
    if (Status status = checked(api, api.ctx_get_current(&context), "cuCtxGetCurrent"); !status.ok())
      return status;
  }
  unsigned long long id = 0;
  // Before CUDA 12 only the address tells contexts apart.
  if (api.ctx_get_id == nullptr || api.ctx_get_id(context, &id) != cu::success)
    id = reinterpret_cast<std::uintptr_t>(context);
  return Context(id, &device.value()->facts, pushed);
}

Context::Context(Context&& other) noexcept
    : id_(other.id_), facts_(other.facts_), pushed_(std::exchange(other.pushed_, false)) {}

Context::~Context() {
  if (!pushed_) return;
  const Result<const CudaApi*> api = cuda_api();
  CuContext context = nullptr;
  if (api.ok()) api.value()->ctx_pop_current(&context);
}

std::string arch_name(int arch) { return "sm_" + std::to_string(arch) + (arch == 90 ? "a" : ""); }

}  // namespace tessera::cuda
