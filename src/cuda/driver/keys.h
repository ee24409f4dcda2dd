// What a compiled program is known by.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver/sha256.h"
#include "cuda/driver/sources.h"

namespace tessera::cuda {

// Everything NVRTC is told besides the text.
[[nodiscard]] std::vector<std::string> compile_options(std::string_view arch);

// The pack's key: text, embedded sources, options and arch, but not the compiler: a machine with another
// NVRTC, or with none, finds it.
[[nodiscard]] Digest pack_key(std::string_view text, std::string_view arch,
                              std::string_view sources_hash = embedded_hash());

// The disk cache's: what this compiler makes of it.
[[nodiscard]] Digest cache_key(const Digest& pack_key, std::string_view compiler_version);

}  // namespace tessera::cuda
