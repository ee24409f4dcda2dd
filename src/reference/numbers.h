// Numbers of a tensor's dtype.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/problem.h"

namespace tessera::reference {

inline float load(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::float16:
      return to_float(static_cast<const float16*>(data)[index]);
    case DType::bfloat16:
      return to_float(static_cast<const bfloat16*>(data)[index]);
    case DType::float8_e4m3fn:
      return to_float(static_cast<const float8_e4m3fn*>(data)[index]);
    case DType::int8:
      return to_float(static_cast<const std::int8_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

inline float round_to(DType dtype, float x) {
  switch (dtype) {
    case DType::float16:
      return to_float(from_float<float16>(x));
    case DType::bfloat16:
      return to_float(from_float<bfloat16>(x));
    case DType::float8_e4m3fn:
      return to_float(from_float<float8_e4m3fn>(x));
    case DType::int8:
      return to_float(from_float<std::int8_t>(x));
    default:
      return x;
  }
}

}  // namespace tessera::reference
