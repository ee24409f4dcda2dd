// Decode against the machine's reading: one token a sequence, batch x group x dtype, contiguous and paged,
// each as a share of what a plain loop reads of the same cache on the same threads, in turns.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "cli/figures.h"
#include "cli/flags.h"

namespace tessera::cli {

struct DecodeBenchFlags {
  std::vector<DType> dtypes;
  std::string kernel;
  int threads = 0;
  double min_time = 0.3;
  bool quick = false, print = true;
};

// The rows, printed as they come if asked to.
[[nodiscard]] nlohmann::json measure_decode(const DecodeBenchFlags& flags);
// The least share of a group, of the batches that are to be bound by memory alone.
[[nodiscard]] std::vector<Figure> decode_figures(const nlohmann::json& rows);

}  // namespace tessera::cli
