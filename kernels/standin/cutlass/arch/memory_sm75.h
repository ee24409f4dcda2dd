// Stands in for CUTLASS's ldmatrix (cutlass::Array, cutlass::layout). cutlass/arch/barrier.h includes it for
// the shared address and for what it includes; our ldmatrix is CuTe's.
#pragma once

#include <cute/arch/util.hpp>

#include "cutlass/arch/synclog.hpp"
#include "cutlass/cutlass.h"

namespace cutlass::arch {

CUTLASS_DEVICE unsigned cutlass_get_smem_pointer(const void* pointer) {
  return cute::cast_smem_ptr_to_uint(pointer);
}

}  // namespace cutlass::arch
