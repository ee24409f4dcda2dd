// Highway, for the one target that TESSERA_CPU_TARGET names (HWY_AVX2, ...) and no other: the build compiles
// target.cpp once for each. Only what stands between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE may use
// that target's instructions, so no inline function of another header can carry them into other objects.
#pragma once

#include <hwy/detect_targets.h>

#undef HWY_TARGET
#define HWY_TARGET TESSERA_CPU_TARGET

#include <hwy/cache_control.h>
#include <hwy/highway.h>
