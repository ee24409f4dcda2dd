// From s and dp of a transposed tile to p and ds: what backward and dbias share.
#pragma once

#include "tile/scores.cuh"

namespace tessera::tile {

// lse of a row as p needs it: in the score's units, and for a row that sees nothing so that p is 0, not inf -
// inf.
template <Terms kind>
[[nodiscard]] __device__ __forceinline__ float lse_for_p(float lse) {
  const float x = lse == -ptx::infinity ? ptx::infinity : lse;
  return units_of(kind) == Units::natural ? x : x * ptx::log2_e;
}

// p of a score and its row's lse, as lse_for_p has it.
template <Terms kind>
[[nodiscard]] __device__ __forceinline__ float p_of(float score, float lse, float scale_log2) {
  return ptx::exp2(units_of(kind) == Units::raw       ? fmaf(score, scale_log2, -lse)
                   : units_of(kind) == Units::natural ? (score - lse) * ptx::log2_e
                                                      : score - lse);
}

// s = q k^T becomes p, dropped and scaled as dv needs it; dp = dout v^T becomes ds. lse and delta are those
// of the tile's queries, in shared memory; query0 and key0 its first ones. of_bias: ds is that of the score
// behind softcap.
template <Half type, Terms kind, bool of_bias = false, int n>
__device__ __forceinline__ void gradients(FragmentC (&s)[n], FragmentC (&dp)[n], const float* lse,
                                          const float* delta, const ScoreTerms<type, kind>& terms,
                                          const TileMask& mask, int query0, int key0) {
  const AttentionParams& params = terms.params;
  const int lane_query = threadIdx.x % 4 * 2;
  unsigned kept[(n + 7) / 8];
  constexpr bool drops = has(kind, Terms::dropout);
  if constexpr (drops) terms.template kept_transposed<n>(kept, query0, key0);
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float2 of_rows = *reinterpret_cast<const float2*>(&delta[j * 8 + lane_query]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (drops)
        dp[j][e] = (kept[j / 8] >> (j % 8 * 4 + e) & 1) != 0 ? dp[j][e] * params.dropout.scale : 0.0f;
      dp[j][e] -= e % 2 == 0 ? of_rows.x : of_rows.y;
    }
  }
  using One = FragmentC[1][n];
  terms.template apply<Orientation::keys_by_queries>(
      reinterpret_cast<One&>(s), query0, key0,
      [&](One& scores, float scale) { terms.add_bias_transposed(scores, scale, query0, key0); },
      [&](int j, int e, float x) {
        if constexpr (!of_bias) dp[j][e] *= x;
      });
  if (!mask.sees_all(n * 8, 16)) hide_transposed(s, mask);
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float2 of_rows = *reinterpret_cast<const float2*>(&lse[j * 8 + lane_query]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float p = p_of<kind>(s[j][e], e % 2 == 0 ? of_rows.x : of_rows.y, params.scale_log2);
      dp[j][e] *= p;
      s[j][e] = !drops ? p : (kept[j / 8] >> (j % 8 * 4 + e) & 1) != 0 ? p * params.dropout.scale : 0.0f;
    }
  }
}

// The same in pieces, where there are no extra terms: one tile of s becomes p, one of dp becomes ds.
__device__ __forceinline__ float2 of_tile(const float* rows, int j) {
  return *reinterpret_cast<const float2*>(&rows[j * 8 + threadIdx.x % 4 * 2]);
}
__device__ __forceinline__ void plain_p(FragmentC& s, float2 lse, float scale_log2) {
#pragma unroll
  for (int e = 0; e < 4; ++e) s[e] = ptx::exp2(fmaf(s[e], scale_log2, e % 2 == 0 ? -lse.x : -lse.y));
}
__device__ __forceinline__ void plain_p(FragmentC& s, const float* lse, int j, float scale_log2) {
  plain_p(s, of_tile(lse, j), scale_log2);
}
__device__ __forceinline__ void plain_ds(FragmentC& dp, const FragmentC& p, const float* delta, int j) {
  const float2 of_rows = *reinterpret_cast<const float2*>(&delta[j * 8 + threadIdx.x % 4 * 2]);
#pragma unroll
  for (int e = 0; e < 4; ++e) dp[e] = p[e] * (dp[e] - (e % 2 == 0 ? of_rows.x : of_rows.y));
}

// The same where s and dp are not in one place. pass(j, w) hears of tile j what ds is made of: p times the
// derivative of softcap, with a sign where it was dropped.
template <Half type, Terms kind, int n, class Pass>
__device__ __forceinline__ void weights(FragmentC (&s)[n], const float* lse,
                                        const ScoreTerms<type, kind>& terms, const TileMask& mask, int query0,
                                        int key0, const Pass& pass) {
  const AttentionParams& params = terms.params;
  constexpr bool drops = has(kind, Terms::dropout), caps = has(kind, Terms::softcap);
  unsigned kept[(n + 7) / 8];
  if constexpr (drops) terms.template kept_transposed<n>(kept, query0, key0);
  FragmentC of_cap[caps ? n : 1];
  using One = FragmentC[1][n];
  terms.template apply<Orientation::keys_by_queries>(
      reinterpret_cast<One&>(s), query0, key0,
      [&](One& scores, float scale) { terms.add_bias_transposed(scores, scale, query0, key0); },
      [&](int j, int e, float x) {
        if constexpr (caps) of_cap[j][e] = x;
      });
  if (!mask.sees_all(n * 8, 16)) hide_transposed(s, mask);
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float2 of_rows = *reinterpret_cast<const float2*>(&lse[j * 8 + threadIdx.x % 4 * 2]);
    FragmentC w;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float p = p_of<kind>(s[j][e], e % 2 == 0 ? of_rows.x : of_rows.y, params.scale_log2);
      w[e] = p;
      if constexpr (caps) w[e] *= of_cap[j][e];
      s[j][e] = p;
      if constexpr (drops) {
        const bool keeps = (kept[j / 8] >> (j % 8 * 4 + e) & 1) != 0;
        w[e] = keeps ? w[e] : -w[e];
        s[j][e] = keeps ? p * params.dropout.scale : 0.0f;
      }
    }
    pass(j, w);
  }
}
template <Terms kind>
__device__ __forceinline__ void ds_of_passed(FragmentC& dp, const FragmentC& w, const float* delta, int j,
                                             float dropout_scale) {
  if constexpr (!has(kind, Terms::dropout)) {
    plain_ds(dp, w, delta, j);
  } else {
    const float2 of_rows = *reinterpret_cast<const float2*>(&delta[j * 8 + threadIdx.x % 4 * 2]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool keeps = (__float_as_uint(w[e]) >> 31) == 0;  // of -0, too
      dp[e] = fabsf(w[e]) * ((keeps ? dp[e] * dropout_scale : 0.0f) - (e % 2 == 0 ? of_rows.x : of_rows.y));
    }
  }
}

// c += a b^T: 16 rows of a, 8 * n rows of b. After each step of the depth, meanwhile(step) adds other work to
// the stream.
template <Half type, int depth, int n, class ReadA, class ReadB, class Meanwhile>
__device__ __forceinline__ void multiply_transposed(FragmentC (&c)[n], const ReadA& read_a,
                                                    const ReadB& read_b, const Meanwhile& meanwhile) {
#pragma unroll
  for (int d = 0; d < depth; d += 16) {
    FragmentA a;
    read_a.read_a(a, 0, d);
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      FragmentA b;
      read_b.read_b(b, j * 16, d);
      multiply_add<type>(c[2 * j], a, b[0], b[1]);
      multiply_add<type>(c[2 * j + 1], a, b[2], b[3]);
    }
    meanwhile(d / 16);
  }
}

}  // namespace tessera::tile
