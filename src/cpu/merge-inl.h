// merge_states: two results over different keys of the same queries, to the one over all of them:
//
//   lse = log(e^lse_a + e^lse_b)      o = e^(lse_a - lse) o_a + e^(lse_b - lse) o_b
#pragma once

#include <cmath>

#include "cpu/parallel.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// weight_a a + weight_b b; o may be a or b.
template <class A, class B, class O>
HWY_INLINE void merge_row(const A* a, float weight_a, const B* b, float weight_b, std::int64_t n, O* o) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const Vec x = hn::Mul(set(weight_a), load_as_float(a + i));
    store_from_float(hn::MulAdd(set(weight_b), load_as_float(b + i), x), o + i);
  }
  for (; i < n; ++i) o[i] = from_float<O>(weight_a * to_float(a[i]) + weight_b * to_float(b[i]));
}

HWY_NOINLINE void merge_task(const Problem& problem, std::int64_t b, std::int64_t h) {
  const auto& [o_a, lse_a, o_b, lse_b] = problem.states;
  const auto at = [&](const View& view, std::int64_t s) {
    return static_cast<float*>(view.data) + view.offset(b, s, h);
  };
  for (std::int64_t s = 0; s < problem.rows_q; ++s) {
    const float x = *at(lse_a, s), y = *at(lse_b, s);
    const float most = std::max(x, y);
    // A side without keys has weight 0, and what is in its o does not matter; without any o is 0.
    float weight_a = x == -infinity ? 0.0f : std::exp(x - most),
          weight_b = y == -infinity ? 0.0f : std::exp(y - most);
    const float sum = weight_a + weight_b;
    const bool seen = sum != 0.0f;
    if (seen) {
      weight_a /= sum;
      weight_b /= sum;
    }
    with_type(o_a.dtype, [&](auto* type_a) HWY_ATTR {
      with_type(o_b.dtype, [&](auto* type_b) HWY_ATTR {
        with_type(problem.o.dtype, [&](auto* type_o) HWY_ATTR {
          const auto* from_a = static_cast<decltype(type_a)>(o_a.data) + o_a.offset(b, s, h);
          const auto* from_b = static_cast<decltype(type_b)>(o_b.data) + o_b.offset(b, s, h);
          auto* to = static_cast<decltype(type_o)>(problem.o.data) + problem.o.offset(b, s, h);
          const std::int64_t dim = problem.head_dim_v;
          if (!seen) {
            zero_row(to, dim);
          } else if (weight_b == 0.0f) {
            merge_row(from_a, weight_a, from_a, 0.0f, dim, to);
          } else if (weight_a == 0.0f) {
            merge_row(from_b, weight_b, from_b, 0.0f, dim, to);
          } else {
            merge_row(from_a, weight_a, from_b, weight_b, dim, to);
          }
        });
      });
    });
    if (problem.lse.given()) *at(problem.lse, s) = seen ? most + std::log(sum) : -infinity;
  }
}

HWY_NOINLINE void merge(const Problem& problem, int threads) {
  parallel_for(problem.batch * problem.num_heads_q, threads, [&](std::int64_t index, int) {
    merge_task(problem, index / problem.num_heads_q, index % problem.num_heads_q);
  });
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
