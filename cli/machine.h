// Where a figure was measured.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace tessera::cli {

[[nodiscard]] std::string cpu_model();
[[nodiscard]] int resolve_threads(int threads);     // 0: TESSERA_NUM_THREADS, else every core
[[nodiscard]] std::int64_t available_memory();      // bytes; 0 where unknown
[[nodiscard]] std::int64_t last_level_cache();      // the same, of all its parts together
[[nodiscard]] nlohmann::json machine(int threads);  // cpu, threads, version, commit, date

}  // namespace tessera::cli
