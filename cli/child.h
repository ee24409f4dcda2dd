// Measurements in a process of their own, so that one's memory is not another's peak.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/flags.h"
#include "core/problem.h"

namespace tessera::cli {

struct Measurement {
  double seconds = 0;             // median of the calls
  std::int64_t extra_bytes = 0;   // peak resident memory above inputs and outputs
  std::int64_t tensor_bytes = 0;  // inputs and outputs
};

enum class Implementation : std::uint8_t { tessera, standard };
[[nodiscard]] const char* name_of(Implementation implementation);

// Only shape, window, causal, kernel and threads of flags travel. Throws what the child complains of.
[[nodiscard]] Measurement measure_in_child(Implementation implementation, Direction direction,
                                           const CallFlags& flags);

void to_json(nlohmann::json& json, const Measurement& measurement);
void from_json(const nlohmann::json& json, Measurement& measurement);

}  // namespace tessera::cli
