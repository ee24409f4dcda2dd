// Medians of repeated calls.
#pragma once

#include <functional>
#include <vector>

namespace tessera::cli {

struct TimingPolicy {
  double min_seconds = 0.2;
  int min_repeats = 3, max_repeats = 50;
  int warmups = 1;
  std::function<void()> before = {};  // called before every call that is timed, if given
};

struct Timing {
  double median = 0, p10 = 0, p90 = 0;  // seconds
  int repeats = 0;
};

[[nodiscard]] double median_of(std::vector<double> values);
[[nodiscard]] double seconds_of(const std::function<void()>& call);

// call(turn): turn counts up, so that the caller can rotate its buffers.
[[nodiscard]] Timing time_repeated(const TimingPolicy& policy, const std::function<void(int turn)>& call);

}  // namespace tessera::cli
