#include "cli/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

namespace tessera::cli {
namespace {

double quantile(const std::vector<double>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(std::floor(at));
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return std::lerp(sorted[low], sorted[high], at - std::floor(at));
}

}  // namespace

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return quantile(values, 0.5);
}

Timing time_repeated(const TimingPolicy& policy, const std::function<void(int turn)>& call) {
  int turn = 0;
  for (; turn < policy.warmups; ++turn) call(turn);
  std::vector<double> times;
  double total = 0;
  for (int repeat = 0; repeat < policy.max_repeats; ++repeat, ++turn) {
    if (repeat >= policy.min_repeats && total >= policy.min_seconds) break;
    if (policy.before) policy.before();
    times.push_back(seconds_of([&] { call(turn); }));
    total += times.back();
  }
  std::sort(times.begin(), times.end());
  return {quantile(times, 0.5), quantile(times, 0.1), quantile(times, 0.9), static_cast<int>(times.size())};
}

}  // namespace tessera::cli
