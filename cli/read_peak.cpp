#include "cli/read_peak.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "cli/simd_level.h"
#include "cli/team.h"

namespace tessera::cli {
namespace {

using Vec128 = std::uint64_t __attribute__((vector_size(16)));
using Vec256 = std::uint64_t __attribute__((vector_size(32)));
using Vec512 = std::uint64_t __attribute__((vector_size(64)));

// The sum of a stretch's words, in whole steps of `step` bytes.
constexpr std::size_t step = 512;

template <class Vec>
TESSERA_CLI_INLINE std::uint64_t sum_words(const std::byte* data, std::size_t bytes) {
  constexpr std::size_t width = sizeof(Vec), count = step / width < 8 ? step / width : 8;
  Vec sums[count] = {};
  for (std::size_t at = 0; at + step <= bytes; at += step) {
#pragma GCC unroll 32
    for (std::size_t i = 0; i < step / width; ++i) {
      Vec words;
      std::memcpy(&words, data + at + i * width, width);
      sums[i % count] += words;
    }
  }
  Vec all{};
  for (const Vec& sum : sums) all += sum;
  return all[0] ^ all[1];
}

#if defined(__x86_64__)
TESSERA_CLI_AVX512 std::uint64_t sum_avx512(const std::byte* data, std::size_t bytes) {
  return sum_words<Vec512>(data, bytes);
}
TESSERA_CLI_AVX2 std::uint64_t sum_avx2(const std::byte* data, std::size_t bytes) {
  return sum_words<Vec256>(data, bytes);
}
#endif
std::uint64_t sum_generic(const std::byte* data, std::size_t bytes) { return sum_words<Vec128>(data, bytes); }

using Loop = std::uint64_t (*)(const std::byte*, std::size_t);

Loop widest_loop() {
#if defined(__x86_64__)
  if (simd_level() == SimdLevel::avx512) return sum_avx512;
  if (simd_level() == SimdLevel::avx2) return sum_avx2;
#endif
  return sum_generic;
}

}  // namespace

double measure_read_rate(int threads, const std::vector<Span>& spans) {
  static std::atomic<std::uint64_t> sink;  // a sum that nobody wants would not be made
  constexpr std::size_t piece = 1 << 20;
  static_assert(piece % step == 0);
  std::vector<Span> pieces;
  double bytes = 0;
  for (const Span& span : spans) {
    for (std::size_t at = 0; at + step <= span.bytes; at += piece) {
      const std::size_t size = std::min(piece, (span.bytes - at) / step * step);
      pieces.push_back({static_cast<const std::byte*>(span.data) + at, size});
      bytes += static_cast<double>(size);
    }
  }
  const Loop loop = widest_loop();
  std::atomic<std::size_t> taken = 0;
  const double seconds = seconds_of_team(threads, [&](int) {
    std::uint64_t sum = 0;
    for (std::size_t i = taken++; i < pieces.size(); i = taken++)
      sum += loop(static_cast<const std::byte*>(pieces[i].data), pieces[i].bytes);
    sink += sum;
  });
  return bytes / seconds;
}

}  // namespace tessera::cli
