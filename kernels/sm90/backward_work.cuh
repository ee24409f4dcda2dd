// Hopper's backward, all but the products: which keys a block of threads has, the steps of its loop, what
// lies in shared memory, and the warps beside those that compute. One thread asks TMA for tiles, one warp
// brings lse and delta, one thread what else there is to know of a block of keys and of a step, and one warp
// has dq added; where its sums have an order two do, and one thread has what two have otherwise.
//
// A block of threads takes one block of keys after the other. All rings go on from block to block, so that
// the next one's tiles come while this one's dk and dv are stored.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "ptx/launch.cuh"
#include "sm90/pipeline.cuh"
#include "tile/copy.cuh"
#include "tile/dq_tiles.cuh"
#include "tile/gradients.cuh"
#include "tile/panels.cuh"

namespace tessera::sm90 {

inline constexpr int work_stages = 4;

// Which keys, of which head, and the blocks of queries that see some of them. One thread finds it, for all.
struct alignas(16) BackwardWork {
  int b, kv_head;
  SequenceArg sequence;
  int n_block, first_key;
  int first_m, past_m;
  int steps;  // -1: there is nothing left
  // Of the block of threads, before this one: blocks of keys, their steps, and loads of k and v, of which a
  // block without steps has none.
  unsigned blocks, first_step, loads;

  [[nodiscard]] __device__ int keys() const { return sequence.seqlen_k - first_key; }
};

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
  alignas(
      1024) float dq[C.dq_stages()][C.consumers()][4][C.dq_cols() / tile::DqTiles::cols][tile::DqTiles::size];
};
template <Sm90BackwardConfig C>
struct DqShared<C, false> {};

// dk and dv on their way, 16 keys a warp, if that memory is their own.
template <Sm90BackwardConfig C, bool there = C.own_leave()>
struct LeaveShared {
  static constexpr int cols = C.head_dim > C.head_dim_v ? C.head_dim : C.head_dim_v;
  alignas(1024) unsigned char leaving[C.block_n / warp_rows][warp_rows * cols * 2];
};
template <Sm90BackwardConfig C>
struct LeaveShared<C, false> {};

// Where warpgroups share a step (backward_wide.cuh): p on its way from the one to the other, as fragments.
template <Sm90BackwardConfig C, bool there = C.wide()>
struct PShared {
  alignas(1024) float p[4][C.block_m / 8][32][4];
};
template <Sm90BackwardConfig C>
struct PShared<C, false> {};

template <Sm90BackwardConfig C>
struct BackwardShared : DqShared<C>, LeaveShared<C>, PShared<C> {
  tile::PanelTile<C.block_n, C.head_dim> k;
  tile::PanelTile<C.block_n, C.head_dim_v> v;
  tile::PanelTile<C.block_m, C.head_dim> q[C.q_stages];
  tile::PanelTile<C.block_m, C.head_dim_v> dout[C.dout_stages];
  tile::PanelTile<C.block_m, C.block_n> ds[C.ds_stages()];
  float lse[C.row_stages()][C.block_m], delta[C.row_stages()][C.block_m];
  StepFacts facts[C.row_stages()];
  BackwardWork work[work_stages];
  Barriers work_there[work_stages], k_there, v_there;
  Barriers q_there[C.q_stages], dout_there[C.dout_stages], rows_there[C.row_stages()];
  Barriers dq_there[C.dq_turns()], ds_there[C.ds_stages()];
  Barriers p_there;  // where warpgroups share a step
  int before[2];     // who have added before, where sums have an order and are added directly
};

// Fills in the block of keys with a number; false where it has no keys. The first blocks of keys, which under
// a causal mask most queries see, come first. Where sums of dq have an order it is the other way round: under
// that mask the last blocks are the first to reach a block of queries, and each waits only for blocks with a
// smaller number (KeyOrder).
template <Sm90BackwardConfig C>
[[nodiscard]] __device__ __forceinline__ bool find_work(const Sm90BackwardParams& all, unsigned index,
                                                        BackwardWork& work) {
  const AttentionParams& params = all.attention;
  const auto tiles =
      static_cast<unsigned>(count_tiles(params.batch, params.rows_k, params.packed(), C.block_n));
  const int kv_head = static_cast<int>(index / tiles);
  if (kv_head >= params.num_heads_k) {
    work.steps = -1;
    return true;
  }
  const auto [b, tile] =
      find_tile(params.cu_seqlens_k, params.batch, params.rows_k, C.block_n, index % tiles);
  const SequenceArg sequence = params.sequence(b);
  const int n_blocks = tiles_of(sequence.allocated_k, C.block_n);
  if (tile < 0 || tile >= n_blocks) return false;
  const int n_block = C.ordered ? n_blocks - 1 - tile : tile;
  const int first_key = n_block * C.block_n;
  const NarrowMask::Range rows =
      all.mask(sequence).rows_of_any({first_key, min(first_key + C.block_n, sequence.seqlen_k)});
  work.b = b;
  work.kv_head = kv_head;
  work.sequence = sequence;
  work.n_block = n_block;
  work.first_key = first_key;
  work.first_m = rows.empty() ? 0 : static_cast<unsigned>(rows.begin) / C.block_m;
  work.past_m = rows.empty() ? 0 : (static_cast<unsigned>(rows.end) + C.block_m - 1) / C.block_m;
  work.steps = (work.past_m - work.first_m) * params.group_size;
  return true;
}

// Numbers of blocks of keys, in their order, from what was drawn. The first is the block of threads' own, and
// costs no time; but where sums have an order nobody may hold a number and not have begun, so that all are
// drawn.
[[nodiscard]] __device__ __forceinline__ unsigned draw(const Sm90BackwardParams& all) {
  return ptx::count_up(all.attention.ticket);
}
template <Sm90BackwardConfig C>
[[nodiscard]] __device__ __forceinline__ unsigned number_of(const Sm90BackwardParams& all, unsigned drawn) {
  return C.ordered ? all.order.place(drawn) : drawn + gridDim.x;
}
template <Sm90BackwardConfig C>
[[nodiscard]] __device__ __forceinline__ unsigned first_number(const Sm90BackwardParams& all) {
  return C.ordered ? number_of<C>(all, draw(all)) : ptx::block_index();
}

// What a helper, of one thread or all of a warp, does for each block of keys.
template <Sm90BackwardConfig C, class Use>
__device__ __forceinline__ void for_each_work(BackwardShared<C>& shared, const Use& use) {
  unsigned block = 0;
#pragma unroll 1
  while (true) {
    const RingPlace at = ring_at<work_stages>(block);
    ptx::wait(shared.work_there[at.stage].full, at.parity);
    const BackwardWork& work = shared.work[at.stage];
    if (work.steps < 0) return;
    use(work);
    block = work.blocks;  // not kept: a helper has 24 registers
    ptx::arrive(shared.work_there[ring_at<work_stages>(block).stage].empty);
    ++block;
  }
}

// The steps of a block of keys: blocks of queries of one head, then of the group's next one.
struct Steps {
  const BackwardWork& work;
  int left, h, m_block;

  __device__ Steps(const AttentionParams& params, const BackwardWork& block)
      : work(block), left(block.steps), h(block.kv_head * params.group_size), m_block(block.first_m) {}
  [[nodiscard]] __device__ __forceinline__ bool more() const { return left > 0; }
  [[nodiscard]] __device__ __forceinline__ bool first() const { return left == work.steps; }
  // Where all rings stand follows from it.
  [[nodiscard]] __device__ __forceinline__ unsigned step() const {
    return work.first_step + (work.steps - left);
  }
  __device__ __forceinline__ void next() {
    --left;
    if (++m_block == work.past_m) {
      m_block = work.first_m;
      ++h;
    }
  }
  // Where so many are left: for who has no registers to keep the rest.
  __device__ __forceinline__ void find_again(const AttentionParams& params, int so_many) {
    left = so_many;
    const unsigned blocks = work.past_m - work.first_m, past = work.steps - left;
    h = work.kv_head * params.group_size + past / blocks;
    m_block = work.first_m + past % blocks;
  }
};

// The warp is done with a buffer.
__device__ __forceinline__ void release(ptx::Barrier& empty) {
  if (threadIdx.x % 32 == 0) ptx::arrive(empty);
}

// ---- Beside the consumers.

// Asks TMA for the tiles of a step. It runs ahead into the next block of keys: the buffers of its first
// queries are the first to come free, k's the last.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void load_step(const Sm90BackwardParams& all, BackwardShared<C>& shared,
                                          const BackwardWork& work, const Steps& at) {
  const auto batch = [&] { return all.attention.packed() ? 0 : work.b; };
  const int row = work.sequence.q_begin + at.m_block * C.block_m;
  const RingPlace q = ring_at<C.q_stages>(at.step()), dout = ring_at<C.dout_stages>(at.step());
  begin_load(shared.q_there[q.stage], q.parity, C.block_m * C.head_dim * 2);
  load_tile<Reuse::soon>(shared.q[q.stage], all.q, shared.q_there[q.stage].full, row, at.h, batch());
  begin_load(shared.dout_there[dout.stage], dout.parity, C.block_m * C.head_dim_v * 2);
  load_tile<Reuse::soon>(shared.dout[dout.stage], all.dout, shared.dout_there[dout.stage].full, row, at.h,
                         batch());
  if (at.first()) {
    const int key = work.sequence.k_begin + work.first_key;
    begin_load(shared.v_there, work.loads % 2, C.block_n * C.head_dim_v * 2);
    load_tile<Reuse::once>(shared.v, all.v, shared.v_there.full, key, work.kv_head, batch());
    begin_load(shared.k_there, work.loads % 2, C.block_n * C.head_dim * 2);
    load_tile<Reuse::once>(shared.k, all.k, shared.k_there.full, key, work.kv_head, batch());
  }
}

// One thread, or find_facts does it.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void load_tiles(const Sm90BackwardParams& all, BackwardShared<C>& shared) {
  for_each_work(shared, [&](const BackwardWork& work) {
#pragma unroll 1
    for (Steps at(all.attention, work); at.more(); at.next()) load_step(all, shared, work, at);
  });
}

// A number of each query of a step, a lane's part of them.
template <int queries>
struct Rows {
  float of_lane[queries / 32];

  // Of the queries some are there.
  __device__ __forceinline__ Rows(const float* from, long long stride, int there, float otherwise) {
    const int lane = threadIdx.x % 32;
    from += lane * stride;
#pragma unroll
    for (int i = 0; i < queries / 32; ++i) {
      of_lane[i] = i * 32 + lane < there ? *from : otherwise;
      from += 32 * stride;
    }
  }
  __device__ __forceinline__ void store(float (&to)[queries]) const {
#pragma unroll
    for (int i = 0; i < queries / 32; ++i) to[i * 32 + threadIdx.x % 32] = of_lane[i];
  }
};

// One warp: brings lse and delta of a step. It also clears what TMA read behind a sequence's end;
// consumers wait for it before they touch a step's tiles.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void load_rows(const Sm90BackwardParams& all, BackwardShared<C>& shared) {
  const AttentionParams& params = all.attention;
  // A parity tells two uses of a buffer apart, not three: where it could be two ahead, it waits for each. So
  // it is with k and v, of which it may have brought all rows before they are there, and with queries that
  // have fewer buffers of tiles than of rows.
  constexpr bool runs_ahead = C.q_stages < C.row_stages() || C.dout_stages < C.row_stages();
  for_each_work(shared, [&](const BackwardWork& work) {
    const SequenceArg& sequence = work.sequence;
#pragma unroll 1
    for (Steps at(params, work); at.more(); at.next()) {
      const int first_query = at.m_block * C.block_m, queries = sequence.seqlen_q - first_query;
      // All loads before the first store: one after the other they would take longer than a step.
      const int first_row = sequence.q_begin + first_query;
      const Rows<C.block_m> delta(params.delta + tile::delta_index(params, work.b, at.h, first_row), 1,
                                  queries, 0.0f);
      Rows<C.block_m> lse(tile::lse_of_row(params, work.b, at.h, first_row), params.lse.seq, queries,
                          ptx::infinity);
      const RingPlace row = ring_at<C.row_stages()>(at.step());
      ptx::wait(shared.rows_there[row.stage].empty, row.parity ^ 1);
#pragma unroll
      for (float& x : lse.of_lane) x = tile::lse_for_p<C.terms>(x);
      lse.store(shared.lse[row.stage]);
      delta.store(shared.delta[row.stage]);
      // p and ds of a key that is not there are 0: what they are multiplied by has to be a number.
      if ((params.packed() || params.seqused_k != nullptr) && at.first()) {
        ptx::wait(shared.k_there.full, work.loads % 2);
        ptx::wait(shared.v_there.full, work.loads % 2);
        if (work.keys() < C.block_n) {
          clear_rows<32>(shared.k, work.keys());
          clear_rows<32>(shared.v, work.keys());
        }
      }
      if ((params.packed() || params.seqused_q != nullptr) && (runs_ahead || queries < C.block_m)) {
        const RingPlace q = ring_at<C.q_stages>(at.step()), dout = ring_at<C.dout_stages>(at.step());
        ptx::wait(shared.q_there[q.stage].full, q.parity);
        ptx::wait(shared.dout_there[dout.stage].full, dout.parity);
        if (queries < C.block_m) {
          clear_rows<32>(shared.q[q.stage], queries);
          clear_rows<32>(shared.dout[dout.stage], queries);
        }
      }
      ptx::arrive(shared.rows_there[row.stage].full);
    }
  });
}

// The number of blocks of keys that add to a block of queries before this one.
template <Sm90BackwardConfig C>
[[nodiscard]] __device__ __forceinline__ int turn_of(const Sm90BackwardParams& all, const BackwardWork& work,
                                                     int m_block) {
  const int first_query = m_block * C.block_m;
  return KeyOrder::turn(all.mask(work.sequence), first_query,
                        min(first_query + C.block_m, work.sequence.seqlen_q), work.n_block, C.block_n);
}

// One thread: the facts of a step, and the next block of keys when this one is nearly through: early enough
// to load its tiles, and late enough that who is fast gets more of them. Where sums have an order it asks for
// the tiles, too.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void find_facts(const Sm90BackwardParams& all, BackwardShared<C>& shared) {
  constexpr int ahead = 3;  // steps
  const AttentionParams& params = all.attention;
  // The block of keys with that number, or the next one that is there.
  const auto announce = [&](unsigned block, unsigned number, unsigned first_step, unsigned loads) {
    const RingPlace at = ring_at<work_stages>(block);
    ptx::wait(shared.work_there[at.stage].empty, at.parity ^ 1);
    BackwardWork& work = shared.work[at.stage];
    work.blocks = block;
    work.first_step = first_step;
    work.loads = loads;
    while (!find_work<C>(all, number, work)) number = number_of<C>(all, draw(all));
    ptx::arrive(shared.work_there[at.stage].full);
  };
  announce(0, first_number<C>(all), 0, 0);
  unsigned block = 0;
#pragma unroll 1
  while (true) {
    // Nobody else writes there. By an address that is found anew: it would be kept beside the other.
    if (shared.work[block % work_stages].steps < 0) return;
    const BackwardWork& work = shared.work[ptx::opaque(block % work_stages)];
    Steps at(params, work);
#pragma unroll 1
    while (true) {
      const bool ends = at.left == min(work.steps, ahead);
      const unsigned drawn = ends ? draw(all) : 0;  // it comes while the step's facts are found
      if (at.more()) {
        if constexpr (C.ordered) load_step(all, shared, work, at);
        const RingPlace row = ring_at<C.row_stages()>(at.step());
        const int first_query = at.m_block * C.block_m, tile_row = first_query / tile::DqTiles::rows;
        ptx::wait(shared.rows_there[row.stage].empty, row.parity ^ 1);
        shared.facts[row.stage] = {
            all.mask(work.sequence).tile(first_query, work.first_key),
            first_query,
            work.first_key,
            work.b,
            at.h,
            work.sequence.seqlen_q,
            work.sequence.seqlen_k,
            C.dq_direct() ? tile::DqTiles::row_of_tiles(params, work.b, at.h, tile_row) : nullptr};
        ptx::arrive(shared.rows_there[row.stage].full);
      }
      if (ends) {
        announce(work.blocks + 1, number_of<C>(all, drawn), work.first_step + work.steps,
                 work.loads + (work.steps > 0 ? 1 : 0));
        if (work.steps > 1) at.find_again(params, min(work.steps, ahead));
      }
      if (at.left <= 1) break;
      at.next();
    }
    block = work.blocks + 1;
  }
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
  [[nodiscard]] __device__ int offset(const AttentionParams& params) const {
    return row / Tiles::rows * Tiles::row_size(params) + first_tile * Tiles::size;
  }
};

// One warp: a lane has the dq of one warp of the consumers added. Or, where they do that themselves, it tells
// them when it is their turn, if they have one.
//
// Where sums have an order, a step is passed on when it is in memory, and that takes longer than a step: two
// warps have every other step each. Meanwhile it looks whose turn its next one is. One fence then orders
// both, what was added before who is told, and what was seen before what is added next. Others' additions are
// before it, too: it has waited for them.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void add_dq(const Sm90BackwardParams& all, BackwardShared<C>& shared) {
  using Tiles = tile::DqTiles;
  const AttentionParams& params = all.attention;
  for_each_work(shared, [&](const BackwardWork& work) {
    if (C.dq_direct() && !C.ordered) return;
    int seen = -1;  // of the step's turn
    Steps at(params, work);
    if (C.ordered && at.step() % 2 != ptx::thread_index() / 64 % 2) at.next();
#pragma unroll 1
    while (at.more()) {
      // Found again rather than kept. Tiles of queries, of all heads, are fewer than 2^31.
      const auto turn = [&] {
        const auto tiles =
            static_cast<unsigned>(count_tiles(params.batch, params.rows_q, params.packed(), C.block_m));
        return ptx::opaque(at.h) * tiles + first_tile(params.cu_seqlens_q, work.b, params.rows_q, C.block_m) +
               at.m_block;
      };
      // Of the lane's part: where dq is in shared memory, where it is added, and how much of it there is.
      unsigned from = 0;
      float* to = nullptr;
      int bytes = 0;
      if constexpr (!C.dq_direct()) {
        const int lane = ptx::thread_index() % 32, warp = lane % 4, group = lane / 4;
        const int first_query = at.m_block * C.block_m;
        const DqPart<C> part(params, group, warp);
        if (group < C.consumers() && part.tiles > 0 && first_query + part.row < work.sequence.seqlen_q) {
          from = ptx::shared_address(shared.dq[at.step() % C.dq_stages()][group][warp][part.overlap]);
          bytes = part.tiles * Tiles::size * 4;
          to = Tiles::row_of_tiles(params, work.b, at.h, first_query / Tiles::rows) + part.offset(params);
        }
        // Before it waits for those who compute, for they wait for the rest.
        from = ptx::opaque(from);
        to = ptx::opaque(to);
        bytes = ptx::opaque(bytes);
      }
      if constexpr (C.ordered) {
        const int mine = turn_of<C>(all, work, at.m_block);
        while (seen != mine) seen = ptx::load_acquire(params.turn + turn());
        if constexpr (!C.dq_direct()) ptx::admit_global();
      }
      const auto place = [&] { return ring_at<C.dq_turns()>(at.step()); };
      if constexpr (C.dq_direct()) {
        shared.before[place().stage] = seen;
        __syncwarp();
        release(shared.dq_there[place().stage].empty);
        ptx::wait(shared.dq_there[place().stage].full, place().parity);
      } else {
        ptx::wait(shared.dq_there[place().stage].full, place().parity);
        ptx::publish_shared();
        if (bytes > 0) {
          if (C.ordered && seen == 0) {  // nobody has added before: what lies there is no sum
            ptx::store_bulk(to, from, bytes);
          } else {
            ptx::add_bulk(to, from, bytes);
          }
        }
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // until it has been read
        __syncwarp();
        release(shared.dq_there[place().stage].empty);
      }
      if constexpr (C.ordered) {
        const unsigned added = ptx::opaque(turn());
        at.next();
        at.next();
        if (at.more()) seen = ptx::load_relaxed(params.turn + turn());
        if constexpr (!C.dq_direct()) ptx::wait_bulk<0>();
        __syncwarp();
        ptx::fence();
        if (threadIdx.x % 32 == 0) ptx::add_relaxed(params.turn + added, 1);
      } else {
        at.next();
      }
    }
  });
}

inline constexpr int consumers_meet = 1;  // the number of a barrier

// A warp's 16 rows of dk or dv, or `cols` of their columns, leave through shared memory of its own.
template <Half type, int n, class Tile>
__device__ __forceinline__ void store_rows(const tile::FragmentC (&sum)[1][n], Tile& tile, const RowsArg& to,
                                           int b, int row, int head, int rows_there, int cols) {
  static_assert(Tile::rows == warp_rows && Tile::cols == n * 8);
  if (to.wide || !to.aligned || rows_there < warp_rows || cols < Tile::cols) {
    tile::store_tile<type, true>(sum, tile, 0, to, b, row, head, rows_there, 0, cols);
    return;
  }
  const int lane = ptx::thread_index() % 32;
  const unsigned place = ptx::shared_address(tile.at(lane % 16, lane / 16));
#pragma unroll
  for (int j = 0; j < n; j += 2) {
    constexpr int pieces = Tile::width / 8;
    tile::FragmentA two;
    tile::as_operand<type>(two, sum[0], j / 2);
    ptx::store_matrices((place ^ j % pieces << 4) + j / pieces * Tile::panel_bytes, two);
  }
  __syncwarp();
  // 8 rows, 64 bytes of each, at a time: two addresses are enough, and lanes read from all banks.
  auto* out = static_cast<tile::HalfBits*>(to.data) + b * to.batch + (row + lane % 8) * to.seq +
              head * to.head + lane / 8 * 8;
#pragma unroll
  for (int i = 0; i < warp_rows; i += 8) {
#pragma unroll
    for (int j = 0; j < n; j += 4) {
      *reinterpret_cast<uint4*>(out + j * 8) =
          *reinterpret_cast<const uint4*>(tile.at(lane % 8 + i, lane / 8 + j));
    }
    out += 8 * to.seq;
  }
}

// A block of threads. consume: what those do that compute.
template <Sm90BackwardConfig C, class Consume>
__device__ __forceinline__ void run(const Sm90BackwardParams& params, const Consume& consume) {
  static_assert(C.block_m % group_rows == 0 && C.block_n % group_rows == 0);
  static_assert(C.dq_parts() >= 1 && C.dq_parts() * C.block_m == C.consumers() * group_rows);
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<C>*>(shared_bytes);
  if (threadIdx.x == 0) {
    constexpr int warps = C.consumers() * 4;
    const auto init = [](auto& all, int arrivals, int releases) {
      for (Barriers& barriers : all) {
        barriers.full.init(arrivals);
        barriers.empty.init(releases);
      }
    };
    init(shared.work_there, 1, warps + 2 * 32 + (C.ordered ? 32 : 1));  // and helpers
    shared.k_there.full.init(1);
    shared.k_there.empty.init(warps);
    shared.v_there.full.init(1);
    shared.v_there.empty.init(C.wide() ? 4 : warps);
    init(shared.q_there, 1, warps);
    init(shared.dout_there, 1, warps);
    init(shared.rows_there, 32 + 1, warps);
    init(shared.dq_there, warps, 1);
    shared.p_there.full.init(4);
    shared.p_there.empty.init(4);
    init(shared.ds_there, 4, warps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  ptx::wait_for_earlier();  // delta
  const int helper = ptx::warp_index() - C.consumers() * 4;
  if (helper >= 0) {
    cutlass::arch::warpgroup_reg_dealloc<C.producer_registers()>();
    if (helper == 1) {
      load_rows<C>(params, shared);
    } else if (helper == 2 || (C.ordered && helper == 0)) {
      add_dq<C>(params, shared);
    } else if (threadIdx.x % 32 != 0) {
      return;
    } else if (!C.ordered && helper == 0) {
      load_tiles<C>(params, shared);
    } else {
      find_facts<C>(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C.consumer_registers()>();
    consume(params, shared);
  }
}

}  // namespace tessera::sm90
