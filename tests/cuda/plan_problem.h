// A problem for the plan's tests.
#pragma once

#include "core/problem.h"

namespace tessera::cuda {

inline Problem problem_of(std::int64_t batch, std::int64_t seqlen, std::int64_t heads,
                          std::int64_t head_dim) {
  Problem p;
  p.direction = Direction::backward;
  p.dtype = DType::bfloat16;
  p.batch = batch;
  p.rows_q = p.rows_k = p.max_seqlen_q = p.max_seqlen_k = seqlen;
  p.num_heads_q = p.num_heads_k = heads;
  p.head_dim = p.head_dim_v = head_dim;
  return p;
}

}  // namespace tessera::cuda
