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
[[nodiscard]] __device__ __forceinline__ Element element(int i, int j, int e, unsigned thread = threadIdx.x) {
  const int lane = thread % 32;
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
      // A bit for each of 32 columns, from the second on: to look at two is an instruction, to compare one is
      // two.
#pragma unroll
      for (int first = 0; first < n; first += 4) {
        const unsigned seen =
            ptx::lowest_bits(end + 1 - first * 8) & ~ptx::lowest_bits(begin + 1 - first * 8);
#pragma unroll
        for (int j = first; j < min(n, first + 4); ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if ((seen & 2u << ((j - first) * 8 + c)) == 0) s[i][j][half * 2 + c] = -ptx::infinity;
          }
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

// The bias of a tile of queries by keys in shared memory, in its own width.
template <bool wide, int rows, int cols>
using BiasTile = SharedTile<rows, wide ? 2 * cols : cols>;
template <bool wide>
struct BiasNumber {
  using Type = HalfBits;
};
template <>
struct BiasNumber<true> {
  using Type = float;
};

// Which keys of a warp's rows dropout keeps, one bit a key. Of the n blocks of 8 keys of a row a lane works
// out every fourth, for the four lanes that share the row. Part by part, so that it can be done among other
// work; in shared memory, for it is made long before it is used, and registers are scarce.
template <int threads, int m, int n>
struct Kept {
  static_assert(n % 4 == 0 && n <= 16);
  static constexpr int bytes = n / 4, parts = m * 2 * bytes;
  unsigned word[m * 2][threads];
};

// What bias and dropout want of a block's shared memory.
template <Terms terms, int rows, int cols, bool there = has(terms, Terms::bias)>
struct BiasShared {
  BiasTile<has(terms, Terms::wide_bias), rows, cols> bias;
};
template <Terms terms, int rows, int cols>
struct BiasShared<terms, rows, cols, false> {};
template <bool there, int threads, int m, int n>
struct DropoutShared {
  Kept<threads, m, n> kept;
};
template <int threads, int m, int n>
struct DropoutShared<false, threads, m, n> {};

// Whether softcap's polynomial is for the rows whose maxima of a block, and references so far, these are.
template <int m>
[[nodiscard]] __device__ __forceinline__ bool holds(const CapInExponent& cap, const float (&maximum)[m][2],
                                                    const float (&reference)[m][2]) {
  bool all = cap.possible;
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = maximum[i][half];
      all = all && most * cap.inner <= cap.up_to && fmaxf(cap(most, 0.0f), reference[i][half]) >= cap.least;
    }
  }
  return __all_sync(~0u, all);
}

// The terms of one (batch, head) that a block works on. scarce: registers are. Then scores are made in parts,
// one after the other, and what can be found again is not kept from block to block.
template <Half type, Terms kind, bool scarce = false>
struct ScoreTerms {
  static constexpr Units units = units_of(kind);
  static constexpr float unit = units == Units::natural ? 1.0f : ptx::log2_e;
  static constexpr bool wide_bias = has(kind, Terms::wide_bias);
  // Nothing is added to what softcap makes, and it rises with q k^T.
  static constexpr bool caps_in_exponent = has(kind, Terms::softcap) && !has(kind, Terms::alibi) &&
                                           !has(kind, Terms::bias) && !has(kind, Terms::any_scale);

  const AttentionParams& params;
  int b, h;
  int seqlen_q, seqlen_k;

  __device__ ScoreTerms(const AttentionParams& p, const SequenceArg& sequence, int batch_index, int head)
      : params(p), b(batch_index), h(head), seqlen_q(sequence.seqlen_q), seqlen_k(sequence.seqlen_k) {}

  // Of the lane.
  [[nodiscard]] static __device__ __forceinline__ Element first_element() {
    return scarce ? element(0, 0, 0, ptx::thread_index()) : element(0, 0, 0);
  }

  // Before q k^T is added to s.
  template <Orientation orientation, int m, int n>
  __device__ __forceinline__ void start(FragmentC (&s)[m][n], int first_query, int first_key) const {
    clear(s);
    if constexpr (has(kind, Terms::alibi) && units == Units::raw)
      add_alibi<orientation>(s, first_query, first_key, ptx::log2_e / params.scale_log2);
  }

  // s, q k^T and what it began with, becomes the score. add_bias(s, scale): makes it scale * s + bias.
  // derivative(j, e, x) hears the derivative of softcap, of one row of tiles: who listens has m = 1, and is
  // not scarce.
  template <Orientation orientation, int m, int n, class AddBias, class Derivative>
  __device__ __forceinline__ void apply(FragmentC (&s)[m][n], int first_query, int first_key,
                                        const AddBias& add_bias, const Derivative& derivative) const {
    if constexpr (has(kind, Terms::softcap)) {
#pragma unroll
      for (int i = 0; i < m; ++i) {
        if constexpr (scarce) {
#pragma unroll
          for (int j = 0; j < n; j += 2) cap(reinterpret_cast<FragmentC(&)[2]>(s[i][j]), derivative);
        } else {
          cap(s[i], derivative);
        }
      }
    } else if constexpr (units == Units::log2) {
#pragma unroll
      for (int i = 0; i < m; ++i) {
#pragma unroll
        for (int j = 0; j < n; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][j][e] *= params.scale_log2;
        }
      }
    }
    if constexpr (has(kind, Terms::bias)) add_bias(s, has(kind, Terms::softcap) ? 1.0f : params.scale);
    if constexpr (has(kind, Terms::alibi) && units != Units::raw)
      add_alibi<orientation>(s, first_query, first_key, unit);
  }

  // softcap * tanh(softmax_scale * s / softcap), in the score's units.
  template <int n, class Derivative>
  __device__ __forceinline__ void cap(FragmentC (&s)[n], const Derivative& derivative) const {
    const float inner = scarce ? params.cap.inner : params.scale / params.softcap,
                outer = params.softcap * unit;
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
    const Element corner = first_element();
    const int lane_part = by_keys ? corner.row - corner.col : corner.col - corner.row;
    const float own =
        static_cast<float>(first_query - first_key + lane_part) + static_cast<float>(seqlen_k - seqlen_q);
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int rest = (i * 16 + e / 2 * 8) - (j * 8 + e % 2);  // in rows less columns
          s[i][j][e] -= slope * fabsf(own + static_cast<float>(by_keys ? rest : -rest));
        }
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ long long bias_begin(int query, int key) const {
    const BiasArg& bias = params.bias;
    return b * bias.batch + h * bias.head + query * bias.row + key * bias.col;
  }

  // Starts copying the bias of a tile of queries by keys, as load_tile does. Numbers keep their width.
  // grouped: the block has several such groups of threads.
  template <int threads, bool grouped = false, class Tile>
  __device__ __forceinline__ void load_bias(Tile& tile, int first_query, int first_key) const {
    const auto thread = [] { return grouped ? ptx::thread_index() % threads : ptx::thread_index(); };
    const BiasArg& bias = params.bias;
    const int rows = seqlen_q - first_query, cols = seqlen_k - first_key;
    using Number = typename BiasNumber<wide_bias>::Type;
    const auto* from = static_cast<const Number*>(bias.data) + bias_begin(first_query, first_key);
    constexpr int size = sizeof(Number), row_step = threads / Tile::pieces;
    static_assert(threads % Tile::pieces == 0 && row_step % 8 == 0 && Tile::rows % row_step == 0);
    if (bias.aligned) {
      const int row = thread() / Tile::pieces, piece = thread() % Tile::pieces;
      const int bytes = max(0, min(16, cols * size - piece * 16));
      const unsigned to = ptx::shared_address(tile.at(row, piece));
      from += row * bias.row + piece * (16 / size);
#pragma unroll
      for (int i = 0; i < Tile::rows; i += row_step) {
        ptx::copy_async(to + i * Tile::row_bytes, from, i < rows - row ? bytes : 0);
        from += row_step * bias.row;
      }
      return;
    }
    constexpr int width = Tile::row_bytes / size;
#pragma unroll 1
    for (int i = thread(); i < Tile::rows * width; i += threads) {
      const int row = i / width, col = i % width, byte = col * size;
      *reinterpret_cast<Number*>(tile.at(row, byte / 16) + byte % 16) =
          row < rows && col < cols ? from[row * bias.row + col * bias.col] : Number(0);
    }
  }

  // s becomes scale * s + bias, for the rows of the tile from `row` on.
  template <int m, int n, class Tile>
  __device__ __forceinline__ void add_bias(FragmentC (&s)[m][n], float scale, Tile& tile, int row) const {
    if constexpr (wide_bias) {
      const auto [at, col] = first_element();
      const unsigned first = ptx::opaque(ptx::shared_address(tile.at(row + at, col / 4)) + col % 4 * 4);
#pragma unroll
      for (int i = 0; i < m; ++i) {
#pragma unroll
        for (int j = 0; j < n; ++j) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            // Pieces are permuted among groups of 128 bytes.
            const float2 pair =
                ptx::load_pair((first ^ j * 32 % 128) + j / 4 * 128 + (i * 16 + half * 8) * tile.row_bytes);
            s[i][j][half * 2] = fmaf(s[i][j][half * 2], scale, pair.x);
            s[i][j][half * 2 + 1] = fmaf(s[i][j][half * 2 + 1], scale, pair.y);
          }
          if (scarce && j % 2 == 1) __syncwarp();  // no load passes it
        }
      }
    } else {
      const Lanes<Order::rows_first, n * 8> lanes;
      const Matrices matrices(tile, lanes, row);
#pragma unroll
      for (int i = 0; i < m; ++i) {
#pragma unroll
        for (int j = 0; j < n / 2; ++j) {
          FragmentA words;  // two tiles of C, in pairs
          matrices.read_a(words, i * 16, j * 16);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            float* x = &s[i][2 * j + w / 2][w % 2 * 2];
            const float2 pair = ptx::widen_pair<type>(words[w]);
            x[0] = fmaf(x[0], scale, pair.x);
            x[1] = fmaf(x[1], scale, pair.y);
          }
        }
      }
    }
  }

  // The same for a transposed tile, from where the bias lies.
  template <int n>
  __device__ __forceinline__ void add_bias_transposed(FragmentC (&s)[1][n], float scale, int first_query,
                                                      int first_key) const {
    const BiasArg& bias = params.bias;
    const int queries = seqlen_q - first_query, keys = seqlen_k - first_key;
    const long long begin = bias_begin(first_query, first_key);
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const auto [key, query] = element(0, j, e);
        s[0][j][e] *= scale;
        if (query < queries && key < keys)
          s[0][j][e] += load_number<type>(bias.data, begin + query * bias.row + key * bias.col, bias.wide);
      }
    }
  }

  // Works out part `part` of which keys dropout keeps. first_query: of the warp.
  template <int threads, int m, int n>
  __device__ __forceinline__ void choose(Kept<threads, m, n>& kept, int part, int first_query,
                                         int first_key) const {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const int byte = part % kept.bytes, row = part / kept.bytes;
    const unsigned head_index = ptx::opaque(static_cast<unsigned>(b) * params.num_heads_q + h);
    const auto query = static_cast<unsigned>(first_query + lane / 4 + row * 8);
    const auto key_block = static_cast<unsigned>(first_key) / 8 + byte * 4 + lane % 4;
    const unsigned mask = params.dropout.keep_mask(head_index, query, key_block);
    ptx::store_byte(ptx::shared_address(&kept.word[row][thread]) + byte, mask);
  }
  // Sets what is dropped to 0. A barrier lies between this and choose.
  template <int threads, int m, int n>
  static __device__ __forceinline__ void drop(FragmentC (&p)[m][n], const Kept<threads, m, n>& kept) {
    const int thread = ptx::thread_index(), t = thread % 4;
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 words = *reinterpret_cast<const uint4*>(&kept.word[i * 2 + half][thread - t]);
#pragma unroll
        for (int source = 0; source < 4; ++source) {
          const unsigned word = source == 0   ? words.x
                                : source == 1 ? words.y
                                : source == 2 ? words.z
                                              : words.w;
          const unsigned bits = word >> (2 * t);
#pragma unroll
          for (int q = 0; q < kept.bytes; ++q) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if ((bits >> (8 * q + c) & 1) == 0) p[i][q * 4 + source][half * 2 + c] = 0.0f;
            }
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
