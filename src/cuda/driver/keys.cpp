#include "cuda/driver/keys.h"

namespace tessera::cuda {

std::vector<std::string> compile_options(std::string_view arch) {
  return {"-arch=" + std::string(arch), "-std=c++20",
          "-default-device",      // constexpr functions of CUTLASS and core need no __device__
          "--ptxas-options=-v"};  // registers and spills, in the log
}

Digest pack_key(std::string_view text, std::string_view arch, std::string_view sources_hash) {
  Sha256 hash;
  hash.add_text("tessera program 1").add_text(sources_hash).add_text(text);
  for (const std::string& option : compile_options(arch)) hash.add_text(option);
  return hash.finish();
}

Digest cache_key(const Digest& pack_key, std::string_view compiler_version) {
  return Sha256().add(pack_key.data(), pack_key.size()).add_text(compiler_version).finish();
}

}  // namespace tessera::cuda
