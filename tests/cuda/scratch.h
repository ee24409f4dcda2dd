// What the tests of src/cuda/driver share: a folder of their own, child processes, a small program.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "cuda/driver/driver.h"

namespace tessera::cuda {

// A folder that is gone at the end.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

// An environment that is only this map.
inline auto made_up_environment(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::string() : found->second;
  };
}

// Starts a program with variables added to the environment; its output is nobody's. The id of the process.
inline pid_t start(const std::string& program, const std::vector<std::string>& arguments,
                   const std::map<std::string, std::string>& variables) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> pointers = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  ::execv(program.c_str(), pointers.data());
  ::_exit(127);
}

inline int exit_status(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

inline std::string program_text(const std::string& name) {
  return "extern \"C\" __global__ void " + name + "(const __grid_constant__ unsigned long long p) {\n" +
         "  *reinterpret_cast<int*>(p) = threadIdx.x;\n}\n";
}

// Skips, visibly, what needs the compiler where there is none. ./dev test provides it.
#define TESSERA_NEED_NVRTC() \
  if (::tessera::cuda::compiler_version().empty()) GTEST_SKIP() << "no NVRTC here (./dev test has it)"

}  // namespace tessera::cuda
