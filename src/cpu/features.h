// What this CPU (and its operating system) lacks for a kernel; empty: nothing.
#pragma once

#include <string>

namespace tessera::cpu {

[[nodiscard]] std::string missing_for_amx();
[[nodiscard]] std::string missing_for_avx512_bf16();
[[nodiscard]] std::string missing_for_avx512();
[[nodiscard]] std::string missing_for_avx2();
[[nodiscard]] std::string missing_for_baseline();

// Whether it forgets prefetches that its buffers have no room for, as AMD's do (NOTES.md).
[[nodiscard]] bool drops_prefetches();

}  // namespace tessera::cpu
