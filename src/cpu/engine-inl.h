// The matmul of this object: AMX tiles or float vectors. Either defines Element, the units to which tiles are
// padded, OperandA and OperandB and the functions that make them, and multiply_tiles<Into>.
#pragma once

#include <cstdint>

#include "cpu/simd-inl.h"

namespace tessera::cpu::TESSERA_CPU_KERNEL {

enum class Into : std::uint8_t {
  overwrite,   // c = a b
  add,         // c = c + a b
  scaled_add,  // c = scale[row] * c + a b
};

// Rows as they lie in the tensor, or a copy of them.
template <class T>
struct RowsOf {
  const T* data;
  std::int64_t ld;
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL

#if defined(TESSERA_CPU_AMX)
#include "cpu/amx-inl.h"
#else
#include "cpu/matmul-inl.h"
#endif
