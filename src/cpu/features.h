// What this CPU (and its operating system) lacks for a kernel; empty: nothing.
#pragma once

#include <string>

namespace tessera::cpu {

[[nodiscard]] std::string missing_for_amx();
[[nodiscard]] std::string missing_for_avx512_bf16();
[[nodiscard]] std::string missing_for_avx512();
[[nodiscard]] std::string missing_for_avx2();
[[nodiscard]] std::string missing_for_baseline();

// How lines are best asked for (NOTES.md). AMD's CPUs forget prefetches that their buffers have no room for:
// up to Zen 4 lines are asked for again, where there is little to do for each; from Zen 5 on often and
// always, into the first level.
enum class Prefetches { ask_once, ask_again, ask_often };
[[nodiscard]] Prefetches prefetches();
// As on another CPU; returns what it was. For tests, while no call runs: sums may be made in another order.
Prefetches set_prefetches(Prefetches value);

}  // namespace tessera::cpu
