// From q k^T to the exponent, on fragments: softcap, ALiBi, bias, the mask; and dropout's choice.
//
// Two orientations: forward's tiles have queries as rows and keys as columns, backward's are transposed.
// Where names say row and column they mean those of the fragment; query and key are always the problem's.
#pragma once

#include "core/attention_params.h"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"

namespace tessera::tile {

enum class Orientation { queries_by_keys, keys_by_queries };

// Where a fragment's element (i, j, e) lies in a tile whose warp begins at row 0 of the fragment.
struct Element {
  int row, col;
};
[[nodiscard]] __device__ __forceinline__ Element element(int i, int j, int e) {
  const int lane = threadIdx.x % 32;
  return {i * 16 + lane / 4 + e / 2 * 8, j * 8 + lane % 4 * 2 + e % 2};
}

// Hides the keys that a query does not see. The mask's tile begins with the fragment's first element.
template <int m, int n>
__device__ __forceinline__ void hide(FragmentC (&s)[m][n], const TileMask& mask) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = element(i, 0, half * 2).row, col = threadIdx.x % 4 * 2;
      const int begin = mask.left + row - col, end = min(mask.right + row, mask.end) - col;
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (j * 8 + c < begin || j * 8 + c >= end) s[i][j][half * 2 + c] = -ptx::infinity;
        }
      }
    }
  }
}
template <int n>
__device__ __forceinline__ void hide_transposed(FragmentC (&s)[n], const TileMask& mask) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = threadIdx.x % 32 / 4 + half * 8, query = threadIdx.x % 4 * 2;
    // Of the columns that see this key: left + query <= key < right + query.
    const int begin = key - mask.right + 1 - query, end = key - mask.left + 1 - query;
    const bool there = key < mask.end;
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!there || j * 8 + c < begin || j * 8 + c >= end) s[j][half * 2 + c] = -ptx::infinity;
      }
    }
  }
}

// tanh, by one exponential. Its error is absolute, some 3e-7: where small values matter (softcap is large),
// they come from the series.
[[nodiscard]] __device__ __forceinline__ float tanh(float x, bool small_matters) {
  const float t = 1.0f - 2.0f * ptx::reciprocal(ptx::exp2(fabsf(x) * (2.0f * ptx::log2_e)) + 1.0f);
  float y = copysignf(t, x);
  if (small_matters) {
    const float z = x * x;
    const float series = x + x * z * (-1.0f / 3 + z * (2.0f / 15 - z * (17.0f / 315)));
    y = fabsf(x) < 0.25f ? series : y;
  }
  return y;
}

// The units that a score is in when its terms have been added.
//   raw: those of q k^T, not yet multiplied by softmax_scale. ALiBi, divided by it, is where the sum begins
//   log2: as the exponential wants it
//   natural: where there is a bias, for the lowest float, a customary one, has no multiple by log2 e
enum class Units { raw, log2, natural };
[[nodiscard]] constexpr Units units_of(Terms kind) {
  return has(kind, Terms::bias)                                     ? Units::natural
         : has(kind, Terms::softcap) || has(kind, Terms::any_scale) ? Units::log2
                                                                    : Units::raw;
}

// The terms of one (batch, head) that a block works on.
template <Half type, Terms kind>
struct ScoreTerms {
  static constexpr Units units = units_of(kind);
  static constexpr float unit = units == Units::natural ? 1.0f : ptx::log2_e;

  const AttentionParams& params;
  int b, h;
  int seqlen_q, seqlen_k;

  __device__ ScoreTerms(const AttentionParams& p, const SequenceArg& sequence, int batch_index, int head)
      : params(p), b(batch_index), h(head), seqlen_q(sequence.seqlen_q), seqlen_k(sequence.seqlen_k) {}

  // Before q k^T is added to s.
  template <Orientation orientation, int m, int n>
  __device__ __forceinline__ void start(FragmentC (&s)[m][n], int first_query, int first_key) const {
    clear(s);
    if constexpr (has(kind, Terms::alibi) && units == Units::raw)
      add_alibi<orientation>(s, first_query, first_key, ptx::log2_e / params.scale_log2);
  }

  // s, q k^T and what it began with, becomes the score. derivative(j, e, x) hears the derivative of softcap.
  template <Orientation orientation, int n, class Derivative>
  __device__ __forceinline__ void apply(FragmentC (&s)[n], int first_query, int first_key,
                                        const Derivative& derivative) const {
    if constexpr (has(kind, Terms::softcap)) {
      cap(s, derivative);
    } else if constexpr (units != Units::raw) {
      const float scale = units == Units::natural ? params.scale : params.scale_log2;
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] *= scale;
      }
    }
    if constexpr (has(kind, Terms::alibi) && units != Units::raw)
      add_alibi<orientation>(reinterpret_cast<FragmentC(&)[1][n]>(s), first_query, first_key, unit);
    if constexpr (has(kind, Terms::bias))
      add_bias<orientation == Orientation::queries_by_keys>(s, first_query, first_key);
  }

  // softcap * tanh(softmax_scale * s / softcap), in the score's units.
  template <int n, class Derivative>
  __device__ __forceinline__ void cap(FragmentC (&s)[n], const Derivative& derivative) const {
    const float inner = params.scale / params.softcap, outer = params.softcap * unit;
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) most = fmaxf(most, fabsf(s[j][e]));
    }
    // Scores far below softcap, the usual ones: tanh(x) / x by a polynomial of x^2, to 1e-7 up to |x| = 0.4.
    // Its coefficients take the scales in, if these have powers.
    const bool powers = fabsf(inner) > 1e-6f && fabsf(inner) < 1e3f;
    if (__all_sync(~0u, powers && most * fabsf(inner) <= 0.4f)) {
      const float z = inner * inner, scale = params.scale * unit;
      const float c0 = 0.9999999f * scale, c1 = -0.33331362f * scale * z, c2 = 0.13270977f * scale * z * z,
                  c3 = -0.047553604f * scale * z * z * z;
      const float back = 1.0f / outer;
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x2 = s[j][e] * s[j][e];
          s[j][e] *= fmaf(fmaf(fmaf(c3, x2, c2), x2, c1), x2, c0);
          const float t = s[j][e] * back;
          derivative(j, e, 1.0f - t * t);
        }
      }
      return;
    }
    const bool small_matters = params.softcap > 512.0f;
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float t = tanh(s[j][e] * inner, small_matters);
        s[j][e] = outer * t;
        derivative(j, e, 1.0f - t * t);
      }
    }
  }

  // times: the units of s for one natural unit.
  template <Orientation orientation, int m, int n>
  __device__ __forceinline__ void add_alibi(FragmentC (&s)[m][n], int first_query, int first_key,
                                            float times) const {
    constexpr bool by_keys = orientation == Orientation::queries_by_keys;
    const float slope = params.alibi_slopes[b * params.alibi_batch + h * params.alibi_head] * times;
    // The lane's own part of the distance is added once, the rest is a constant.
    const Element corner = element(0, 0, 0);
    const int lane_part = by_keys ? corner.row - corner.col : corner.col - corner.row;
    const float own =
        static_cast<float>(first_query - first_key + lane_part) + static_cast<float>(seqlen_k - seqlen_q);
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Element at = element(i, j, e);
          const int rest = (at.row - corner.row) - (at.col - corner.col);
          s[i][j][e] -= slope * fabsf(own + static_cast<float>(by_keys ? rest : -rest));
        }
      }
    }
  }

  // Asks for the bias of a tile of queries by keys, a row a thread, so that it is near when it is added.
  template <int rows, int cols>
  __device__ __forceinline__ void prefetch_bias(int first_query, int first_key) const {
    const BiasArg& bias = params.bias;
    const int query = first_query + static_cast<int>(threadIdx.x), width = bias.wide ? 4 : 2;
    if (!bias.pairs || threadIdx.x >= rows || query >= seqlen_q) return;
    const char* row =
        static_cast<const char*>(bias.data) + (bias_begin(0, first_key) + query * bias.row) * width;
    for (int byte = 0; byte < cols * width && first_key + byte / width < seqlen_k; byte += 128)
      cute::prefetch(row + byte);
  }
  [[nodiscard]] __device__ __forceinline__ long long bias_begin(int query, int key) const {
    const BiasArg& bias = params.bias;
    return b * bias.batch + h * bias.head + query * bias.row + key * bias.col;
  }

  // The lane's pairs of two rows, `below` numbers apart.
  template <class Pair, int n, class Number, class Widen>
  static __device__ __forceinline__ void add_pairs(FragmentC (&s)[n], const Number* row, long long below,
                                                   const Widen& widen) {
    const Number* next_row = row + below;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const float2 x = widen(*reinterpret_cast<const Pair*>(row + j * 8));
      const float2 y = widen(*reinterpret_cast<const Pair*>(next_row + j * 8));
      s[j][0] += x.x;
      s[j][1] += x.y;
      s[j][2] += y.x;
      s[j][3] += y.y;
    }
  }

  template <bool by_keys, int n>
  __device__ __forceinline__ void add_bias(FragmentC (&s)[n], int first_query, int first_key) const {
    const BiasArg& bias = params.bias;
    const int queries = seqlen_q - first_query, keys = seqlen_k - first_key;
    if constexpr (by_keys) {
      if (bias.pairs && queries >= 16 && keys >= n * 8) {
        const Element corner = element(0, 0, 0);
        const long long begin = bias_begin(first_query + corner.row, first_key + corner.col);
        if (bias.wide) {
          add_pairs<float2>(s, static_cast<const float*>(bias.data) + begin, bias.row * 8,
                            [](float2 x) { return x; });
        } else {
          add_pairs<unsigned>(s, static_cast<const HalfBits*>(bias.data) + begin, bias.row * 8,
                              [](unsigned x) {
                                return float2{ptx::widen<type>(static_cast<unsigned short>(x)),
                                              ptx::widen<type>(static_cast<unsigned short>(x >> 16))};
                              });
        }
        return;
      }
    }
    const long long begin = bias_begin(first_query, first_key);
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Element at = element(0, j, e);
        const int query = by_keys ? at.row : at.col, key = by_keys ? at.col : at.row;
        if (query < queries && key < keys)
          s[j][e] += load_number<type>(bias.data, begin + query * bias.row + key * bias.col, bias.wide);
      }
    }
  }

  // Sets what dropout drops to 0. n is the number of 8-key tiles.
  template <int n>
  __device__ __forceinline__ void drop(FragmentC (&p)[n], int first_query, int first_key) const {
    static_assert(n % 4 == 0 && n <= 16);
    const int lane = threadIdx.x % 32, quad = lane & ~3, t = lane % 4;
    const auto head_index = static_cast<unsigned>(b) * params.num_heads_q + h;
    const auto key_block = static_cast<unsigned>(first_key) / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto query = static_cast<unsigned>(first_query + lane / 4 + half * 8);
      // Of the n blocks of 8 keys of this row, the lane computes every fourth; the quad shares them.
      unsigned mine = 0;
#pragma unroll
      for (int q = 0; q < n / 4; ++q) {
        mine |= params.dropout.keep_mask(head_index, query, key_block + q * 4 + t) << (8 * q);
        mine = ptx::opaque(mine);
      }
#pragma unroll
      for (int source = 0; source < 4; ++source) {
        const unsigned kept = __shfl_sync(~0u, mine, quad + source) >> (2 * t);
#pragma unroll
        for (int q = 0; q < n / 4; ++q) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if ((kept >> (8 * q + c) & 1) == 0) p[q * 4 + source][half * 2 + c] = 0.0f;
          }
        }
      }
    }
  }

  // The same choice for a transposed tile: bit 4 * (j % 8) + e of word j / 8 says that element e of tile j is
  // kept.
  template <int n>
  __device__ __forceinline__ void kept_transposed(unsigned (&kept)[(n + 7) / 8], int first_query,
                                                  int first_key) const {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const auto head_index = static_cast<unsigned>(b) * params.num_heads_q + h;
    const auto key_block = static_cast<unsigned>(first_key) / 8;
#pragma unroll
    for (int w = 0; w < (n + 7) / 8; ++w) {
      // Tile w * 8 + lane / 4, two columns, two blocks of 8 keys: one byte each.
      unsigned mine = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const auto query = static_cast<unsigned>(first_query + (w * 8 + lane / 4) * 8 + t * 2 + e % 2);
        mine |= params.dropout.keep_mask(head_index, query, key_block + e / 2) << (8 * e);
        mine = ptx::opaque(mine);
      }
      kept[w] = 0;
#pragma unroll
      for (int j = 0; j < (n < 8 ? n : 8); ++j) {
        const unsigned bytes = __shfl_sync(~0u, mine, j * 4 + t) >> (lane / 4);
        kept[w] |= ((bytes & 1) | (bytes >> 7 & 2) | (bytes >> 14 & 4) | (bytes >> 21 & 8)) << (4 * j);
      }
    }
  }
};

}  // namespace tessera::tile
