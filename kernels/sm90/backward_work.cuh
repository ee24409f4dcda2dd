// Hopper's backward, all but the products: which keys a block of threads has, the steps of its loop, what
// lies in shared memory, and the warps beside those that compute. One thread asks TMA for tiles, one warp
// brings lse, one delta and what else there is to know of a step, and one has dq added.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "sm90/pipeline.cuh"
#include "tile/dq_tiles.cuh"
#include "tile/gradients.cuh"
#include "tile/panels.cuh"

namespace tessera::sm90 {

inline constexpr int ds_stages = 2;

// What consumers have to know of a step. They have no registers for it.
struct alignas(16) StepFacts {
  TileMask mask;  // of the tile that begins with the step's first query and the block's first key
  int first_query, first_key;
  int b, h, seqlen_q, seqlen_k;
  float* dq;  // of the first query, if it is added directly

  template <Sm90BackwardConfig C>
  [[nodiscard]] __device__ __forceinline__ auto terms(const AttentionParams& params) const {
    SequenceArg sequence{};
    sequence.seqlen_q = seqlen_q;
    sequence.seqlen_k = seqlen_k;
    return tile::ScoreTerms<C.type, C.terms>(params, sequence, b, h);
  }
};

// dq on its way: tiles of one warp after the other, as they are added (tile/dq_tiles.cuh).
template <Sm90BackwardConfig C, bool there = !C.dq_direct()>
struct DqShared {
  alignas(1024) float dq[C.consumers()][4][C.dq_cols() / tile::DqTiles::cols][tile::DqTiles::size];
};
template <Sm90BackwardConfig C>
struct DqShared<C, false> {};

// Where warpgroups share a step (backward_wide.cuh): p on its way from the one to the other, as fragments.
template <Sm90BackwardConfig C, bool there = C.wide()>
struct PShared {
  alignas(1024) float p[4][C.block_m / 8][32][4];
};
template <Sm90BackwardConfig C>
struct PShared<C, false> {};

template <Sm90BackwardConfig C>
struct BackwardShared : DqShared<C>, PShared<C> {
  tile::PanelTile<C.block_n, C.head_dim> k;
  tile::PanelTile<C.block_n, C.head_dim_v> v;
  tile::PanelTile<C.block_m, C.head_dim> q[C.q_stages];
  tile::PanelTile<C.block_m, C.head_dim_v> dout[C.dout_stages];
  // Of two steps: who writes one has met all others behind their last product with it.
  tile::PanelTile<C.block_m, C.block_n> ds[ds_stages];
  float lse[C.row_stages()][C.block_m], delta[C.row_stages()][C.block_m];
  StepFacts facts[C.row_stages()];
  unsigned ticket;  // where sums have an order, so have the blocks of threads
  ptx::Barrier k_full, v_full;
  Barriers q_there[C.q_stages], dout_there[C.dout_stages], rows_there[C.row_stages()], dq_there;
  Barriers p_there, ds_there[ds_stages];  // where warpgroups share a step
};

// Which keys, of which head, and the blocks of queries that see some of them.
struct BackwardWork {
  int b, kv_head;
  SequenceArg sequence;
  int n_block, first_key;
  int first_m, past_m;

  [[nodiscard]] __device__ bool there() const { return n_block >= 0; }
  [[nodiscard]] __device__ int keys() const { return sequence.seqlen_k - first_key; }
};

// The first blocks of keys, which under a causal mask most queries see, come first. Where sums of dq have an
// order it is the other way round: under that mask the last blocks are the first to reach a block of queries,
// and each waits only for blocks of threads that began before it.
template <Sm90BackwardConfig C>
[[nodiscard]] __device__ __forceinline__ BackwardWork find_work(const Sm90BackwardParams& all,
                                                                const BackwardShared<C>& shared) {
  const AttentionParams& params = all.attention;
  const bool ordered = params.turn != nullptr;
  const unsigned index = ordered ? __shfl_sync(~0u, shared.ticket, 0) : ptx::block_index();
  const auto tiles =
      static_cast<unsigned>(count_tiles(params.batch, params.rows_k, params.packed(), C.block_n));
  const auto [b, tile] =
      find_tile(params.cu_seqlens_k, params.batch, params.rows_k, C.block_n, index % tiles);
  BackwardWork work{};
  work.b = b;
  work.kv_head = static_cast<int>(index / tiles);
  work.sequence = params.sequence(b);
  const int n_blocks = tiles_of(work.sequence.allocated_k, C.block_n);
  work.n_block = tile < 0 || tile >= n_blocks ? -1 : ordered ? n_blocks - 1 - tile : tile;
  work.first_key = work.n_block * C.block_n;
  const NarrowMask::Range rows =
      all.mask(work.sequence)
          .rows_of_any({work.first_key, min(work.first_key + C.block_n, work.sequence.seqlen_k)});
  if (!rows.empty()) {
    work.first_m = static_cast<unsigned>(rows.begin) / C.block_m;
    work.past_m = (static_cast<unsigned>(rows.end) + C.block_m - 1) / C.block_m;
  }
  return work;
}

// The steps of a block of threads: blocks of queries of one head, then of the group's next one.
struct Steps {
  int h, past_h, m_block;
  int first_m, past_m;

  __device__ Steps(const AttentionParams& params, const BackwardWork& work)
      : h(work.kv_head * params.group_size),
        past_h(work.first_m < work.past_m ? h + params.group_size : h),
        m_block(work.first_m),
        first_m(work.first_m),
        past_m(work.past_m) {}
  [[nodiscard]] __device__ __forceinline__ unsigned count() const {
    return (past_h - h) * (past_m - first_m);
  }
  [[nodiscard]] __device__ __forceinline__ bool more() const { return h < past_h; }
  __device__ __forceinline__ void next() {
    if (++m_block == past_m) {
      m_block = first_m;
      ++h;
    }
  }
};

// ---- Beside the consumers.

// One thread: asks TMA for the tiles.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void load_tiles(const Sm90BackwardParams& all, BackwardShared<C>& shared,
                                           const BackwardWork& work) {
  const AttentionParams& params = all.attention;
  const SequenceArg& sequence = work.sequence;
  const int b = params.packed() ? 0 : work.b, row_k = sequence.k_begin + work.first_key;
  Cursor<C.q_stages> q;
  Cursor<C.dout_stages> dout;
  Steps at(params, work);
  if (!at.more()) return;
  const auto load_q = [&] {
    begin_load(shared.q_there[q.stage], q.parity, C.block_m * C.head_dim * 2);
    load_tile<Reuse::soon>(shared.q[q.stage], all.q, shared.q_there[q.stage].full,
                           sequence.q_begin + at.m_block * C.block_m, at.h, b);
    q.next();
  };
  shared.k_full.arrive_and_expect_tx(C.block_n * C.head_dim * 2);
  load_tile<Reuse::once>(shared.k, all.k, shared.k_full, row_k, work.kv_head, b);
  load_q();
  shared.v_full.arrive_and_expect_tx(C.block_n * C.head_dim_v * 2);
  load_tile<Reuse::once>(shared.v, all.v, shared.v_full, row_k, work.kv_head, b);
  while (true) {
    begin_load(shared.dout_there[dout.stage], dout.parity, C.block_m * C.head_dim_v * 2);
    load_tile<Reuse::soon>(shared.dout[dout.stage], all.dout, shared.dout_there[dout.stage].full,
                           sequence.q_begin + at.m_block * C.block_m, at.h, b);
    dout.next();
    at.next();
    if (!at.more()) break;
    load_q();
  }
}

// A warp brings a number of each query, of which some are there. All loads before the first store: one after
// the other they would take longer than a step.
template <int queries, class AsNeeded>
__device__ __forceinline__ void bring_rows(float (&to)[queries], int there, float otherwise,
                                           const float* from, long long stride, const AsNeeded& as_needed) {
  const int lane = threadIdx.x % 32;
  float rows[queries / 32];
  from += lane * stride;
#pragma unroll
  for (int i = 0; i < queries / 32; ++i) {
    rows[i] = i * 32 + lane < there ? *from : otherwise;
    from += 32 * stride;
  }
#pragma unroll
  for (int i = 0; i < queries / 32; ++i) to[i * 32 + lane] = as_needed(rows[i]);
}

// One warp: brings lse of a step. It also clears what TMA read behind a sequence's end;
// consumers wait for it before they touch a step's tiles.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void load_lse(const Sm90BackwardParams& all, BackwardShared<C>& shared,
                                         const BackwardWork& work) {
  const AttentionParams& params = all.attention;
  const SequenceArg& sequence = work.sequence;
  // Fewer buffers of tiles than of rows: a parity tells two uses of a buffer apart, not three, so it waits
  // for each.
  constexpr bool runs_ahead = C.q_stages < C.row_stages() || C.dout_stages < C.row_stages();
  unsigned step = 0;
  Steps at(params, work);
  // p and ds of a key that is not there are 0: what they are multiplied by has to be a number.
  if (at.more() && (params.packed() || params.seqused_k != nullptr) && work.keys() < C.block_n) {
    ptx::wait(shared.k_full, 0);
    clear_rows<32>(shared.k, work.keys());
    ptx::wait(shared.v_full, 0);
    clear_rows<32>(shared.v, work.keys());
  }
  for (; at.more(); at.next(), ++step) {
    const RingPlace row = ring_at<C.row_stages()>(step);
    const int first_query = at.m_block * C.block_m, queries = sequence.seqlen_q - first_query;
    ptx::wait(shared.rows_there[row.stage].empty, row.parity ^ 1);
    bring_rows<C.block_m>(shared.lse[row.stage], queries, ptx::infinity,
                          tile::lse_of_row(params, work.b, at.h, sequence.q_begin + first_query),
                          params.lse.seq, [](float lse) { return tile::lse_for_p<C.terms>(lse); });
    if ((params.packed() || params.seqused_q != nullptr) && (runs_ahead || queries < C.block_m)) {
      const RingPlace q = ring_at<C.q_stages>(step), dout = ring_at<C.dout_stages>(step);
      ptx::wait(shared.q_there[q.stage].full, q.parity);
      ptx::wait(shared.dout_there[dout.stage].full, dout.parity);
      if (queries < C.block_m) {
        clear_rows<32>(shared.q[q.stage], queries);
        clear_rows<32>(shared.dout[dout.stage], queries);
      }
    }
    ptx::arrive(shared.rows_there[row.stage].full);
  }
}

// One warp: brings delta of a step, and what else there is to know of it.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void load_facts(const Sm90BackwardParams& all, BackwardShared<C>& shared,
                                           const BackwardWork& work) {
  const AttentionParams& params = all.attention;
  const SequenceArg& sequence = work.sequence;
  unsigned step = 0;
  for (Steps at(params, work); at.more(); at.next(), ++step) {
    const RingPlace row = ring_at<C.row_stages()>(step);
    const int first_query = at.m_block * C.block_m, tile_row = first_query / tile::DqTiles::rows;
    ptx::wait(shared.rows_there[row.stage].empty, row.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      shared.facts[row.stage] = {
          all.mask(sequence).tile(first_query, work.first_key),
          first_query,
          work.first_key,
          work.b,
          at.h,
          sequence.seqlen_q,
          sequence.seqlen_k,
          C.dq_direct() ? tile::DqTiles::row_of_tiles(params, work.b, at.h, tile_row) : nullptr};
    }
    bring_rows<C.block_m>(
        shared.delta[row.stage], sequence.seqlen_q - first_query, 0.0f,
        params.delta + tile::delta_index(params, work.b, at.h, sequence.q_begin + first_query), 1,
        [](float delta) { return delta; });
    ptx::arrive(shared.rows_there[row.stage].full);
  }
}

// The number of blocks of keys that add to a block of queries before this one.
template <Sm90BackwardConfig C>
[[nodiscard]] __device__ __forceinline__ int turn_of(const Sm90BackwardParams& all, const BackwardWork& work,
                                                     int m_block) {
  const int first_query = m_block * C.block_m;
  const NarrowMask::Range seen =
      all.mask(work.sequence)
          .keys_of_any({first_query, min(first_query + C.block_m, work.sequence.seqlen_q)});
  return (seen.end - 1) / C.block_n - work.n_block;
}

// The part of dq that a warp of the consumers has: 16 rows, and of the columns whole tiles.
template <Sm90BackwardConfig C>
struct DqPart {
  using Tiles = tile::DqTiles;
  int row, first_tile;
  int overlap;  // tiles at its begin that are another's
  int tiles;    // behind those

  __device__ DqPart(const AttentionParams& params, int group, int warp) {
    constexpr int part_tiles = C.dq_cols() / Tiles::cols;
    row = group / C.dq_parts() * group_rows + warp * warp_rows;
    first_tile = group % C.dq_parts() * part_tiles;
    overlap = max(0, first_tile + part_tiles - C.head_dim / Tiles::cols);
    tiles = min(part_tiles - overlap, tiles_of(params.head_dim, Tiles::cols) - first_tile);
  }
  // Behind the dq of a block of queries.
  [[nodiscard]] __device__ long long offset(const AttentionParams& params) const {
    return row / Tiles::rows * Tiles::row_size(params) + first_tile * Tiles::size;
  }
};

// One warp: a lane has the dq of one warp of the consumers added. Or, where they do that themselves, it tells
// them when it is their turn, if they have one.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void add_dq(const Sm90BackwardParams& all, BackwardShared<C>& shared,
                                       const BackwardWork& work) {
  using Tiles = tile::DqTiles;
  const AttentionParams& params = all.attention;
  if (C.dq_direct() && params.turn == nullptr) return;
  const int lane = threadIdx.x % 32, warp = lane % 4, group = lane / 4;
  const DqPart<C> part(params, group, warp);
  unsigned parity = 0;
  for (Steps at(params, work); at.more(); at.next()) {
    int* turn = nullptr;
    int mine = 0;
    if (params.turn != nullptr) {
      const long long all_tiles = count_tiles(params.batch, params.rows_q, params.packed(), C.block_m);
      turn = params.turn + at.h * all_tiles +
             first_tile(params.cu_seqlens_q, work.b, params.rows_q, C.block_m) + at.m_block;
      mine = turn_of<C>(all, work, at.m_block);
    }
    if constexpr (!C.dq_direct()) ptx::wait(shared.dq_there.full, parity);
    if (turn != nullptr) {
      while (ptx::load_acquire(turn) != mine) {
      }
      ptx::admit_global();
    }
    if constexpr (C.dq_direct()) {
      __syncwarp();
      if (lane == 0) ptx::arrive(shared.dq_there.empty);
      ptx::wait(shared.dq_there.full, parity);
    } else {
      ptx::publish_shared();
      const int first_query = at.m_block * C.block_m;
      if (group < C.consumers() && part.tiles > 0 && first_query + part.row < work.sequence.seqlen_q) {
        ptx::add_bulk(
            Tiles::row_of_tiles(params, work.b, at.h, first_query / Tiles::rows) + part.offset(params),
            ptx::shared_address(shared.dq[group][warp][part.overlap]), part.tiles * Tiles::size * 4);
      }
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();  // until it has been read
      __syncwarp();
      if (lane == 0) ptx::arrive(shared.dq_there.empty);
    }
    if (turn != nullptr) {
      ptx::wait_bulk();
      __threadfence();
      __syncwarp();
      if (lane == 0) ptx::store_release(turn, mine + 1);
    }
    parity ^= 1;
  }
}

// The warp is done with a buffer.
__device__ __forceinline__ void release(ptx::Barrier& empty) {
  if (threadIdx.x % 32 == 0) ptx::arrive(empty);
}

inline constexpr int consumers_meet = 1;  // the number of a barrier

// A block of threads. consume: what those do that compute.
template <Sm90BackwardConfig C, class Consume>
__device__ __forceinline__ void run(const Sm90BackwardParams& params, const Consume& consume) {
  static_assert(C.block_m % group_rows == 0 && C.block_n % group_rows == 0);
  static_assert(C.dq_parts() >= 1 && C.dq_parts() * C.block_m == C.consumers() * group_rows);
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<C>*>(shared_bytes);
  const AttentionParams& attention = params.attention;
  if (attention.turn != nullptr) {
    if (threadIdx.x == 0) {
      const long long turns = attention.num_heads_q *
                              count_tiles(attention.batch, attention.rows_q, attention.packed(), C.block_m);
      shared.ticket = atomicAdd(attention.turn + turns, 1);
    }
    __syncthreads();
  }
  const BackwardWork work = find_work(params, shared);
  if (!work.there()) return;
  if (threadIdx.x == 0) {
    const auto init = [](auto& all, int arrivals) {
      for (Barriers& barriers : all) {
        barriers.full.init(arrivals);
        barriers.empty.init(C.consumers() * 4);  // every warp
      }
    };
    shared.k_full.init(1);
    shared.v_full.init(1);
    init(shared.q_there, 1);
    init(shared.dout_there, 1);
    init(shared.rows_there, 2 * 32);
    shared.dq_there.full.init(C.consumers() * 4);
    shared.dq_there.empty.init(1);
    shared.p_there.full.init(4);
    shared.p_there.empty.init(4);
    init(shared.ds_there, 4);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int helper = ptx::warp_index() - C.consumers() * 4;
  if (helper >= 0) {
    cutlass::arch::warpgroup_reg_dealloc<C.producer_registers()>();
    if (helper == 0 && threadIdx.x % 32 == 0) load_tiles<C>(params, shared, work);
    if (helper == 1) load_lse<C>(params, shared, work);
    if (helper == 2) add_dq<C>(params, shared, work);
    if (helper == 3) load_facts<C>(params, shared, work);
  } else {
    cutlass::arch::warpgroup_reg_alloc<C.consumer_registers()>();
    consume(params, shared, work);
  }
}

}  // namespace tessera::sm90
