// The judge: attention and its gradients in double precision, in plain loops over (batch, head, row, key).
// Slow, O(seqlen) scratch a row, and independent of the kernels: it shares Problem with them, and Philox
// (which has its own known-answer test), nothing else. In particular it has its own reading of the mask.
//
// plain_*() are the same loops in the precision of "the plain same-dtype computation" of docs/semantics.md:
// scores and sums in float, the operands of every matmul rounded to the input dtype. Their distance from the
// oracle is the yardstick of the tests' tolerance.
#pragma once

#include <vector>

#include "core/problem.h"

namespace tessera::reference {

// Dense arrays in the order of the problem's own shapes: o (batch, seqlen_q, num_heads_q, head_dim_v) or
// packed (total_q, num_heads_q, head_dim_v); lse (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q);
// dbias in bias's own extent (b, h, i, j); dsinks (num_heads_q). Every element is set, padding included.
struct Outputs {
  std::vector<double> o, lse;
};
struct Gradients {
  std::vector<double> dq, dk, dv, dbias, dsinks;
};

[[nodiscard]] Outputs forward(const Problem& problem);
// From q, k, v, dout and dlse alone: o and lse are computed anew, in double.
[[nodiscard]] Gradients backward(const Problem& problem);

[[nodiscard]] Outputs plain_forward(const Problem& problem);
[[nodiscard]] Gradients plain_backward(const Problem& problem);

// The standard deviation of one rounding's relative error.
[[nodiscard]] double rounding(DType dtype);

// The standard deviation of the errors that a computation like the plain one has, whatever the order of its
// sums, before the results are rounded to their tensors' dtypes: the largest over the elements of each
// tensor. The errors of plain_*() are one draw from it. In a tensor of few elements that draw can be 0 by
// luck (a row that sees one key has p = 1 and ds = 0, exactly), and then says nothing about another
// computation of the same quality.
struct Deviations {
  double o = 0, lse = 0, dq = 0, dk = 0, dv = 0, dbias = 0, dsinks = 0;
};
[[nodiscard]] Deviations deviations(const Problem& backward_problem);

}  // namespace tessera::reference
