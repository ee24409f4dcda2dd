// What this CPU (and its operating system) lacks for a kernel; empty: nothing.
#pragma once

#include <string>

namespace tessera::cpu {

[[nodiscard]] std::string missing_for_amx();
[[nodiscard]] std::string missing_for_avx512_bf16();
[[nodiscard]] std::string missing_for_avx512();
[[nodiscard]] std::string missing_for_avx2();
[[nodiscard]] std::string missing_for_baseline();

// What becomes of prefetches that the CPU's buffers have no room for (NOTES.md): they wait, or they are
// forgotten, as AMD's CPUs do. From Zen 5 on lines are best asked for often, and into the first level.
enum class Prefetches { kept, forgotten, forgotten_often };
[[nodiscard]] Prefetches prefetches();

}  // namespace tessera::cpu
