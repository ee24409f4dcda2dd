// Shared libraries opened at run time, and where those of CUDA may lie.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::cuda {

// An opened library. It stays open until the process ends: unloading CUDA's libraries is not safe.
class Library {
 public:
  // file is a path, or a name for the loader's own search.
  [[nodiscard]] static Result<Library> open(const std::string& file);

  [[nodiscard]] void* symbol(const char* name) const;  // null: it has none
  template <class Function>
  bool resolve(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }
  [[nodiscard]] const std::string& file() const { return file_; }

 private:
  Library(void* handle, std::string file) : handle_(handle), file_(std::move(file)) {}
  void* handle_;
  std::string file_;
};

// The value of an environment variable; empty: not set.
[[nodiscard]] std::string environment(const char* name);

// What the process has loaded: the paths of /proc/self/maps, or of a text like it.
[[nodiscard]] std::vector<std::filesystem::path> loaded_files();
[[nodiscard]] std::vector<std::filesystem::path> loaded_files(const std::string& maps);

}  // namespace tessera::cuda
