// What Hopper's forward kernel has in shared memory, and the one thread that asks TMA for it.
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

// The producer.
template <Sm90ForwardConfig C>
__device__ __forceinline__ void produce(const Sm90ForwardParams& params, ForwardShared<C>& shared) {
  Cursor<C.q_stages> q;
  Cursor<C.stages> k, v;
  for (Schedule<C.block_m, C.block_n, C.grouped> schedule(params, shared.sequences); schedule.more();
       schedule.next()) {
    const ForwardWork work = schedule.work();
    if (!work.there()) continue;
    const int b = params.attention.packed() ? 0 : work.b, head_k = params.order.group_size.quotient(work.h);
    // The last queries' first: they see the last keys, which come first.
    const auto load_q = [&] {
#pragma unroll
      for (int i = C.consumers() - 1; i >= 0; --i) {
        Barriers& there = shared.q_there[q.stage][i];
        auto& tile = shared.queries[q.stage][i].q;
        ptx::wait(there.empty, q.parity ^ 1);
        hand_over(shared.work[work_stage<C>(q)][i], work);
        there.full.arrive_and_expect_tx(group_rows * C.head_dim * 2);
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
      }
      q.next();
    };
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
    // In the order of use. The buffer of q may be the last to become free.
    const bool any = work.first_block < work.past_block;
    if (any) load_k(work.past_block - 1);
    load_q();
    for (int block = work.past_block - 2; block >= work.first_block; --block) {
      load_k(block);
      load_v(block + 1);
    }
    if (any) load_v(work.first_block);
  }
  for (int i = 0; i < C.consumers(); ++i) {  // the end
    Barriers& there = shared.q_there[q.stage][i];
    ptx::wait(there.empty, q.parity ^ 1);
    hand_over(shared.work[work_stage<C>(q)][i], no_work);
    ptx::arrive(there.full);
  }
}

}  // namespace tessera::sm90
