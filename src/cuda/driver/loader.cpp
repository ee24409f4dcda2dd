// Kernels in contexts: from memory, the pack, the disk cache or the compiler.
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "cuda/driver/cache.h"
#include "cuda/driver/cuda_api.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/keys.h"
#include "cuda/driver/nvrtc_api.h"
#include "cuda/driver/pack.h"

namespace tessera::cuda {
namespace {

// ---- What is in memory.

// A kernel of a context. It is never removed: others hold pointers to it.
struct Slot {
  std::atomic<bool> ready{false};
  std::atomic<int> dynamic_shared{0};  // that can be launched
  LoadedKernel kernel;

  std::mutex loading;
  std::atomic<unsigned> failures{0};
  Status last_error;
};

struct SlotName {
  std::uint64_t context;
  std::string name;
};
struct SlotView {
  std::uint64_t context;
  std::string_view name;
};
// A look-up by SlotView makes no string.
struct SlotHash {
  using is_transparent = void;
  std::size_t operator()(const SlotView& view) const {
    return std::hash<std::string_view>()(view.name) ^ (view.context * 0x9e3779b97f4a7c15ULL);
  }
  std::size_t operator()(const SlotName& name) const { return (*this)(SlotView{name.context, name.name}); }
};
struct SlotEqual {
  using is_transparent = void;
  template <class A, class B>
  bool operator()(const A& a, const B& b) const {
    return a.context == b.context && a.name == b.name;
  }
};

class Slots {
 public:
  Slot* find(const SlotView& view) {
    const std::shared_lock lock(mutex_);
    const auto found = slots_.find(view);
    return found == slots_.end() ? nullptr : found->second.get();
  }
  Slot& find_or_add(const SlotView& view) {
    if (Slot* slot = find(view)) return *slot;
    const std::unique_lock lock(mutex_);
    std::unique_ptr<Slot>& slot = slots_[{view.context, std::string(view.name)}];
    if (slot == nullptr) slot = std::make_unique<Slot>();
    return *slot;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<SlotName, std::unique_ptr<Slot>, SlotHash, SlotEqual> slots_;
};

Slots& slots() {
  static auto* all = new Slots;  // outlives every static object that launches in its destructor
  return *all;
}

// ---- Modules.

// Loading a module is no work of a stream, but the driver refuses it in a thread that captures one, unless
// asked so.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaApi& api) : api_(api) { api_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { api_.exchange_capture_mode(&mode_); }

 private:
  const CudaApi& api_;
  int mode_ = cu::capture_mode_relaxed;  // then the one before
};

// Errors that are about the image, not about the machine: another image may do.
bool refuses_image(CuResult result) {
  constexpr std::array<CuResult, 8> errors = {
      cu::invalid_value,           cu::invalid_image,  cu::no_binary_for_gpu, cu::invalid_ptx,
      cu::unsupported_ptx_version, cu::invalid_source, cu::not_found,         cu::not_supported};
  for (const CuResult error : errors) {
    if (result == error) return true;
  }
  return false;
}

struct Instance {
  CuFunction function = nullptr;
  CuResult result = cu::success;
};

Instance instantiate(const CudaApi& api, const Cubin& cubin, const std::string& name) {
  const RelaxedCapture relaxed(api);
  CuModule module = nullptr;
  Instance instance;
  instance.result = api.module_load_data(&module, cubin.image.data());
  if (instance.result != cu::success) return instance;
  instance.result = api.module_get_function(&instance.function, module, name.c_str());
  if (instance.result != cu::success) api.module_unload(module);
  return instance;
}

Status allow_dynamic_shared(const CudaApi& api, Slot& slot, int bytes) {
  if (bytes <= slot.dynamic_shared.load(std::memory_order_acquire)) return {};
  const RelaxedCapture relaxed(api);
  if (Status status =
          checked(api, api.func_set_attribute(slot.kernel.function, cu::max_dynamic_shared_size_bytes, bytes),
                  slot.kernel.name + " with " + std::to_string(bytes) + " bytes of dynamic shared memory");
      !status.ok())
    return status;
  slot.dynamic_shared.store(bytes, std::memory_order_release);
  return {};
}

// ---- Finding a cubin.

const Pack& pack() {
  static const Pack opened(Pack::default_path());
  return opened;
}

const DiskCache& disk_cache() {
  static const DiskCache cache = DiskCache::of(environment);
  return cache;
}

// The steps of one load, until one gives a function.
class Loading {
 public:
  Loading(const CudaApi& api, int arch, std::string name, std::string text)
      : api_(api), arch_(arch), name_(std::move(name)), text_(std::move(text)) {}

  Status run() {
    const Digest key = pack_key(text_, arch_name(arch_));
    if (accept(pack().find(key), Origin::pack)) return status_;
    const Result<const NvrtcApi*> compiler = nvrtc_api();
    if (!compiler.ok()) return without_compiler(compiler.status());

    const Digest cached = cache_key(key, compiler.value()->version_text);
    if (accept_cached(cached)) return status_;
    const File lock = disk_cache().lock(cached);
    if (accept_cached(cached)) return status_;  // another process compiled it while this one waited
    const Result<Cubin> cubin = compile(name_, text_, arch_name(arch_));
    if (!cubin.ok()) return cubin.status();
    disk_cache().write(cached, cubin.value());
    if (accept(cubin.value(), Origin::compiled)) return status_;
    disk_cache().remove(cached);
    return {Code::internal, refusal_ + ", which NVRTC " + compiler.value()->version_text + " (" +
                                compiler.value()->file +
                                ") made: expected an NVIDIA driver that is as new, or TESSERA_NVRTC"
                                " set to an NVRTC that is as old (the driver is of CUDA " +
                                driver_version() + ")"};
  }

  [[nodiscard]] CuFunction function() const { return function_; }
  [[nodiscard]] Origin origin() const { return origin_; }
  [[nodiscard]] const Resources& resources() const { return resources_; }

 private:
  // Whether this settles it, by a function or by an error that no other cubin would avoid.
  bool accept(const std::optional<Cubin>& cubin, Origin origin) {
    if (!cubin) return false;
    const Instance instance = instantiate(api_, *cubin, name_);
    if (instance.result == cu::success) {
      function_ = instance.function;
      origin_ = origin;
      resources_ = cubin->resources;
      status_ = {};
      return true;
    }
    status_ = checked(api_, instance.result, "loading " + name_ + " for " + arch_name(arch_));
    refusal_ = "the driver refuses " + name_ + " for " + arch_name(arch_) + " (" +
               error_text(api_, instance.result) + ")";
    return !refuses_image(instance.result);
  }
  bool accept_cached(const Digest& key) {
    const std::optional<Cubin> cubin = disk_cache().read(key);
    if (accept(cubin, Origin::cache)) return true;
    if (cubin) disk_cache().remove(key);
    return false;
  }
  // A GPU runs the cubins of lower minor versions: better than nothing.
  Status without_compiler(const Status& why) {
    for (int arch = arch_ - 1; arch >= arch_ / 10 * 10 && arch_ != 90; --arch) {
      if (accept(pack().find(pack_key(text_, arch_name(arch))), Origin::pack)) return status_;
    }
    return {why.code(), name_ + " is not in the pack and cannot be compiled: " + why.message() +
                            (refusal_.empty() ? "" : "; " + refusal_)};
  }

  const CudaApi& api_;
  int arch_;
  std::string name_, text_;
  Status status_;
  std::string refusal_;
  CuFunction function_ = nullptr;
  Origin origin_ = Origin::compiled;
  Resources resources_;
};

Status load_into(Slot& slot, const CudaApi& api, int arch, std::string_view name,
                 const std::function<std::string()>& text) {
  const auto begin = std::chrono::steady_clock::now();
  Loading loading(api, arch, std::string(name), text());
  if (Status status = loading.run(); !status.ok()) return status;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  slot.kernel = {loading.function(), std::string(name), loading.resources(), loading.origin(), took.count()};
  return {};
}

}  // namespace

const char* name_of(Origin origin) {
  switch (origin) {
    case Origin::pack:
      return "pack";
    case Origin::cache:
      return "cache";
    case Origin::compiled:
      return "compiled";
  }
  return "?";
}

Result<const LoadedKernel*> load(const Context& context, std::string_view name, int dynamic_shared,
                                 const std::function<std::string()>& text) {
  const SlotView view{context.id(), name};
  Slot* known = slots().find(view);
  if (known != nullptr && known->ready.load(std::memory_order_acquire) &&
      dynamic_shared <= known->dynamic_shared.load(std::memory_order_acquire))
    return &known->kernel;

  const Result<const CudaApi*> api = cuda_api();
  if (!api.ok()) return api.status();
  Slot& slot = slots().find_or_add(view);
  const unsigned failures = slot.failures.load();
  const std::scoped_lock lock(slot.loading);
  if (!slot.ready.load(std::memory_order_acquire)) {
    if (slot.failures.load() != failures) return slot.last_error;  // while this thread waited for it
    if (Status status = load_into(slot, *api.value(), context.facts().arch, name, text); !status.ok()) {
      slot.last_error = status;
      slot.failures.fetch_add(1);
      return status;
    }
    slot.ready.store(true, std::memory_order_release);
  }
  if (Status status = allow_dynamic_shared(*api.value(), slot, dynamic_shared); !status.ok()) return status;
  return &slot.kernel;
}

Status launch(const LoadedKernel& kernel, unsigned blocks, unsigned threads, int dynamic_shared, void* stream,
              const void* params, bool early) {
  const Result<const CudaApi*> api = cuda_api();
  if (!api.ok()) return api.status();
  void* arguments[] = {const_cast<void*>(params)};  // the driver copies it
  const auto shared = static_cast<unsigned>(dynamic_shared);
  CuResult result = cu::success;
  if (early && api.value()->launch_kernel_ex != nullptr) {
    CuLaunchAttribute attribute{cu::programmatic_stream_serialization, {1}};
    const CuLaunchConfig config{blocks, 1, 1, threads, 1, 1, shared, stream, &attribute, 1};
    result = api.value()->launch_kernel_ex(&config, kernel.function, arguments, nullptr);
  } else {
    result = api.value()->launch_kernel(kernel.function, blocks, 1, 1, threads, 1, 1, shared, stream,
                                        arguments, nullptr);
  }
  if (result == cu::success) return {};
  return checked(*api.value(), result,
                 "launching " + kernel.name + " with " + std::to_string(blocks) + " blocks of " +
                     std::to_string(threads) + " threads and " + std::to_string(dynamic_shared) +
                     " bytes of dynamic shared memory");
}

Result<int> occupancy(const LoadedKernel& kernel, int threads, int dynamic_shared) {
  const Result<const CudaApi*> api = cuda_api();
  if (!api.ok()) return api.status();
  int blocks = 0;
  const CuResult result =
      api.value()->occupancy(&blocks, kernel.function, threads, static_cast<std::size_t>(dynamic_shared));
  if (Status status = checked(*api.value(), result, "occupancy of " + kernel.name); !status.ok())
    return status;
  return blocks;
}

}  // namespace tessera::cuda
