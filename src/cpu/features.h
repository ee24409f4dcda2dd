// What this CPU (and its operating system) lacks for a kernel; empty: nothing.
#pragma once

#include <string>

namespace tessera::cpu {

[[nodiscard]] std::string missing_for_amx();
[[nodiscard]] std::string missing_for_avx512_bf16();
[[nodiscard]] std::string missing_for_avx512();
[[nodiscard]] std::string missing_for_avx2();
[[nodiscard]] std::string missing_for_baseline();

}  // namespace tessera::cpu
