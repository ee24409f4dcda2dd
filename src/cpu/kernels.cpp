#include "cpu/kernels.h"

#include <array>

#include "cpu/features.h"
#include "cpu/target.h"

namespace tessera::cpu {
namespace {

std::string takes_cpu(const Problem& problem) {
  return problem.device.device_type == kDLCPU ? "" : "the tensors are not in CPU memory";
}

#if defined(__x86_64__)
std::string takes_bfloat16(const Problem& problem) {
  if (std::string reason = takes_cpu(problem); !reason.empty()) return reason;
  if (problem.direction == Direction::merge) return "merge_states has no products";
  if (problem.dtype == DType::bfloat16) return "";
  return std::string("its products are of bfloat16, q is ") + name_of(problem.dtype);
}
std::string takes_bfloat16_tiles(const Problem& problem) {
  if (std::string reason = takes_bfloat16(problem); !reason.empty()) return reason;
  if (problem.direction == Direction::backward && problem.dout.dtype != DType::bfloat16) {
    return std::string("its tiles are bfloat16, dout is ") + name_of(problem.dout.dtype);
  }
  return "";
}
#endif

constexpr std::array list {
#if defined(__x86_64__)
  Kernel{"cpu_amx",       "bfloat16 tiles of AMX, float32 softmax in AVX-512",
         missing_for_amx, takes_bfloat16_tiles,
         amx::plan,       amx::run},
      Kernel{"cpu_avx512_bf16",       "float32 tiles, AVX-512; decode by dot products of bfloat16",
             missing_for_avx512_bf16, takes_bfloat16,
             avx512_bf16::plan,       avx512_bf16::run},
      Kernel{"cpu_avx512", "float32 tiles, AVX-512", missing_for_avx512, takes_cpu, avx512::plan,
             avx512::run},
      Kernel{"cpu_avx2", "float32 tiles, AVX2 and FMA", missing_for_avx2, takes_cpu, avx2::plan, avx2::run},
#endif
      Kernel{"cpu_baseline", "float32 tiles, SSSE3 or NEON", missing_for_baseline, takes_cpu, baseline::plan,
             baseline::run},
#if defined(TESSERA_EMULATE_AMX)
      Kernel{"cpu_amx_emulated",
             "cpu_amx with its tiles in plain loops, for tests",
             TESSERA_EMULATE_AMX == 512 ? missing_for_avx512 : missing_for_avx2,
             takes_bfloat16_tiles,
             amx_emulated::plan,
             amx_emulated::run},
#endif
};

}  // namespace

std::span<const Kernel> kernels() { return list; }

}  // namespace tessera::cpu
