// What Hopper's forward kernel has in shared memory, and the threads that ask TMA to bring and take it.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "sm90/pipeline.cuh"
#include "sm90/schedule.cuh"
#include "tile/panels.cuh"
#include "tile/scores.cuh"

namespace tessera::sm90 {

// A warpgroup's outputs, or some columns of them.
template <Sm90ForwardConfig C>
using OutTile = tile::PanelTile<group_rows, C.o_cols()>;
// Its queries, and then their outputs.
template <Sm90ForwardConfig C, bool apart = C.o_apart()>
union QueryTile {
  tile::PanelTile<group_rows, C.head_dim> q;
  OutTile<C> o;
};
template <Sm90ForwardConfig C>
union QueryTile<C, true> {
  tile::PanelTile<group_rows, C.head_dim> q;
};
template <Sm90ForwardConfig C, bool apart = C.o_apart()>
struct ForwardOut {
  OutTile<C> o[C.consumers()];
};
template <Sm90ForwardConfig C>
struct ForwardOut<C, false> {};

template <Sm90ForwardConfig C>
struct ForwardTiles : ForwardOut<C> {
  QueryTile<C> queries[C.q_stages][C.consumers()];
  tile::PanelTile<C.block_n, C.head_dim> k[C.stages];
  tile::PanelTile<C.block_n, C.head_dim_v> v[C.stages];
};

// A warpgroup loads the bias of its queries itself.
template <Sm90ForwardConfig C, bool there = has(C.terms, Terms::bias)>
struct ForwardBias {
  tile::BiasTile<has(C.terms, Terms::wide_bias), group_rows, C.block_n> bias[C.consumers()];
};
template <Sm90ForwardConfig C>
struct ForwardBias<C, false> {};

inline constexpr int work_stages = 2;

template <Sm90ForwardConfig C>
struct ForwardShared
    : ForwardTiles<C>,
      ForwardBias<C>,
      tile::DropoutShared<has(C.terms, Terms::dropout), C.consumers() * group_threads, 1, C.block_n / 8> {
  Barriers q_there[C.q_stages][C.consumers()], k_there[C.stages], v_there[C.stages];
  ForwardWork work[work_stages][C.consumers()];  // comes with q
  SortedSequences sequences;
};

// Where the work lies that comes with q. While a tile's is read, the next one's may come.
template <Sm90ForwardConfig C>
[[nodiscard]] __device__ __forceinline__ unsigned work_stage(const Cursor<C.q_stages>& q) {
  static_assert(C.q_stages <= work_stages && work_stages == 2);
  return C.q_stages == 1 ? q.parity : q.stage;
}

// Where a tile has several heads: that of one of its rows, and which of the head's rows that is. Of all rows
// of a warp the head is the same.
template <Sm90ForwardConfig C>
[[nodiscard]] __device__ __forceinline__ int head_of(const Sm90ForwardParams& params, int first_head,
                                                     int row) {
  return C.grouped ? first_head + row / params.order.head_rows : first_head;
}
template <Sm90ForwardConfig C>
[[nodiscard]] __device__ __forceinline__ int row_of(const Sm90ForwardParams& params, int row) {
  return C.grouped ? row & (params.order.head_rows - 1) : row;
}
// Of those that share a key head.
[[nodiscard]] __device__ __forceinline__ int last_head(const Sm90ForwardParams& params, int head) {
  return (params.order.group_size.quotient(head) + 1) * params.attention.group_size - 1;
}

// Where the outputs of a warp's rows belong.
struct OutRows {
  int first, h, there;  // the first of the head's rows that the tile has, and how many of those there are
  bool by_tma;

  template <Sm90ForwardConfig C>
  [[nodiscard]] static __device__ __forceinline__ OutRows of(const Sm90ForwardParams& params,
                                                             const ForwardWork& work, int tile_row) {
    OutRows rows{row_of<C>(params, tile_row), head_of<C>(params, work.h, tile_row),
                 work.sequence.allocated_q - work.first_query, params.o_by_tma};
    if constexpr (C.grouped) {  // a tile may have room for more heads than there are
      const int last = last_head(params, work.h);
      if (rows.h > last) {
        rows.h = last;
        rows.there = 0;
        rows.by_tma = false;
      }
    }
    // A packed sequence may end among the warp's rows, and the next begin there.
    if (params.attention.packed() && rows.first + warp_rows > rows.there) rows.by_tma = false;
    return rows;
  }
};
// TMA takes them, or some of their columns, out of shared memory.
template <Sm90ForwardConfig C>
__device__ __forceinline__ void send(const Sm90ForwardParams& params, const ForwardWork& work,
                                     const OutRows& rows, OutTile<C>& o, int row, int part = 0) {
  using Tile = OutTile<C>;
#pragma unroll
  for (int i = 0; i < Tile::panels; ++i) {
    cute::SM90_TMA_STORE_4D::copy(&params.o, o.data + i * Tile::panel_bytes + row * Tile::row_bytes,
                                  part + i * Tile::width,
                                  work.sequence.q_begin + work.first_query + rows.first, rows.h,
                                  params.attention.packed() ? 0 : work.b);
  }
}

// The thread that loads queries and tells the warpgroups what they are to do, and sends the outputs that they
// leave in the place of their queries before it loads the next ones there.
template <Sm90ForwardConfig C>
__device__ __forceinline__ void serve_queries(const Sm90ForwardParams& params, ForwardShared<C>& shared) {
  Cursor<C.q_stages> q;
  int before = 0;  // tiles
  // The buffer becomes free: what the tile that had it has left there is read.
  const auto vacate = [&](int i) {
    if (before < C.q_stages) return;
    ptx::wait(shared.q_there[q.stage][i].empty, q.parity ^ 1);
    if constexpr (!C.o_apart()) {
      Cursor<C.q_stages> then = q;
      then.parity ^= 1;
      const ForwardWork& work = shared.work[work_stage<C>(then)][i];
#pragma unroll 1
      for (int row = 0; row < group_rows; row += warp_rows) {
        const OutRows rows = OutRows::of<C>(params, work, i * group_rows + row);
        if (rows.by_tma) send<C>(params, work, rows, shared.queries[q.stage][i].o, row);
      }
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
    }
  };
  for (Schedule<C.block_m, C.block_n, C.grouped> schedule(params, shared.sequences); schedule.more();
       schedule.next()) {
    ForwardWork work = schedule.work();
    if (!work.there()) continue;
    const int b = params.attention.packed() ? 0 : work.b;
    // The last ones first: they see the last keys, which come first.
#pragma unroll 1
    for (int i = C.consumers() - 1; i >= 0; --i) {
      Barriers& there = shared.q_there[q.stage][i];
      auto& tile = shared.queries[q.stage][i].q;
      vacate(i);
      there.full.expect_transaction(group_rows * C.head_dim * 2);
      if constexpr (C.grouped) {
        const int rows = params.order.head_rows, last = last_head(params, work.h);
#pragma unroll 1
        for (int row = 0; row < group_rows; row += rows) {
          const int head = work.h + (i * group_rows + row) / rows;  // the last one takes the place of none
          load_tile<Reuse::once>(tile, params.q, there.full, 0, min(head, last), b, row);
        }
      } else {
        load_tile<Reuse::once>(tile, params.q, there.full,
                               work.sequence.q_begin + work.first_query + i * group_rows, work.h, b);
      }
      // Which keys it sees is worked out while its queries come.
      work.own = schedule.template seen<C.turns, group_rows>(work, i);
      hand_over(shared.work[work_stage<C>(q)][i], work);
      ptx::arrive(there.full);
    }
    // At first the second tile's are not in the way of what the first one needs.
    if (before == 0) ptx::wait(shared.q_there[q.stage][0].full, q.parity);
    ++before;
    q.next();
  }
  for (int last = 0; last < C.q_stages; ++last) {
    for (int i = C.consumers() - 1; i >= 0; --i) {
      vacate(i);
      if (last > 0) continue;
      hand_over(shared.work[work_stage<C>(q)][i], no_work);
      ptx::arrive(shared.q_there[q.stage][i].full);
    }
    ++before;
    q.next();
  }
}

// The thread that loads keys and values, in the order of their use.
template <Sm90ForwardConfig C>
__device__ __forceinline__ void load_keys(const Sm90ForwardParams& params, ForwardShared<C>& shared) {
  Cursor<C.stages> k, v;
  bool begun = false;
  for (Schedule<C.block_m, C.block_n, C.grouped> schedule(params, shared.sequences); schedule.more();
       schedule.next()) {
    const ForwardWork work = schedule.work();
    if (!work.there() || work.first_block >= work.past_block) continue;
    const int b = params.attention.packed() ? 0 : work.b, head_k = params.order.group_size.quotient(work.h);
    const auto load_k = [&](int block) {
      begin_load(shared.k_there[k.stage], k.parity, C.block_n * C.head_dim * 2);
      load_tile<Reuse::soon>(shared.k[k.stage], params.k, shared.k_there[k.stage].full,
                             work.sequence.k_begin + block * C.block_n, head_k, b);
      k.next();
    };
    const auto load_v = [&](int block) {
      begin_load(shared.v_there[v.stage], v.parity, C.block_n * C.head_dim_v * 2);
      load_tile<Reuse::soon>(shared.v[v.stage], params.v, shared.v_there[v.stage].full,
                             work.sequence.k_begin + block * C.block_n, head_k, b);
      v.next();
    };
    const bool first = !begun;
    begun = true;
    load_k(work.past_block - 1);
    // At first all multiprocessors wait for memory, for keys and queries; nothing else is in their way.
    if (first) ptx::wait(shared.k_there[0].full, 0);
    for (int block = work.past_block - 2; block >= work.first_block; --block) {
      load_k(block);
      load_v(block + 1);
    }
    load_v(work.first_block);
  }
}

}  // namespace tessera::sm90
