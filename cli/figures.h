// The figures that this project holds itself to, measured in one run: fractions of peak, of the dense time,
// and extra memory.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/flags.h"
#include "cli/timing.h"
#include "core/problem.h"

namespace tessera::cli {

struct Figure {
  std::string name;
  double value = 0;
  bool at_least = true;  // else at most
  double limit = 0;
  std::string unit;  // "%" and "x" of something, "MB"

  [[nodiscard]] bool met() const { return at_least ? value >= limit : value <= limit; }
};
void to_json(nlohmann::json& json, const Figure& figure);

// Median time of a call, over rotating sets of buffers so that inputs do not wait in a cache.
[[nodiscard]] Timing time_call(const CallFlags& flags, Direction direction, const TimingPolicy& policy);

struct FigureFlags {
  std::string kernel;
  int threads = 0;
  bool quick = false;  // shorter sequences, looser statistics: a smoke test of the figures
};
[[nodiscard]] std::vector<Figure> measure_figures(const FigureFlags& flags);

}  // namespace tessera::cli
