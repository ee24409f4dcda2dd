// The online softmax of one warp's rows: maximum and sum so far, and what a new block of scores does to them.
#pragma once

#include "tile/fragments.cuh"

namespace tessera::tile {

template <int m>
struct Softmax {
  // A row's reference, which its exponentials are taken from: a maximum that it has had. It follows the
  // true maximum only when that has risen by more than `slack` powers of two: until then p stays below
  // 2^slack, exactly as accurate in floating point, and acc_o need not be rescaled.
  static constexpr float slack = 8.0f;
  // Of reference * scale, if one multiply-add is to make the exponent.
  static constexpr float largest = 1 << 20;

  float reference[m][2];
  float row_sum[m][2];  // of this lane's columns

  __device__ Softmax() {
#pragma unroll
    for (int i = 0; i < m; ++i) {
      reference[i][0] = reference[i][1] = -ptx::infinity;
      row_sum[i][0] = row_sum[i][1] = 0.0f;
    }
  }

  // The largest score of each row.
  template <int n>
  static __device__ __forceinline__ void maxima(const FragmentC (&s)[m][n], float (&maximum)[m][2]) {
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Four maxima side by side, not one long chain.
        float parts[4];
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const float pair = fmaxf(s[i][j][half * 2], s[i][j][half * 2 + 1]);
          parts[j % 4] = j < 4 ? pair : fmaxf(parts[j % 4], pair);
        }
        float most = fmaxf(fmaxf(parts[0], parts[1]), n > 2 ? fmaxf(parts[2], parts[3]) : -ptx::infinity);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        maximum[i][half] = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      }
    }
  }

  // What rows of acc_o are multiplied by: half 0 or 1 of the i-th.
  template <int nv>
  static __device__ __forceinline__ void shrink_rows(FragmentC (&acc_o)[m][nv], int i, int half, float by) {
#pragma unroll
    for (int j = 0; j < nv; ++j) {
      acc_o[i][j][half * 2] *= by;
      acc_o[i][j][half * 2 + 1] *= by;
    }
  }

  // Moves the references to the maxima of a block where they call for it, and row_sum with them. If one of
  // the warp's has moved, shrink(i, half, by) hears what acc_o's rows are to be multiplied by. What a row's
  // exponentials need then lies in factor and offset: p = 2^(factor * s - offset).
  // A reference below `least` moves with every maximum.
  template <class Shrink>
  __device__ __forceinline__ void follow(const float (&maximum)[m][2], float scale, const Shrink& shrink,
                                         float least = -ptx::infinity) {
    float by[m][2];
    bool moved = false;
    factor = scale;
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = reference[i][half], most = maximum[i][half];
        by[i][half] = 1.0f;
        // From -inf to anything, too.
        if ((most - before) * scale > slack || (before < least && most > before)) {
          // A row that has seen nothing has no sum: any factor will do, but not NaN.
          by[i][half] = before == -ptx::infinity ? 0.0f : ptx::exp2((before - most) * scale);
          reference[i][half] = most;
          moved = true;
        }
        // Hidden keys only, so far: -inf - 0, not -inf + inf.
        offset[i][half] = reference[i][half] == -ptx::infinity ? 0.0f : reference[i][half] * scale;
      }
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int i = 0; i < m; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          row_sum[i][half] *= by[i][half];
          shrink(i, half, by[i][half]);
        }
      }
    }
  }

  // Before a block's exponentials.
  template <int n, class Shrink>
  __device__ __forceinline__ void prepare(FragmentC (&s)[m][n], float scale, const Shrink& shrink) {
    float maximum[m][2];
    maxima(s, maximum);
    follow(maximum, scale, shrink);
    // One multiply-add an element, unless the scores are so large that the rounding of reference * scale
    // would show: then the difference first, which is exact.
    bool large = false;
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) large |= fabsf(offset[i][half]) > largest;
    }
    if (__any_sync(~0u, large)) {
      factor = 1.0f;
#pragma unroll
      for (int i = 0; i < m; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float from = reference[i][half] == -ptx::infinity ? 0.0f : reference[i][half];
          offset[i][half] = 0.0f;
#pragma unroll
          for (int j = 0; j < n; ++j) {
            s[i][j][half * 2] = (s[i][j][half * 2] - from) * scale;
            s[i][j][half * 2 + 1] = (s[i][j][half * 2 + 1] - from) * scale;
          }
        }
      }
    }
  }

  // One tile of s becomes p, and joins row_sum. exponent_of(x, offset): of a score x.
  template <class ExponentOf>
  __device__ __forceinline__ void exponentiate(FragmentC& s, int i, const ExponentOf& exponent_of) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = ptx::exp2(exponent_of(s[e], offset[i][e / 2]));
    row_sum[i][0] += s[0] + s[1];
    row_sum[i][1] += s[2] + s[3];
  }
  __device__ __forceinline__ void exponentiate(FragmentC& s, int i) {
    exponentiate(s, i, [this](float x, float from) { return fmaf(x, factor, -from); });
  }

  // Whether every row of the warp has a reference, none of them below `least` nor so large that its rounding
  // would show: then the next block's exponentials can be taken before its maxima are known.
  [[nodiscard]] __device__ __forceinline__ bool ready(float scale, float least) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        all = all && reference[i][half] >= least && fabsf(reference[i][half] * scale) <= largest;
    }
    return __all_sync(~0u, all);
  }

  // What p may come to without its maxima: 2^slack, and no more than 2^highest says in a score's units.
  __device__ __forceinline__ void limits(float highest, float (&limit)[m][2]) const {
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        limit[i][half] = ptx::exp2(fminf(slack, highest - offset[i][half]));
    }
  }

  // A block's exponentials, from the references as they are, and their sums.
  template <int n, class ExponentOf>
  __device__ __forceinline__ void exponentiate_at_once(FragmentC (&s)[m][n], float (&sum)[m][2],
                                                       const ExponentOf& exponent_of) const {
#pragma unroll
    for (int i = 0; i < m; ++i) {
      static_assert(n >= 2);
      float parts[2][2];
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = ptx::exp2(exponent_of(s[i][j][e], offset[i][e / 2]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float pair = s[i][j][half * 2] + s[i][j][half * 2 + 1];
          parts[half][j % 2] = j < 2 ? pair : parts[half][j % 2] + pair;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[i][half] = parts[half][0] + parts[half][1];
    }
  }
  template <int n>
  __device__ __forceinline__ void exponentiate_at_once(FragmentC (&s)[m][n], float (&sum)[m][2]) const {
    exponentiate_at_once(s, sum, [this](float x, float from) { return fmaf(x, factor, -from); });
  }
  // Whether none of them reaches its row's limit: then row_sum gets the sums. Else s is lost.
  [[nodiscard]] __device__ __forceinline__ bool accept(const float (&sum)[m][2], const float (&limit)[m][2]) {
    if (!__all_sync(~0u, below(sum, limit))) return false;
    add(sum);
    return true;
  }
  // The same by a closer look: many that are small come to as much as one that is not.
  template <int n>
  [[nodiscard]] __device__ __forceinline__ bool accept_after_all(const FragmentC (&s)[m][n],
                                                                 const float (&sum)[m][2],
                                                                 const float (&limit)[m][2]) {
    float most[m][2];
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[i][half] = sum[i][half] < ptx::infinity ? 0.0f : ptx::infinity;  // NaN, too
#pragma unroll
        for (int j = 0; j < n; ++j)
          most[i][half] = fmaxf(most[i][half], fmaxf(s[i][j][half * 2], s[i][j][half * 2 + 1]));
      }
    }
    if (!__all_sync(~0u, below(most, limit))) return false;
    add(sum);
    return true;
  }

  // What the i-th rows of acc_o are to be multiplied by to become o, and their lse; scale(half, by) hears
  // of each half. unit is one unit of s in natural units, as lse and sink are.
  template <class Scale>
  __device__ __forceinline__ void conclude(int i, float (&by)[2], float (&lse)[2], float unit, float sink,
                                           bool has_sink, float dropout_scale, const Scale& scale) {
    float most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = row_sum[i][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      most[half] = reference[i][half] == -ptx::infinity ? -ptx::infinity : reference[i][half] * unit;
      by[half] = dropout_scale;
    }
    if (has_sink) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float both = fmaxf(most[half], sink);
        if (both > -ptx::infinity) {
          const float shrink = ptx::exp2((most[half] - both) * ptx::log2_e);
          row_sum[i][half] = row_sum[i][half] * shrink + ptx::exp2((sink - both) * ptx::log2_e);
          by[half] *= shrink;
          most[half] = both;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // No key and no sink: o = 0, lse = -inf. NaN is neither. Else the sum is far from what is denormal: an
      // approximate reciprocal is right to a unit or two. With two rows of tiles a kernel that has no
      // register to spare would spill by it.
      const float sum = row_sum[i][half];
      const bool empty = sum == 0.0f;
      by[half] = empty ? 0.0f : m == 1 ? by[half] * ptx::reciprocal(sum) : by[half] / sum;
      lse[half] = empty ? -ptx::infinity : most[half] + ptx::log2(sum) * ptx::ln_2;
      scale(half, by[half]);
    }
  }

 private:
  __device__ __forceinline__ void add(const float (&sum)[m][2]) {
#pragma unroll
    for (int i = 0; i < m; ++i) {
      row_sum[i][0] += sum[i][0];
      row_sum[i][1] += sum[i][1];
    }
  }
  [[nodiscard]] static __device__ __forceinline__ bool below(const float (&p)[m][2],
                                                             const float (&limit)[m][2]) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < m; ++i) all = all & (p[i][0] < limit[i][0]) & (p[i][1] < limit[i][1]);
    return all;
  }

  float factor;
  float offset[m][2];
};

}  // namespace tessera::tile
