// Decode: a few queries of a sequence against its cache, which is read once, as fast as memory goes.
//
// One block of threads for each (tile of queries by the heads that share a key head, some of the keys); the
// tile's rows are query by query, head by head. A sequence's keys are cut into parts, and a warp takes one or
// some neighbours of them, C.keys keys at a time, through a ring of buffers of its own, which only
// __syncwarp() guards. Each part has an online softmax of its own; the parts are joined in a binary tree
// (tile/states.cuh): a warp's in registers, a block's in shared memory, and a sequence's by combine.cuh from
// the workspace or, where its blocks are a cluster, here from each other's shared memory.
//
// Keys are the rows of mma's tiles, and the tile's rows their columns, of which 8 are enough.
//
// 8-bit keys and values become float16 on their way from shared memory to mma (ptx/bytes.cuh). What a lane
// reads of k is four neighbours, for mma two pairs 8 columns apart: of every 16 columns of q, too, the first
// two of each four come first. Of v even columns come first, until it is written. Their scales cost the loop
// nothing for each of them: k's multiplies the products with q, v's the end.
//
// decode_load.cuh says which keys a warp has, and brings them.
#pragma once

#include "core/attention_config.h"
#include "core/decode_params.h"
#include "ptx/bytes.cuh"
#include "ptx/cluster.cuh"
#include "ptx/launch.cuh"
#include "sm80/decode_load.cuh"
#include "tile/fragments.cuh"
#include "tile/scores.cuh"
#include "tile/states.cuh"

namespace tessera::sm80 {

template <DecodeConfig C>
struct DecodeShared {
  static constexpr int row = C.head_dim_v + 4;  // two rows of a fragment lie in different banks
  union {
    typename KeyRing<C>::Step ring[C.warps][C.stages];
    alignas(128) float o[C.warps][C.block_m][row];
  };
  QueryTile<C> q;
  float2 state[C.warps][C.block_m];  // reference and sum; at first q's units
  // What the cluster's blocks send this one: its share of the tile, of each of them.
  static constexpr int fours = C.cluster == 1 ? 1 : C.block_m * (C.head_dim_v / 4) + C.cluster;
  alignas(16) float4 sent[fours];
  float2 sent_state[fours];
};

// The lane's c-th row of the j-th 8 of a tile.
[[nodiscard]] __device__ __forceinline__ int row_of_lane(int j, int c) {
  return j * 8 + threadIdx.x % 4 * 2 + c;
}

// ALiBi's slopes of the lane's rows, in powers of two.
template <int n>
struct DecodeSlopes {
  float of[n][2];

  __device__ __forceinline__ DecodeSlopes(const DecodeParams& params, const tile::DecodeTile& tile) {
    const AttentionParams& a = params.attention;
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const auto [query, h, there] = tile.row(params, row_of_lane(j, c));
        // Rows behind a packed batch are of no sequence.
        of[j][c] = a.alibi_slopes != nullptr && there && query < tile.sequence.seqlen_q
                       ? a.alibi_slopes[tile.b * a.alibi_batch + h * a.alibi_head] * ptx::log2_e
                       : 0.0f;
      }
    }
  }
};

// k q^T becomes the score, in powers of two. by: what it is multiplied by, in each row. whole: every row sees
// every key; otherwise which key a row sees is worked out here, which is rare, and keeps no registers.
template <int m, int n>
__device__ __forceinline__ void score(const DecodeParams& params, const tile::DecodeTile& tile,
                                      tile::FragmentC (&s)[m][n], const float (&by)[n][2],
                                      const DecodeSlopes<n>& slopes, int first_key, int past, bool whole) {
  const AttentionParams& a = params.attention;
  const auto of_all = [&](const auto& change) {
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) change(s[i][j][e], by[j][e % 2]);
      }
    }
  };
  of_all([](float& x, float factor) { x *= factor; });
  if (a.softcap != 0.0f) {
    const float outer = a.softcap * ptx::log2_e;
    of_all([&](float& x, float) { x = outer * tile::tanh(x, a.softcap > 512.0f); });
  }
  // change(x, key) for the scores of each row.
  const auto of_rows = [&](const auto& change_of) {
    const int lane_key = first_key + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const auto change = change_of(tile.row(params, row_of_lane(j, c)).query, slopes.of[j][c]);
#pragma unroll
        for (int i = 0; i < m; ++i) {
          change(s[i][j][c], lane_key + i * 16);
          change(s[i][j][c + 2], lane_key + i * 16 + 8);
        }
      }
    }
  };
  if (a.alibi_slopes != nullptr) {
    of_rows([&](int query, float slope) {
      const auto position = static_cast<float>(query + tile.sequence.seqlen_k - tile.sequence.seqlen_q);
      return [=](float& x, int key) { x -= slope * fabsf(position - static_cast<float>(key)); };
    });
  }
  if (!whole) {
    const Mask mask = params.mask(tile.sequence);
    of_rows([&](int query, float) {
      const Range keys = mask.keys_of_row(query);
      const int begin = static_cast<int>(keys.begin), end = min(static_cast<int>(keys.end), past);
      return [=](float& x, int key) { x = key < begin || key >= end ? -ptx::infinity : x; };
    });
  }
}

// What a warp has of some keys: o's columns by the tile's rows, not yet divided, and of the lane's two rows
// of each 8 the reference and the sum of the exponentials.
template <int n, int mv>
struct DecodeState {
  // A reference follows the maximum only when that has risen by more than this: until then p stays below
  // 2^slack, exactly as accurate in floating point, and o need not be rescaled.
  static constexpr float slack = 8.0f;

  tile::FragmentC o[mv][n];
  float reference[n][2], sum[n][2];

  __device__ __forceinline__ void clear() {
    tile::clear(o);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      reference[j][0] = reference[j][1] = -ptx::infinity;
      sum[j][0] = sum[j][1] = 0.0f;
    }
  }

  // f(x) of the lanes that have other keys of the same rows.
  template <class F>
  static __device__ __forceinline__ float over_keys(float x, const F& f) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) x = f(x, __shfl_xor_sync(~0u, x, apart));
    return x;
  }

  // Scores become exponentials; the sum is of this lane's keys alone.
  template <int m>
  __device__ __forceinline__ void exponentiate(tile::FragmentC (&s)[m][n]) {
    bool moved = false;
    float most[n][2];
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = most[j][c] = fmaxf(s[0][j][c], s[0][j][c + 2]);
#pragma unroll
        for (int i = 1; i < m; ++i) x = fmaxf(x, fmaxf(s[i][j][c], s[i][j][c + 2]));
        x = over_keys(x, [](float a, float b) { return fmaxf(a, b); });
        moved |= x - reference[j][c] > slack;  // from -inf to anything, too
      }
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float before = reference[j][c];
          if (most[j][c] - before > slack) reference[j][c] = most[j][c];
          // A row that has seen nothing has no sum: any factor will do, but not NaN.
          const float by = before == -ptx::infinity ? 0.0f : ptx::exp2(before - reference[j][c]);
          sum[j][c] *= by;
#pragma unroll
          for (int d = 0; d < mv; ++d) {
            o[d][j][c] *= by;
            o[d][j][c + 2] *= by;
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        // Hidden keys only, so far: -inf - 0, not -inf + inf.
        const float from = reference[j][c] == -ptx::infinity ? 0.0f : reference[j][c];
#pragma unroll
        for (int i = 0; i < m; ++i) {
          s[i][j][c] = ptx::exp2(s[i][j][c] - from);
          s[i][j][c + 2] = ptx::exp2(s[i][j][c + 2] - from);
          sum[j][c] += s[i][j][c] + s[i][j][c + 2];
        }
      }
    }
  }

  // The end of a part: the sum of all lanes.
  __device__ __forceinline__ void close() {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[j][c] = over_keys(sum[j][c], [](float x, float y) { return x + y; });
    }
  }

  // The parts of `left`, and behind them this one's.
  __device__ __forceinline__ void join(const DecodeState& left) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const tile::Joined both({left.reference[j][c], left.sum[j][c]}, {reference[j][c], sum[j][c]});
        reference[j][c] = both.state.x;
        sum[j][c] = both.state.y;
#pragma unroll
        for (int d = 0; d < mv; ++d) {
          o[d][j][c] = both.sum(left.o[d][j][c], o[d][j][c]);
          o[d][j][c + 2] = both.sum(left.o[d][j][c + 2], o[d][j][c + 2]);
        }
      }
    }
  }
};

// One warp's keys, of which the first steps have been asked for. Without parts nothing is known of `state`.
template <DecodeConfig C, int n, int mv>
__device__ __forceinline__ void attend(const DecodeParams& params, const DecodeWork& work,
                                       DecodeShared<C>& shared, KeyRing<C>& ring, DecodeState<n, mv>& state) {
  constexpr int m = C.keys / 16, ahead = C.stages - 1;
  const AttentionParams& a = params.attention;
  const tile::DecodeTile& tile = work.tile;
  const WarpKeys& keys = ring.keys;
  const int warp = ptx::warp_index();
  if constexpr (C.narrow()) load_narrow_q<C>(params, tile, shared.q, shared.state[0]);
  const DecodeSlopes<n> slopes(params, tile);
  // Keys that every row sees.
  const Range all =
      params.mask(tile.sequence).keys_of_all({tile.first_query, tile.first_query + tile.queries});
  const int all_begin = static_cast<int>(min(all.begin, 1LL * keys.end)),
            all_end = static_cast<int>(min(all.end, 1LL * keys.end));

  const tile::Lanes<tile::Order::cols_first, C.head_dim> lanes_q;
  const tile::Lanes<tile::Order::rows_first, KeyTile<C, C.head_dim>::cols> lanes_k;
  const tile::Lanes<tile::Order::cols_first, KeyTile<C, C.head_dim_v>::cols> lanes_v;
  const tile::Matrices read_q(shared.q, lanes_q);
  constexpr int depth = C.head_dim / 16;
  constexpr bool held = n * C.head_dim <= 256;   // beside o
  constexpr int at_once = 2 / C.number_bytes();  // 16s of the depth that one ldmatrix reads
  unsigned q[held ? depth : at_once][n][2];
  const auto read_queries = [&](unsigned(&to)[n][2], int d) {
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      tile::FragmentA b;
      read_q.read_b(b, j * 8, d * 16);
      to[j][0] = b[0];
      to[j][1] = b[1];
      if (j + 1 < n) {
        to[j + 1 < n ? j + 1 : j][0] = b[2];
        to[j + 1 < n ? j + 1 : j][1] = b[3];
      }
    }
  };
  cute::cp_async_wait<ahead - 1>();
  __syncthreads();
  if constexpr (held) {
#pragma unroll
    for (int d = 0; d < depth; ++d) read_queries(q[d], d);
  }
  // What k q^T is to be multiplied by, in each row.
  const float inner = a.softcap != 0.0f ? a.scale / a.softcap : a.scale_log2;
  const float of_k = C.narrow() ? params.k_scale.of(tile.head_k) * ptx::byte_unit(C.stored) : 1.0f;
  float unit[n][2];
#pragma unroll
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
      unit[j][c] = C.narrow() ? of_k * shared.state[0][row_of_lane(j, c)].x * inner : inner;
  }
  // s += k q^T of 16 keys and 16 of the depth, the d-th of those that q has.
  const auto multiply_k = [&](tile::FragmentC(&to)[n], const tile::FragmentA& k, int d) {
#pragma unroll
    for (int j = 0; j < n; ++j) tile::multiply_add<C.product()>(to[j], k, q[d][j][0], q[d][j][1]);
  };

  // The left ones of pairs, by how many parts they have: those that wait long not in registers.
  constexpr int near = C.levels < 3 ? C.levels : 2, far = C.levels - near;
  DecodeState<n, mv> waiting[near > 0 ? near : 1], waiting_far[far > 0 ? far : 1];
  int stage = 0, step = ring.first_step;
#pragma unroll 1
  for (int part = 0; part < keys.parts; ++part) {
    state.clear();
    const int past = min(ring.last_step, (part + 1) * (keys.part_keys / C.keys));
#pragma unroll 1
    for (; step < past; ++step) {
      const int first_key = keys.first + step * C.keys;
      cute::cp_async_wait<ahead - 1>();
      __syncwarp();  // the step's keys are there for all lanes, and all are done with those of the step
                     // before
      ring.load(params, work, shared.ring[warp], step + ahead);
      cute::cp_async_fence();

      auto& now = shared.ring[warp][stage];
      stage = stage + 1 == C.stages ? 0 : stage + 1;
      const tile::Matrices read_k(now.k, lanes_k);
      const tile::Matrices read_v(now.v, lanes_v);
      tile::FragmentC s[m][n];
      tile::clear(s);
#pragma unroll
      for (int d = 0; d < depth; d += at_once) {
        if constexpr (!held) {
#pragma unroll
          for (int e = 0; e < at_once; ++e) read_queries(q[e], d + e);
        }
#pragma unroll
        for (int i = 0; i < m; ++i) {
          tile::FragmentA read;
          read_k.read_a(read, i * 16, d * 8 * C.number_bytes());
          if constexpr (C.narrow()) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              tile::FragmentA k;
              ptx::widen_bytes<C.stored, false>(read[2 * e], k[0], k[2]);
              ptx::widen_bytes<C.stored, false>(read[2 * e + 1], k[1], k[3]);
              multiply_k(s[i], k, held ? d + e : e);
            }
          } else {
            multiply_k(s[i], read, held ? d : 0);
          }
        }
      }
      const bool whole = all_begin <= first_key && first_key + C.keys <= all_end;
      score(params, tile, s, unit, slopes, first_key, keys.end, whole);
      state.exponentiate(s);
#pragma unroll
      for (int i = 0; i < m; ++i) {
        unsigned p[n][2];
#pragma unroll
        for (int j = 0; j < n; ++j) {
          p[j][0] = ptx::transpose(ptx::pack<C.product()>(s[i][j][0], s[i][j][1]));
          p[j][1] = ptx::transpose(ptx::pack<C.product()>(s[i][j][2], s[i][j][3]));
        }
        const auto multiply_v = [&](tile::FragmentC(&to)[n], const tile::FragmentA& v) {
#pragma unroll
          for (int j = 0; j < n; ++j) tile::multiply_add<C.product()>(to[j], v, p[j][0], p[j][1]);
        };
#pragma unroll
        for (int d = 0; d < mv; d += at_once) {
          tile::FragmentA read;
          read_v.read_a_transposed(read, i * 16, d * 8 * C.number_bytes());
          if constexpr (C.narrow()) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              tile::FragmentA v;
              ptx::widen_bytes<C.stored, true>(read[e], v[0], v[1]);
              ptx::widen_bytes<C.stored, true>(read[e + 2], v[2], v[3]);
              multiply_v(state.o[d + e], v);
            }
          } else {
            multiply_v(state.o[d], read);
          }
        }
      }
    }
    state.close();
    bool climbs = true;  // no break: the loop must be unrolled, for registers
    const auto climb = [&](int level, DecodeState<n, mv>& left) {
      if ((part >> level & 1) != 0) {
        state.join(left);
      } else if (part + 1 < keys.parts) {
        left = state;
        climbs = false;
      }
    };
#pragma unroll
    for (int level = 0; level < near; ++level) {
      if (climbs) climb(level, waiting[level]);
    }
#pragma unroll 1
    for (int level = near; level < C.levels && climbs; ++level) climb(level, waiting_far[level - near]);
  }
}

// What the warps have goes to shared memory.
template <DecodeConfig C, int n, int mv>
__device__ __forceinline__ void publish(DecodeShared<C>& shared, const DecodeState<n, mv>& state, int warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  cute::cp_async_wait<0>();
  __syncthreads();  // o takes the place of k and v
  if (warp < warps) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = row_of_lane(j, c);
        if (lane < 4) shared.state[warp][row] = {state.reference[j][c], state.sum[j][c]};
#pragma unroll
        for (int d = 0; d < mv; ++d) {
          float* to = &shared.o[warp][row][d * 16];
          if constexpr (C.narrow()) {
            *reinterpret_cast<float2*>(to + lane / 4 * 2) = {state.o[d][j][c], state.o[d][j][c + 2]};
          } else {
            to[lane / 4] = state.o[d][j][c];
            to[lane / 4 + 8] = state.o[d][j][c + 2];
          }
        }
      }
    }
  }
  __syncthreads();
}

// A block's work, once its lengths are known and its warps' first keys are on their way.
template <DecodeConfig C>
__device__ __forceinline__ void decode_tile(const DecodeParams& params, const DecodeWork& work,
                                            DecodeShared<C>& shared, KeyRing<C>& ring) {
  constexpr int threads = C.warps * 32, n = C.block_m / 8, mv = C.head_dim_v / 16;
  constexpr int row_fours = C.head_dim_v / 4;
  const AttentionParams& a = params.attention;
  const tile::DecodeTile& tile = work.tile;
  const DecodeBlocks& blocks = work.blocks;
  const int split = work.split, warps = work.warps(C.warps);

#if __CUDA_ARCH__ >= 900
  if constexpr (C.cluster > 1) {
    if (blocks.count > 1) ptx::arrive_cluster();
  }
#endif

  DecodeState<n, mv> state;
  attend<C>(params, work, shared, ring, state);
  publish<C>(shared, state, warps);
  const auto join_warps = [&](float4& o, int r, int col) {
    return tile::join_tree<C.warps>(
        o, warps, [&](int w) { return shared.state[w][r]; },
        [&](int w) { return *reinterpret_cast<const float4*>(&shared.o[w][r][col]); });
  };
  const int fours = tile.queries * params.heads * row_fours;

  // Four columns of a row of the tile: joined(o, row, column) makes them of all splits.
  const auto finish = [&](int i, auto&& joined) {
    const int r = i / row_fours, col = i % row_fours * 4;
    const auto [query, h, there] = tile.row(params, r);
    if (!there || col >= a.head_dim_v) return;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    tile::RowEnd end_of_row{0.0f, -ptx::infinity};  // padding
    if (query < tile.sequence.seqlen_q) end_of_row = tile::end_row<C.type>(a, h, joined(o, r, col));
    if constexpr (C.narrow()) end_of_row.factor *= params.v_scale.of(tile.head_k) * ptx::byte_unit(C.stored);
    tile::store_row<C.type>(a, tile.b, tile.sequence.q_begin + query, h, col, o, end_of_row);
  };
  if (blocks.count == 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < fours; i += threads) finish(i, join_warps);
    return;
  }
  if constexpr (C.cluster == 1) {
    const unsigned number = params.most_splits.quotient(ptx::block_index());
    const long long first_row = params.partial_row(params.partial_number(tile, number), split);
#pragma unroll 1
    for (int i = threadIdx.x; i < fours; i += threads) {
      const int r = i / row_fours, col = i % row_fours * 4;
      float4 o;
      const float2 joined = join_warps(o, r, col);
      *reinterpret_cast<float4*>(params.o_partial + (first_row + r) * params.partial_cols + col) = o;
      if (col == 0) reinterpret_cast<float2*>(params.state_partial)[first_row + r] = joined;
    }
  } else {
#if __CUDA_ARCH__ >= 900
    // Each block ends a share of the tile, of which all others send it theirs.
    const int share = (fours + blocks.count - 1) / blocks.count;
    const unsigned columns = ptx::shared_address(shared.sent),
                   states = ptx::shared_address(shared.sent_state);
    __syncwarp();
    ptx::wait_cluster();  // all have begun
#pragma unroll 1
    for (int i = threadIdx.x; i < fours; i += threads) {
      float4 o;
      const float2 joined = join_warps(o, i / row_fours, i % row_fours * 4);
      const int to = i / share, at = split * share + i - to * share;
      ptx::store_cluster(ptx::cluster_address(columns + at * 16, to), o);
      ptx::store_cluster(ptx::cluster_address(states + at * 8, to), joined);
    }
    __syncwarp();
    ptx::arrive_cluster();
    ptx::wait_cluster();
#pragma unroll 1
    for (int i = threadIdx.x; i < share && split * share + i < fours; i += threads) {
      finish(split * share + i, [&](float4& o, int, int) {
        return tile::join_tree<C.cluster>(
            o, blocks.count, [&](int s) { return shared.sent_state[s * share + i]; },
            [&](int s) { return shared.sent[s * share + i]; });
      });
    }
#endif
  }
}

// On Hopper a block that waits for earlier kernels has worked out by then what it has to do, by the lengths
// as they were, and begins with that; if they are others now, it begins again.
template <DecodeConfig C>
__device__ void decode(const DecodeParams& params) {
  static_assert((C.block_m == 8 || C.block_m % 16 == 0) && C.keys % 16 == 0 && C.keys <= 32 && C.stages >= 2);
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<DecodeShared<C>*>(shared_bytes);
  const auto wait = [] {
    ptx::wait_for_earlier();
    ptx::let_next_begin();  // which may look at lengths at once
  };
#if __CUDA_ARCH__ >= 900
  bool waited = params.attention.packed();
#else
  bool waited = true;
#endif
  if (waited) wait();
#pragma unroll 1
  for (;; waited = true) {  // twice at most
    const DecodeWork work(params);
    const bool none = work.none();
    const bool paged = params.page_table != nullptr;
    if (!waited && paged) {  // pages that keys are read from are looked up behind it
      if (!none) ask_early<C, true>(params, work, work.keys(C.warps));
      wait();
    }
    KeyRing<C> ring(params, work);
    if (!waited && !paged) {
      if (!none) ask_early<C, false>(params, work, ring.keys);
      wait();
    }
#pragma unroll 1
    for (int i = 0; i < C.stages - 1 && !none; ++i) {
      ring.load(params, work, shared.ring[ptx::warp_index()], ring.first_step + i);
      if (i == 0 && !C.narrow()) load_q<C>(params, work.tile, shared.q);
      cute::cp_async_fence();
    }
    if (waited || __all_sync(~0u, !work.changed(params))) {
      if (!none) decode_tile<C>(params, work, shared, ring);  // a cluster's barrier does not wait for others
      return;
    }
    cute::cp_async_wait<0>();
    __syncwarp();
  }
}

}  // namespace tessera::sm80
