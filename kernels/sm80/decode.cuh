// Decode: a few queries of a sequence against its cache, which is read once, as fast as memory goes.
//
// One block of threads for each (tile of queries by the heads that share a key head, split of the keys); the
// tile's rows are query by query, head by head. Each warp has keys of its own, C.keys at a time and in turn
// with the other warps, a ring of buffers of its own for them, which only __syncwarp() guards, and an online
// softmax of its own. At the end the block's warps are joined, and then the splits: by combine.cuh from the
// workspace, or, where they are a cluster, here from each other's shared memory.
//
// A key's place is looked up by one lane, a step before the copy asks for it: a page may have any size.
#pragma once

#include "core/attention_config.h"
#include "core/decode_params.h"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/scores.cuh"
#include "tile/softmax.cuh"
#include "tile/states.cuh"

namespace tessera::sm80 {

template <DecodeConfig C>
struct DecodeShared {
  struct Step {
    tile::SharedTile<C.keys, C.head_dim> k;
    tile::SharedTile<C.keys, C.head_dim_v> v;
  };
  static constexpr int row = C.head_dim_v + 8;  // no two rows of a fragment meet in a bank
  union {
    Step ring[C.warps][C.stages];
    alignas(128) float o[C.warps][C.block_m][row];
  };
  tile::SharedTile<C.block_m, C.head_dim> q;
  float2 state[C.warps][C.block_m];  // reference and sum
  float2 joined[C.block_m];          // of all warps
};

// Where the key of a lane lies; block -1: there is none.
struct KeyPlace {
  int block, slot;
};

// Copies C.keys rows of k or v to a buffer of the warp.
template <DecodeConfig C, int cols>
struct KeyCopy {
  using Tile = tile::SharedTile<C.keys, cols>;
  static constexpr int group = (Tile::pieces & -Tile::pieces) < 32 ? Tile::pieces & -Tile::pieces : 32;
  static constexpr int groups = Tile::pieces / group, row_step = 32 / group;
  static_assert(C.keys % row_step == 0);

  const tile::HalfBits* base;  // of the head
  long long batch, seq;
  int valid_cols;

  __device__ KeyCopy(const RowsArg& from, int head, int width)
      : base(static_cast<const tile::HalfBits*>(from.data) + head * from.head),
        batch(from.batch),
        seq(from.seq),
        valid_cols(width) {}

  // paged: each row by its lane's place; else `place` is the first row's, and `rows` are there.
  __device__ __forceinline__ void operator()(Tile& to, bool paged, const KeyPlace& place, int rows) const {
    const int lane = threadIdx.x % 32, row = lane / group, piece = lane % group;
    const unsigned address = ptx::shared_address(to.data);
    const auto copy = [&](int i, const tile::HalfBits* source, bool there) {
      const int at = row + i * row_step;
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        const int col = (piece + g * group) * 8, valid = there ? valid_cols - col : 0;
        const unsigned target =
            address + at * Tile::row_bytes + (((piece + g * group) ^ Tile::permutation(at)) << 4);
        if constexpr (C.aligned) {
          ptx::copy_async(target, source + col, valid > 0 ? 16 : 0);
        } else {
          ptx::store(target, tile::gather<C.type>({source, 0, false}, col, valid));
        }
      }
    };
    if (paged) {
#pragma unroll
      for (int i = 0; i < C.keys / row_step; ++i) {
        const int block = __shfl_sync(~0u, place.block, row + i * row_step);
        const int slot = __shfl_sync(~0u, place.slot, row + i * row_step);
        copy(i, block < 0 ? base : base + (block * batch + slot * seq), block >= 0);
      }
    } else {
      const tile::HalfBits* source = base + (place.block * batch + (place.slot + row) * seq);
#pragma unroll
      for (int i = 0; i < C.keys / row_step; ++i) {
        const bool there = row + i * row_step < rows;
        copy(i, there ? source : base, there);
        source += row_step * seq;
      }
    }
  }
};

// The tile of q, rotated; rows that are not there are zeros.
template <DecodeConfig C>
__device__ __forceinline__ void load_q(const DecodeParams& params, const tile::DecodeTile& tile,
                                       DecodeShared<C>& shared) {
  constexpr int threads = C.warps * 32, pieces = C.head_dim / 8;
  const AttentionParams& a = params.attention;
#pragma unroll 1
  for (int i = threadIdx.x; i < C.block_m * pieces; i += threads) {
    const int r = i / pieces, col = i % pieces * 8;
    const auto [query, h, there] = tile.row(params, r);
    const int valid = there ? a.head_dim - col : 0;
    const long long row = tile.b * a.q.batch + (0LL + tile.sequence.q_begin + query) * a.q.seq + h * a.q.head;
    const unsigned to = ptx::shared_address(shared.q.at(r, col / 8));
    const auto* from = static_cast<const tile::HalfBits*>(a.q.data) + (there ? row : 0);
    if (params.rotary_dim > col && valid > 0) {
      const int position = params.query_position(tile.sequence, query);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[e] = e < valid ? tile::turned<C.type>(params, a.q, row, col + e, position) : 0.0f;
      ptx::store(to, uint4{ptx::pack<C.type>(x[0], x[1]), ptx::pack<C.type>(x[2], x[3]),
                           ptx::pack<C.type>(x[4], x[5]), ptx::pack<C.type>(x[6], x[7])});
    } else if constexpr (C.aligned) {
      ptx::copy_async(to, valid > 0 ? from + col : from, valid > 0 ? 16 : 0);
    } else {
      ptx::store(to, tile::gather<C.type>({from, 0, false}, col, valid));
    }
  }
}

// The lane's rows of the tile: which keys they see, and ALiBi's slopes in powers of two.
template <int m>
struct DecodeRows {
  int begin[m][2], end[m][2];
  float slope[m][2], position[m][2];

  __device__ __forceinline__ DecodeRows(const DecodeParams& params, const tile::DecodeTile& tile, int past) {
    const AttentionParams& a = params.attention;
    const Mask mask = params.mask(tile.sequence);
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto [query, h, there] = tile.row(params, tile::element(i, 0, half * 2).row);
        const Range keys = mask.keys_of_row(query);
        begin[i][half] = static_cast<int>(keys.begin);
        end[i][half] = min(static_cast<int>(keys.end), past);
        // Rows behind a packed batch are of no sequence.
        slope[i][half] = a.alibi_slopes != nullptr && there && query < tile.sequence.seqlen_q
                             ? a.alibi_slopes[tile.b * a.alibi_batch + h * a.alibi_head] * ptx::log2_e
                             : 0.0f;
        position[i][half] = static_cast<float>(query + tile.sequence.seqlen_k - tile.sequence.seqlen_q);
      }
    }
  }
};

// q k^T becomes the score, in powers of two.
template <int m, int n>
__device__ __forceinline__ void score(const AttentionParams& params, tile::FragmentC (&s)[m][n],
                                      const DecodeRows<m>& rows, int first_key, bool whole) {
  const int col = threadIdx.x % 4 * 2;
  const bool capped = params.softcap != 0.0f, slopes = params.alibi_slopes != nullptr;
  const float inner = capped ? params.scale / params.softcap : params.scale_log2;
  const float outer = params.softcap * ptx::log2_e;
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = s[i][j][e] * inner;
        if (capped) x = outer * tile::tanh(x, params.softcap > 512.0f);
        s[i][j][e] = x;
      }
    }
    if (slopes) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto key = static_cast<float>(first_key + col + j * 8 + e % 2);
          s[i][j][e] -= rows.slope[i][e / 2] * fabsf(rows.position[i][e / 2] - key);
        }
      }
    }
    if (whole) continue;
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + col + j * 8 + e % 2;
        if (key < rows.begin[i][e / 2] || key >= rows.end[i][e / 2]) s[i][j][e] = -ptx::infinity;
      }
    }
  }
}

// One warp's keys of begin .. end - 1, those of all warps.
template <DecodeConfig C, int m, int nv>
__device__ __forceinline__ void attend(const DecodeParams& params, const tile::DecodeTile& tile,
                                       DecodeShared<C>& shared, int begin, int end, tile::Softmax<m>& softmax,
                                       tile::FragmentC (&acc_o)[m][nv]) {
  constexpr int n = C.keys / 8, ahead = C.stages - 1, stride = C.warps * C.keys;
  const AttentionParams& a = params.attention;
  const int warp = ptx::warp_index(), lane = threadIdx.x % 32;
  const bool paged = params.page_table != nullptr;
  const int first = begin + warp * C.keys;
  const int steps = first < end ? (end - first + stride - 1) / stride : 0;

  // The place of the lane's key of a step; contiguous: of the step's first key.
  const KeyPlace row_place{paged || steps == 0 ? 0 : params.slot(tile.b, 0).block, 0};
  const auto place_of = [&](int step) {
    const int key = first + step * stride;
    if (!paged) return KeyPlace{row_place.block, tile.sequence.k_begin + key};
    const int mine = key + lane % C.keys;
    if (mine >= end) return KeyPlace{-1, 0};
    const auto [block, slot] = params.slot(tile.b, tile.sequence.k_begin + mine);
    return KeyPlace{block, slot};
  };
  const KeyCopy<C, C.head_dim> copy_k(a.k, tile.head_k, a.head_dim);
  const KeyCopy<C, C.head_dim_v> copy_v(a.v, tile.head_k, a.head_dim_v);
  int filling = 0;  // the buffer that is filled next
  const auto load = [&](int step, const KeyPlace& place) {
    if (step < steps) {
      const int rows = end - first - step * stride;
      copy_k(shared.ring[warp][filling].k, paged, place, rows);
      copy_v(shared.ring[warp][filling].v, paged, place, rows);
      filling = filling + 1 == C.stages ? 0 : filling + 1;
    }
    cute::cp_async_fence();
  };

#pragma unroll
  for (int i = 0; i < ahead; ++i) {
    if (i == 0) load_q<C>(params, tile, shared);  // belongs to the first group
    load(i, place_of(i));
  }
  KeyPlace next = place_of(ahead);
  const DecodeRows<m> rows(params, tile, end);
  // Keys that every row sees.
  const Range all =
      params.mask(tile.sequence).keys_of_all({tile.first_query, tile.first_query + tile.queries});

  const tile::Lanes<tile::Order::rows_first, C.head_dim> lanes_q;
  const tile::Lanes<tile::Order::cols_first, C.head_dim> lanes_k;
  const tile::Lanes<tile::Order::rows_first, C.head_dim_v> lanes_v;
  const tile::Matrices read_q_tile(shared.q, lanes_q);
  constexpr bool held = m * (C.head_dim + C.head_dim_v) <= 256;  // beside acc_o
  tile::HeldA<held ? C.head_dim : 16> held_q[m];
  cute::cp_async_wait<ahead - 1>();
  __syncthreads();
  if constexpr (held) {
#pragma unroll
    for (int i = 0; i < m; ++i) held_q[i].read(read_q_tile, i * 16);
  }

  const auto read_q = [&](tile::FragmentA& q, int i, int d) {
    if constexpr (held) {
      held_q[i].read_a(q, 0, d);
    } else {
      read_q_tile.read_a(q, i * 16, d);
    }
  };

  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int first_key = first + step * stride;
    cute::cp_async_wait<ahead - 1>();
    __syncwarp();  // the step's keys are there for all lanes, and all are done with those of the step before
    load(step + ahead, next);
    next = place_of(step + ahead + 1);

    auto& now = shared.ring[warp][stage];
    stage = stage + 1 == C.stages ? 0 : stage + 1;
    const tile::Matrices read_k(now.k, lanes_k);
    const tile::Matrices read_v(now.v, lanes_v);
    tile::FragmentC s[m][n];
    tile::clear(s);
    tile::multiply_q_k<C.type, C.head_dim>(s, read_q, read_k);
    const bool whole = all.begin <= first_key && first_key + C.keys <= all.end && first_key + C.keys <= end;
    score(a, s, rows, first_key, whole);
    softmax.prepare(s, 1.0f, [&](int i, int half, float by) { softmax.shrink_rows(acc_o, i, half, by); });
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int i = 0; i < m; ++i) softmax.exponentiate(s[i][j], i);
    }
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      tile::FragmentA p[m];
#pragma unroll
      for (int i = 0; i < m; ++i) tile::as_operand<C.type>(p[i], s[i], j);
      tile::multiply_step<C.type>(acc_o, p, read_v, j * 16);
    }
  }
}

// What the warps have becomes the block's: o[0] and joined.
template <DecodeConfig C, int m, int nv>
__device__ __forceinline__ void join_warps(DecodeShared<C>& shared, const tile::Softmax<m>& softmax,
                                           const tile::FragmentC (&acc_o)[m][nv]) {
  constexpr int threads = C.warps * 32;
  const int warp = threadIdx.x / 32;
  cute::cp_async_wait<0>();
  __syncthreads();  // o takes the place of k and v
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto [row, col] = tile::element(i, 0, half * 2);
      float sum = softmax.row_sum[i][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (threadIdx.x % 4 == 0) shared.state[warp][row] = {softmax.reference[i][half], sum};
#pragma unroll
      for (int j = 0; j < nv; ++j) {
        *reinterpret_cast<float2*>(&shared.o[warp][row][col + j * 8]) = {acc_o[i][j][half * 2],
                                                                         acc_o[i][j][half * 2 + 1]};
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < C.block_m * (C.head_dim_v / 4); i += threads) {
    const int row = i / (C.head_dim_v / 4), col = i % (C.head_dim_v / 4) * 4;
    float4 o;
    const float2 state = tile::fold<C.warps>(
        o, C.warps, [&](int w) { return shared.state[w][row]; },
        [&](int w) { return *reinterpret_cast<const float4*>(&shared.o[w][row][col]); });
    *reinterpret_cast<float4*>(&shared.o[0][row][col]) = o;  // this thread's alone
    if (col == 0) shared.joined[row] = state;
  }
}

template <DecodeConfig C>
__device__ void decode(const DecodeParams& params) {
  constexpr int threads = C.warps * 32, m = C.block_m / 16, nv = C.head_dim_v / 8;
  constexpr int row_fours = C.head_dim_v / 4;
  static_assert(C.block_m % 16 == 0 && C.keys % 16 == 0 && C.keys <= 32 && C.stages >= 2);
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<DecodeShared<C>*>(shared_bytes);

  ptx::let_next_begin();
  ptx::wait_for_earlier();
  const AttentionParams& a = params.attention;
  const unsigned number = params.most_splits.quotient(ptx::block_index());
  const int split = params.most_splits.remainder(ptx::block_index());
  const tile::DecodeTile tile = tile::find_decode_tile(params, number);
  if (tile.queries == 0) return;
  const Mask mask = params.mask(tile.sequence);
  const int queries = min(tile.queries, max(0, tile.sequence.seqlen_q - tile.first_query));
  const Range seen = mask.keys_of_any({0, tile.sequence.seqlen_q});
  const DecodeSplits splits = params.splits(tile.sequence.seqlen_q, static_cast<int>(seen.size()));
  if (split >= splits.count) return;  // a cluster's barrier does not wait for those who have left

  // The keys of the split that some query of the tile sees.
  const Range own = mask.keys_of_any({tile.first_query, tile.first_query + queries});
  const long long from = seen.begin + 1LL * split * splits.keys;
  const int begin = static_cast<int>(max(own.begin, from));
  const int end = static_cast<int>(min(own.end, min(seen.end, from + splits.keys)));

  tile::FragmentC acc_o[m][nv];
  tile::clear(acc_o);
  tile::Softmax<m> softmax;
  attend<C>(params, tile, shared, begin, end, softmax, acc_o);
  join_warps<C>(shared, softmax, acc_o);
  __syncthreads();

  // Four columns of a row of the tile: joined(o, row, column) makes them of all splits.
  const auto finish = [&](int i, auto&& joined) {
    const int r = i / row_fours, col = i % row_fours * 4;
    const auto [query, h, there] = tile.row(params, r);
    if (!there || col >= a.head_dim_v) return;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    tile::RowEnd end_of_row{0.0f, -ptx::infinity};  // padding
    if (query < tile.sequence.seqlen_q) end_of_row = tile::end_row<C.type>(a, h, joined(o, r, col));
    tile::store_row<C.type>(a, tile.b, tile.sequence.q_begin + query, h, col, o, end_of_row);
  };
  if (splits.count == 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < C.block_m * row_fours; i += threads) {
      finish(i, [&](float4& o, int r, int col) {
        o = *reinterpret_cast<const float4*>(&shared.o[0][r][col]);
        return shared.joined[r];
      });
    }
    return;
  }
  if constexpr (C.cluster == 1) {
    const long long first_row = tile.partial_row(params, split);
#pragma unroll 1
    for (int i = threadIdx.x; i < params.partial_rows * row_fours; i += threads) {
      const int r = i / row_fours, col = i % row_fours * 4;
      *reinterpret_cast<float4*>(params.o_partial + (first_row + r) * params.partial_cols + col) =
          *reinterpret_cast<const float4*>(&shared.o[0][r][col]);
      if (col == 0) reinterpret_cast<float2*>(params.state_partial)[first_row + r] = shared.joined[r];
    }
  } else {
#if __CUDA_ARCH__ >= 900
    ptx::meet_cluster();
#pragma unroll 1
    for (int i = split * threads + threadIdx.x; i < C.block_m * row_fours; i += splits.count * threads) {
      finish(i, [&](float4& o, int r, int col) {
        const unsigned state = ptx::shared_address(&shared.joined[r]);
        const unsigned columns = ptx::shared_address(&shared.o[0][r][col]);
        return tile::fold<C.cluster>(
            o, splits.count, [&](int s) { return ptx::load_cluster_pair(ptx::cluster_address(state, s)); },
            [&](int s) { return ptx::load_cluster_four(ptx::cluster_address(columns, s)); });
      });
    }
    __syncwarp();
    ptx::meet_cluster();  // nobody leaves while another reads
#endif
  }
}

}  // namespace tessera::sm80
