// Highway, for the one target that TESSERA_CPU_TARGET names (HWY_AVX2, ...) and no other: the build compiles
// target.cpp once for each. Only what stands between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE may use
// that target's instructions, so no inline function of another header can carry them into other objects.
#pragma once

#include <hwy/detect_targets.h>

#undef HWY_TARGET
#define HWY_TARGET TESSERA_CPU_TARGET

#include <hwy/cache_control.h>
#include <hwy/highway.h>

// Whether this object has dot products of bfloat16 (vdpbf16ps): all CPUs with AMX do.
#if defined(TESSERA_CPU_AMX) || defined(TESSERA_CPU_BF16)
#define TESSERA_CPU_DOTS 1
#else
#define TESSERA_CPU_DOTS 0
#endif
