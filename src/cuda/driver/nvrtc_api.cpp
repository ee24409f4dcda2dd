#include "cuda/driver/nvrtc_api.h"

#include <dlfcn.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>

#include "cuda/driver/find.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

// NVRTC opens libnvrtc-builtins by its bare name, which only the loader's path would find. One that is loaded
// already is found, too.
void open_builtins_beside(const Library& nvrtc) {
  Dl_info info{};
  if (dladdr(nvrtc.symbol("nvrtcVersion"), &info) == 0 || info.dli_fname == nullptr) return;
  std::error_code error;
  const fs::path file = fs::canonical(info.dli_fname, error);
  if (error) return;
  for (fs::directory_iterator i(file.parent_path(), error), end; !error && i != end; i.increment(error)) {
    const std::string name = i->path().filename().string();
    if (name.starts_with("libnvrtc-builtins") && name.find(".so") != std::string::npos &&
        name.find(".alt.") == std::string::npos)
      dlopen(i->path().c_str(), RTLD_NOW | RTLD_GLOBAL);
  }
}

Result<NvrtcApi> open_and_resolve() {
  const Result<Library> library = open_nvrtc();
  if (!library.ok()) return library.status();
  NvrtcApi api{};
  const char* missing = nullptr;
  const auto need = [&](auto*& function, const char* name) {
    if (!library.value().resolve(function, name) && missing == nullptr) missing = name;
  };
  need(api.version, "nvrtcVersion");
  need(api.get_error_string, "nvrtcGetErrorString");
  need(api.create_program, "nvrtcCreateProgram");
  need(api.destroy_program, "nvrtcDestroyProgram");
  need(api.compile_program, "nvrtcCompileProgram");
  need(api.get_log_size, "nvrtcGetProgramLogSize");
  need(api.get_log, "nvrtcGetProgramLog");
  need(api.get_cubin_size, "nvrtcGetCUBINSize");
  need(api.get_cubin, "nvrtcGetCUBIN");
  if (missing != nullptr) {
    return Status(Code::unsupported,
                  library.value().file() + ": has no " + missing + ", expected NVRTC of CUDA 12 or newer");
  }
  open_builtins_beside(library.value());
  int major = 0;
  int minor = 0;
  if (api.version(&major, &minor) != 0)
    return Status(Code::internal, library.value().file() + ": nvrtcVersion failed");
  api.version_text = std::to_string(major) + "." + std::to_string(minor);
  api.caches = major > 12 || (major == 12 && minor >= 9);
  api.file = library.value().file();
  return api;
}

}  // namespace

Result<const NvrtcApi*> nvrtc_api() {
  static std::atomic<const NvrtcApi*> opened{nullptr};
  if (const NvrtcApi* api = opened.load(std::memory_order_acquire)) return api;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  if (const NvrtcApi* api = opened.load(std::memory_order_acquire)) return api;
  const Result<NvrtcApi> api = open_and_resolve();
  if (!api.ok()) return api.status();
  static const NvrtcApi kept = api.value();
  opened.store(&kept, std::memory_order_release);
  return &kept;
}

}  // namespace tessera::cuda
