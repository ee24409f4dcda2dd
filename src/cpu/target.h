// What an object of target.cpp offers: the kernels of one SIMD target.
#pragma once

#include "core/kernel.h"

#define TESSERA_DECLARE_CPU_TARGET(name)                                 \
  namespace name {                                                       \
  Plan plan(const Problem& problem);                                     \
  Status run(const Problem& problem, const Plan& plan, void* workspace); \
  }

namespace tessera::cpu {

#if defined(__x86_64__)
TESSERA_DECLARE_CPU_TARGET(amx)
TESSERA_DECLARE_CPU_TARGET(avx512_bf16)
TESSERA_DECLARE_CPU_TARGET(avx512)
TESSERA_DECLARE_CPU_TARGET(avx2)
TESSERA_DECLARE_CPU_TARGET(amx_emulated)
#endif
TESSERA_DECLARE_CPU_TARGET(baseline)

}  // namespace tessera::cpu
