#include "cuda/driver/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

namespace tessera::cuda {
namespace {

Status loader_error(const std::string& file) {
  const char* text = dlerror();  // NOLINT(concurrency-mt-unsafe): per thread in every libc with dlopen
  return {Code::unsupported, text == nullptr ? file + ": cannot be opened" : text};
}

}  // namespace

Result<Library> Library::open(const std::string& file) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return loader_error(file);
  return Library(handle, file);
}

void* Library::symbol(const char* name) const { return dlsym(handle_, name); }

std::string environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): only read
  return value == nullptr ? "" : value;
}

std::vector<std::filesystem::path> loaded_files() {
  std::ifstream maps("/proc/self/maps");
  return loaded_files({std::istreambuf_iterator<char>(maps), {}});
}

std::vector<std::filesystem::path> loaded_files(const std::string& maps) {
  std::vector<std::filesystem::path> files;
  std::istringstream lines(maps);
  for (std::string line; std::getline(lines, line);) {
    // address, permissions, offset, device and inode have no slash; the path is the rest.
    const std::size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    std::filesystem::path path = line.substr(slash);
    if (files.empty() || files.back() != path) files.push_back(std::move(path));
  }
  return files;
}

}  // namespace tessera::cuda
