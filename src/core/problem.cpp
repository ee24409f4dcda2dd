#include "core/problem.h"

#include "core/half.h"

namespace tessera {

Sequence Problem::sequence(std::int64_t b) const {
  Sequence s;
  s.allocated_q = rows_q;
  s.allocated_k = rows_k;
  if (direction == Direction::decode) {
    if (packed) {
      s.q_begin = cu_seqlens_q[b];
      s.allocated_q = cu_seqlens_q[b + 1] - s.q_begin;
    }
    s.seqlen_q = s.allocated_q;
    if (cache.k_new.given()) {
      s.new_begin = packed ? cu_seqlens_k[b] : 0;
      s.seqlen_new = packed ? cu_seqlens_k[b + 1] - s.new_begin : cache.rows_new;
    }
    s.k_begin = cache.leftpad == nullptr ? 0 : cache.leftpad[b];
    s.seqlen_k = cache.seqlens[b] + s.seqlen_new - s.k_begin;
    return s;
  }
  if (packed) {
    s.q_begin = cu_seqlens_q[b];
    s.k_begin = cu_seqlens_k[b];
    s.allocated_q = cu_seqlens_q[b + 1] - s.q_begin;
    s.allocated_k = cu_seqlens_k[b + 1] - s.k_begin;
  }
  s.seqlen_q = seqused_q == nullptr ? s.allocated_q : seqused_q[b];
  s.seqlen_k = seqused_k == nullptr ? s.allocated_k : seqused_k[b];
  return s;
}

Mask Problem::mask(const Sequence& sequence) const {
  Mask mask;
  mask.seqlen_q = sequence.seqlen_q;
  mask.seqlen_k = sequence.seqlen_k;
  mask.left = window_left;
  mask.right = window_right;
  mask.shift = alignment == Alignment::bottom_right ? sequence.seqlen_k - sequence.seqlen_q : 0;
  return mask;
}

float Problem::sink(std::int64_t h) const {
  const std::int64_t i = h * sinks_stride;
  switch (sinks_dtype) {
    case DType::float16:
      return to_float(static_cast<const float16*>(sinks)[i]);
    case DType::bfloat16:
      return to_float(static_cast<const bfloat16*>(sinks)[i]);
    default:
      return static_cast<const float*>(sinks)[i];
  }
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::int32:
      return "int32";
    case DType::float8_e4m3fn:
      return "float8_e4m3fn";
    case DType::int8:
      return "int8";
  }
  return "unknown";
}

}  // namespace tessera
