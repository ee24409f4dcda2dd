// Run-time choice of vector width for the command's own loops, without the library's machinery: a body marked
// TESSERA_CLI_INLINE is written once and inlined into one wrapper a level, which the compiler then vectorises
// for that level.
#pragma once

#include <cstdint>

#define TESSERA_CLI_INLINE [[gnu::always_inline]] inline

#if defined(__x86_64__)
#define TESSERA_CLI_AVX2 [[gnu::target("avx2,fma")]]
#define TESSERA_CLI_AVX512 [[gnu::target("avx512f,avx512dq,avx512vl,avx2,fma")]]
#endif

namespace tessera::cli {

enum class SimdLevel : std::uint8_t { generic, avx2, avx512 };

[[nodiscard]] inline SimdLevel simd_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return SimdLevel::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return SimdLevel::avx2;
#endif
  return SimdLevel::generic;
}

[[nodiscard]] inline const char* name_of(SimdLevel level) {
  switch (level) {
    case SimdLevel::avx512:
      return "AVX-512";
    case SimdLevel::avx2:
      return "AVX2 + FMA";
    case SimdLevel::generic:
      break;
  }
  return "baseline";
}

}  // namespace tessera::cli
