#include "cli/fma_peak.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "cli/simd_level.h"
#include "cli/team.h"

namespace tessera::cli {
namespace {

using Vec128 = float __attribute__((vector_size(16)));
using Vec256 = float __attribute__((vector_size(32)));
using Vec512 = float __attribute__((vector_size(64)));

// Two ports with a latency of four or five cycles want ten chains in flight; twelve, and the two operands,
// fit the 16 registers of AVX2.
constexpr int chains = 12;

// The accumulators converge (x = x * 0.5 + 0.5): no infinity, no denormal that would slow the loop.
template <class Vec>
TESSERA_CLI_INLINE void multiply_add(std::int64_t rounds, float* sink) {
  std::array<Vec, chains> x;
  for (int c = 0; c < chains; ++c) x[static_cast<std::size_t>(c)] = Vec{} + static_cast<float>(c) * 0.125f;
  Vec half = Vec{} + 0.5f;
  asm volatile("" : "+m"(half));  // not a constant that the compiler could fold
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) {
      auto& value = x[static_cast<std::size_t>(c)];
      value = value * half + half;
    }
  }
  Vec sum{};
  for (const Vec& value : x) sum += value;
  *sink = sum[0];
}

#if defined(__x86_64__)
TESSERA_CLI_AVX512 void multiply_add_avx512(std::int64_t rounds, float* sink) {
  multiply_add<Vec512>(rounds, sink);
}
TESSERA_CLI_AVX2 void multiply_add_avx2(std::int64_t rounds, float* sink) {
  multiply_add<Vec256>(rounds, sink);
}
#endif
void multiply_add_generic(std::int64_t rounds, float* sink) { multiply_add<Vec128>(rounds, sink); }

struct Loop {
  void (*run)(std::int64_t rounds, float* sink);
  int lanes;
};

Loop widest_loop() {
#if defined(__x86_64__)
  if (simd_level() == SimdLevel::avx512) return {multiply_add_avx512, 16};
  if (simd_level() == SimdLevel::avx2) return {multiply_add_avx2, 8};
#endif
  return {multiply_add_generic, 4};
}

// All threads run the same number of rounds.
double run_once(const Loop& loop, int threads, std::int64_t rounds) {
  struct alignas(64) Slot {
    float sink = 0;
  };
  std::vector<Slot> slots(static_cast<std::size_t>(threads));
  const double seconds = seconds_of_team(
      threads, [&](int thread) { loop.run(rounds, &slots[static_cast<std::size_t>(thread)].sink); });
  return 2.0 * chains * loop.lanes * static_cast<double>(rounds) * threads / seconds;
}

}  // namespace

double measure_fma_rate(int threads, double seconds) {
  const Loop loop = widest_loop();
  // A first run wakes the cores, and tells how many rounds the other needs.
  const double rate = run_once(loop, threads, 1'000'000);
  const double round_flops = 2.0 * chains * loop.lanes * threads;
  return run_once(loop, threads, static_cast<std::int64_t>(seconds * rate / round_flops) + 1);
}

double measure_fma_peak(int threads) {
  double best = 0;
  for (int repeat = 0; repeat < 10; ++repeat) best = std::max(best, measure_fma_rate(threads, 0.1));
  return best;
}

}  // namespace tessera::cli
