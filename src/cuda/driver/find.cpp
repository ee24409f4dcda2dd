#include "cuda/driver/find.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <system_error>

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::array<const char*, 2> nvrtc_names = {"libnvrtc.so.13", "libnvrtc.so.12"};

// Everything below asks the file system; what it cannot read is not there.
std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator i(folder, error), end; !error && i != end; i.increment(error))
    entries.push_back(i->path());
  std::sort(entries.begin(), entries.end());
  return entries;
}

bool is_nvrtc(const fs::path& file) {
  const std::string name = file.filename().string();
  // Not libnvrtc-builtins and not libnvrtc.alt (a variant for old systems), but a wheel's
  // libnvrtc-1a2b3c4d.so.12.
  return name.starts_with("libnvrtc") && name.find(".so") != std::string::npos &&
         name.find("builtins") == std::string::npos && name.find(".alt.") == std::string::npos;
}

// 13 of libnvrtc.so.13; 0: the name has none.
int major_of(const fs::path& file) {
  const std::string name = file.filename().string();
  const std::size_t suffix = name.find(".so.");
  int major = 0;
  if (suffix == std::string::npos) return 0;
  for (std::size_t i = suffix + 4; i < name.size() && std::isdigit(static_cast<unsigned char>(name[i])) != 0;
       ++i)
    major = 10 * major + (name[i] - '0');
  return major;
}

class Candidates {
 public:
  void add(const fs::path& file) {
    if (std::find(files_.begin(), files_.end(), file) == files_.end()) files_.push_back(file);
  }
  void add_folder(const fs::path& folder) {
    for (const fs::path& file : nvrtc_in(folder)) add(file);
  }
  // nvidia/cu13/lib, nvidia/cuda_nvrtc/lib: NVIDIA's wheels.
  void add_site_packages(const fs::path& folder) {
    for (const fs::path& package : entries_of(folder / "nvidia")) add_folder(package / "lib");
  }
  void add_toolkit(const fs::path& home) {
    add_folder(home / "lib64");
    add_folder(home / "lib");
  }
  [[nodiscard]] std::vector<fs::path> take() { return std::move(files_); }

 private:
  std::vector<fs::path> files_;
};

// site-packages/torch/lib/libtorch.so, site-packages/nvidia/cu13/lib/libcudart.so.13: the folder that has
// nvidia/ is one to four levels up.
void add_neighbours(Candidates& candidates, const fs::path& file) {
  constexpr std::array<std::string_view, 4> known = {"libtorch", "libc10", "libcudart", "libcuda-bindings"};
  const std::string name = file.filename().string();
  const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
  if (std::none_of(known.begin(), known.end(), begins)) return;
  fs::path folder = file.parent_path();
  for (int level = 0; level < 4 && folder.has_relative_path(); ++level) {
    candidates.add_site_packages(folder);
    folder = folder.parent_path();
  }
}

void add_python_prefix(Candidates& candidates, const fs::path& prefix) {
  for (const fs::path& version : entries_of(prefix / "lib")) {
    if (version.filename().string().starts_with("python"))
      candidates.add_site_packages(version / "site-packages");
  }
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : "; ") + part;
  return text;
}

}  // namespace

Surroundings surroundings() { return {environment, loaded_files()}; }

std::vector<fs::path> nvrtc_in(const fs::path& folder) {
  std::vector<fs::path> files = entries_of(folder);
  std::erase_if(files, [](const fs::path& file) { return !is_nvrtc(file); });
  std::stable_sort(files.begin(), files.end(),
                   [](const fs::path& a, const fs::path& b) { return major_of(a) > major_of(b); });
  return files;
}

std::vector<fs::path> nvrtc_candidates(const Surroundings& around) {
  Candidates candidates;
  if (const fs::path given = around.environment("TESSERA_NVRTC"); !given.empty()) {
    std::error_code error;
    if (!fs::is_directory(given, error)) return {given};
    return nvrtc_in(given);
  }
  // What the process has already is what its other users run with.
  for (const fs::path& file : around.loaded) {
    if (is_nvrtc(file)) candidates.add(file);
  }
  for (const char* name : nvrtc_names) candidates.add(name);
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string home = around.environment(name); !home.empty()) candidates.add_toolkit(home);
  }
  candidates.add_toolkit("/usr/local/cuda");
  for (const fs::path& file : around.loaded) add_neighbours(candidates, file);

  const std::string python_path = around.environment("PYTHONPATH");
  for (std::size_t begin = 0; begin < python_path.size();) {
    const std::size_t end = std::min(python_path.find(':', begin), python_path.size());
    if (end > begin) candidates.add_site_packages(python_path.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string prefix = around.environment(name);
    if (prefix.empty()) continue;
    candidates.add_toolkit(prefix);
    add_python_prefix(candidates, prefix);
  }
  return candidates.take();
}

Result<Library> open_nvrtc() {
  const std::vector<fs::path> candidates = nvrtc_candidates(surroundings());
  std::vector<std::string> tried;
  for (const fs::path& candidate : candidates) {
    Result<Library> library = Library::open(candidate.string());
    if (library.ok()) return library;
    tried.push_back(library.status().message());
  }
  if (const std::string given = environment("TESSERA_NVRTC"); !given.empty()) {
    return Status(Code::unsupported, "TESSERA_NVRTC: \"" + given +
                                         "\", expected libnvrtc.so.13 (or .12) or a folder " + "that has it" +
                                         (tried.empty() ? "" : ": " + joined(tried)));
  }
  return Status(Code::unsupported,
                "NVRTC, the compiler of CUDA kernels, was not found (pip install nvidia-cuda-nvrtc, or set "
                "TESSERA_NVRTC to libnvrtc.so.13). Tried: " +
                    joined(tried));
}

Result<Library> open_driver() {
  const std::string given = environment("TESSERA_CUDA_DRIVER");
  Result<Library> library = Library::open(given.empty() ? "libcuda.so.1" : given);
  if (library.ok()) return library;
  if (!given.empty()) {
    return Status(Code::unsupported, "TESSERA_CUDA_DRIVER: \"" + given +
                                         "\", expected libcuda.so.1: " + library.status().message());
  }
  return Status(Code::unsupported, "no NVIDIA driver: " + library.status().message());
}

}  // namespace tessera::cuda
