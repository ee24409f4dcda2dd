// Where libnvrtc and libcuda are looked for.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cuda/driver/library.h"

namespace tessera::cuda {

// What the search depends on, so that tests can make it up.
struct Surroundings {
  std::function<std::string(const char*)> environment;
  std::vector<std::filesystem::path> loaded;  // files of the process
};
[[nodiscard]] Surroundings surroundings();

// Paths of libnvrtc, best first; a path without a folder is for the loader's own search. TESSERA_NVRTC, if
// set, is the only one: a file, or a folder that has one.
[[nodiscard]] std::vector<std::filesystem::path> nvrtc_candidates(const Surroundings& around);

// The libnvrtc files of a folder, newest major first.
[[nodiscard]] std::vector<std::filesystem::path> nvrtc_in(const std::filesystem::path& folder);

// The first candidate that opens; else an error that says what was tried.
[[nodiscard]] Result<Library> open_nvrtc();
[[nodiscard]] Result<Library> open_driver();

}  // namespace tessera::cuda
