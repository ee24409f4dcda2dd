// Backward on Hopper, head dims above 128: dk and dv of 64 keys fill the registers of two warpgroups.
//
// Both have the same 64 keys. The one makes s, p and dv, the other dp, ds and dk; p goes from the first to
// the second as float32 fragments, lane to lane, and ds to both through shared memory, for dq, whose columns
// they share. A step of the two:
//
//   s issued  | p, its copy  | a part of dv, dq and the rest of dv issued | dq is added while dv runs
//   dp issued | ds, its copy | dq and dk issued                           | dq is added while dk runs
//
// The one computes while the other's products run. Nothing of a step is left to the next: so its buffers of q
// and dout are filled again during all of the next.
//
// All else is that of backward_work.cuh.
#pragma once

#include "sm90/backward_work.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"

namespace tessera::sm90 {

enum class Side { p, ds };

// The warp's dq of a step is added at once. Where sums have an order, when it is its turn; add_dq waits until
// the sum is in memory, and tells the next one.
template <Sm90BackwardConfig C, int n>
__device__ __forceinline__ void add_from_registers(const AttentionParams& params, BackwardShared<C>& shared,
                                                   unsigned step, const tile::FragmentC (&dq)[n]) {
  using Tiles = tile::DqTiles;
  const RingPlace turn = ring_at<C.dq_turns()>(step);
  // A branch that is never taken without an order: else what follows is worked out between the products, and
  // they wait for it.
  if (params.turn != nullptr) ptx::wait(shared.dq_there[turn.stage].empty, turn.parity);
  const int group = ptx::warp_index_again() / 4, warp = ptx::warp_index_again() % 4;
  const DqPart<C> part(params, group, warp);
  const StepFacts& facts = shared.facts[step % C.row_stages()];
  if (facts.first_query + part.row < facts.seqlen_q) {
    float* to = facts.dq + part.offset(params);
    const auto all = [&](bool whole, const auto& add) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (whole || (j >= part.overlap && j - part.overlap < part.tiles))
          add(to + (whole ? j : j - part.overlap) * Tiles::size, dq[j]);
      }
    };
    const auto add = [](float* tile, const tile::FragmentC& c) { Tiles::add(tile, c); };
    const auto store = [](float* tile, const tile::FragmentC& c) { Tiles::store(tile, c); };
    if (C.ordered && shared.before[turn.stage] == 0) {
      all(false, store);
    } else if (part.tiles == n) {
      all(true, add);
    } else {
      all(false, add);
    }
  }
  __syncwarp();
  if constexpr (C.ordered) release(shared.dq_there[turn.stage].full);
  release(shared.rows_there[step % C.row_stages()].empty);
}

// dk or dv, 16 keys a warp, leaves through 4 KB of shared memory: 128 columns at a time.
template <Sm90BackwardConfig C, int n>
__device__ __forceinline__ void leave(const BackwardWork& work, void* through,
                                      const tile::FragmentC (&sum)[n], RowsArg to, int cols) {
  constexpr int parts = n > 16 ? 2 : 1;
  using Part = const tile::FragmentC[1][n / parts];
  using Tile = tile::PanelTile<warp_rows, n / parts * 8>;
  static_assert(sizeof(Tile) <= 4096);
  const int first_key = work.first_key + ptx::warp_index_again() % 4 * warp_rows;
#pragma unroll
  for (int i = 0; i < parts; ++i) {
    store_rows<C.type>(reinterpret_cast<Part&>(sum[i * (n / parts)]), *static_cast<Tile*>(through), to,
                       work.b, work.sequence.k_begin + first_key, work.kv_head,
                       work.sequence.allocated_k - first_key, cols - i * Tile::cols);
    to.data = static_cast<char*>(to.data) + Tile::cols * (to.wide ? 4 : 2);
    __syncwarp();
  }
}

template <Sm90BackwardConfig C, Side side>
__device__ __forceinline__ void consume_side(const Sm90BackwardParams& all, BackwardShared<C>& shared) {
  constexpr bool has_p = side == Side::p;
  constexpr int n = C.block_m / 8;
  constexpr int depth = has_p ? C.head_dim : C.head_dim_v;  // of s or dp
  constexpr int cols = has_p ? C.head_dim_v : C.head_dim;   // of dv or dk
  constexpr bool plain = tile::units_of(C.terms) == tile::Units::raw && !has(C.terms, Terms::dropout);
  constexpr bool begun = has_p && has(C.terms, Terms::alibi) && tile::units_of(C.terms) == tile::Units::raw;
  constexpr auto across = ptx::Depth::across_rows;
  const AttentionParams& params = all.attention;
  const int lane = threadIdx.x % 32;
  const int warp_row = ptx::warp_index() % 4 * warp_rows;

  // Of queries come rows of the first kind as operands of s or dp, of the second kind as those of dv or dk.
  const auto choose = [](auto& of_p, auto& of_ds) -> auto& {
    if constexpr (has_p) {
      return of_p;
    } else {
      return of_ds;
    }
  };
  auto& first_there = choose(shared.q_there, shared.dout_there);
  auto& second_there = choose(shared.dout_there, shared.q_there);
  constexpr int first_stages = has_p ? C.q_stages : C.dout_stages;
  constexpr int second_stages = has_p ? C.dout_stages : C.q_stages;
  const tile::PanelOperand key_rows(choose(shared.k, shared.v));
  const tile::PanelOperand first_operand(choose(shared.q, shared.dout)[0]);
  const tile::PanelOperand second_operand(choose(shared.dout, shared.q)[0]);
  const tile::PanelOperand ds_operand(shared.ds[0]);
  const tile::PanelOperand k_whole(shared.k);
  const auto k_cols = k_whole.part(0, has_p ? 0 : C.head_dim - C.dq_cols());

  tile::FragmentC s[1][n];  // or dp
  tile::FragmentC dq[C.dq_cols() / 8];
  tile::FragmentC sum[1][cols / 8];  // dv or dk
  tile::FragmentA operand[n / 2];    // p or ds

  unsigned step = 0;  // of all blocks of keys
  const auto row_now = [&] { return ring_at<C.row_stages()>(step); };
  const auto facts = [&]() -> const StepFacts& { return shared.facts[row_now().stage]; };
  const auto warp_key = [&] { return facts().first_key + warp_row; };
  const auto terms_of = [&] { return facts().template terms<C>(params); };

  // s = k q^T or dp = v dout^T, in flight.
  const auto issue_scores = [&] {
    const RingPlace row = row_now(), tile = ring_at<first_stages>(step);
    ptx::wait(shared.rows_there[row.stage].full, row.parity);
    ptx::wait(first_there[tile.stage].full, tile.parity);
    if constexpr (begun)
      terms_of().template start<tile::Orientation::keys_by_queries>(s, facts().first_query, warp_key());
    ptx::settle(s[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < depth; d += 16)
      ptx::wgmma<C.type>(s[0], key_rows.cols_from(d), first_operand.cols_from(d, tile.stage), begun || d > 0);
    ptx::wgmma_commit();
  };
  // dv += p^T dout or dk += ds^T q, in flight.
  const auto issue_sum = [&](int begin, int end) {
    const RingPlace tile = ring_at<second_stages>(step);
    if (begin == 0) {
      ptx::wait(second_there[tile.stage].full, tile.parity);
      ptx::settle(sum[0]);
      ptx::settle(operand);
      ptx::wgmma_fence();
    }
#pragma unroll
    for (int j = begin; j < end; ++j)
      ptx::wgmma<C.type>(sum[0], operand[j], second_operand.rows_from(j * 16, tile.stage), true);
    ptx::wgmma_commit();
  };
  // dq = ds k, in flight.
  const auto issue_dq = [&] {
    const RingPlace place = ring_at<C.ds_stages()>(step);
    ptx::wait(shared.ds_there[place.stage].full, place.parity);
    ptx::settle(dq);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < C.block_n; key += 16)
      ptx::wgmma<C.type, ptx::Depth::along_rows, across>(dq, ds_operand.cols_from(key, place.stage),
                                                         k_cols.rows_from(key), key > 0);
    ptx::wgmma_commit();
  };
  const auto pass_dq = [&] {
    ptx::settle(dq);
    release(shared.ds_there[step % C.ds_stages()].empty);
    add_from_registers(params, shared, step, dq);
  };

  const unsigned p_place = ptx::opaque(ptx::shared_address(shared.p[ptx::warp_index() % 4][0][lane]));
  const auto make_p = [&] {
    const TileMask of_block = facts().mask;
    const TileMask mask{of_block.left - warp_row, of_block.right - warp_row, of_block.end - warp_row};
    const auto pass = [&](int j, const tile::FragmentC& p) {
      ptx::store(p_place + j * sizeof(shared.p[0][0]), p);
    };
    if constexpr (plain) {
      if (!mask.sees_all(C.block_m, warp_rows)) tile::hide_transposed(s[0], mask);
#pragma unroll
      for (int j = 0; j < n; ++j) tile::plain_p(s[0][j], shared.lse[row_now().stage], j, params.scale_log2);
      ptx::wait(shared.p_there.empty, step % 2 ^ 1);
#pragma unroll
      for (int j = 0; j < n; ++j) pass(j, s[0][j]);
    } else {
      ptx::wait(shared.p_there.empty, step % 2 ^ 1);
      tile::weights<C.type, C.terms>(s[0], shared.lse[row_now().stage], terms_of(), mask, facts().first_query,
                                     warp_key(), pass);
    }
    __syncwarp();
    release(shared.p_there.full);
#pragma unroll
    for (int j = 0; j < n / 2; ++j) tile::as_operand<C.type>(operand[j], s[0], j);
    ptx::settle(operand);  // now: s would take the registers of dq
  };
  const unsigned ds_place = ptx::opaque(
      ptx::shared_address(shared.ds[0].at(lane / 16 * 8 + lane % 8, warp_row / 8 + lane / 8 % 2)));
  const auto make_ds = [&] {
    ptx::wait(shared.p_there.full, step % 2);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      tile::FragmentC p;
      ptx::load(p, p_place + j * sizeof(shared.p[0][0]));
      tile::ds_of_passed<C.terms>(s[0][j], p, shared.delta[row_now().stage], j, params.dropout.scale);
    }
    __syncwarp();
    release(shared.p_there.empty);
    const RingPlace place = ring_at<C.ds_stages()>(step);
    ptx::wait(shared.ds_there[place.stage].empty, place.parity ^ 1);
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      tile::as_operand<C.type>(operand[j], s[0], j);
      ptx::store_matrices_transposed(
          ds_place + place.stage * sizeof(shared.ds[0]) + j * 16 * shared.ds[0].row_bytes, operand[j]);
    }
    ptx::publish_shared();
    __syncwarp();
    release(shared.ds_there[place.stage].full);
  };
#pragma unroll 1
  for (unsigned block = 0;; ++block) {
    const RingPlace place = ring_at<work_stages>(block);
    ptx::wait(shared.work_there[place.stage].full, place.parity);
    const BackwardWork& work = shared.work[place.stage];
    const int steps = __shfl_sync(~0u, work.steps, 0);
    if (steps < 0) break;
    tile::clear(sum);
    if (steps > 0) {
      ptx::wait(shared.k_there.full, work.loads % 2);
      if constexpr (!has_p) ptx::wait(shared.v_there.full, work.loads % 2);
    }
#pragma unroll 1
    for (const unsigned past = step + steps; step < past; ++step) {
      issue_scores();
      ptx::wgmma_wait<0>();
      ptx::settle(s[0]);
      release(first_there[step % first_stages].empty);
      if constexpr (has_p) {
        make_p();
        constexpr int part = n / 2 / C.dv_parts;
        issue_sum(0, part);  // the other side makes ds meanwhile
        issue_dq();
        issue_sum(part, n / 2);
      } else {
        make_ds();
        issue_dq();
        issue_sum(0, n / 2);
      }
      ptx::wgmma_wait<1>();
      pass_dq();
      ptx::wgmma_wait<0>();
      ptx::settle(sum[0]);
      release(second_there[step % second_stages].empty);
    }
    if (steps > 0) {
      release(shared.k_there.empty);
      if constexpr (!has_p) release(shared.v_there.empty);
    }

    // dk and dv leave through memory of their side: dv through that of p, which the other side has read, dk
    // through that of ds, when both have.
    const int warp = ptx::warp_index_again() % 4;
    if constexpr (has_p) {
      ptx::wait(shared.p_there.empty, step % 2 ^ 1);
      leave<C>(work, shared.p[warp], sum[0], params.dv, params.head_dim_v);
    } else {
#pragma unroll
      for (int j = 0; j < cols / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[0][j][e] *= params.scale;
      }
#pragma unroll
      for (int i = 0; i < C.ds_stages(); ++i) {
        const RingPlace free = ring_at<C.ds_stages()>(step + i);
        ptx::wait(shared.ds_there[free.stage].empty, free.parity ^ 1);
      }
      leave<C>(work, shared.ds[0].data + warp * sizeof(shared.p[0]), sum[0], params.dk, params.head_dim);
      ptx::meet(consumers_meet, group_threads);  // of the next ds every warp has a part everywhere
    }
    release(shared.work_there[place.stage].empty);
  }
}

template <Sm90BackwardConfig C>
__device__ void backward_wide(const Sm90BackwardParams& params) {
  static_assert(C.wide() && C.block_m == group_rows && C.block_n == group_rows);
  static_assert(C.dv_parts > 1 && C.ds_in_registers);
  run<C>(params, [](const Sm90BackwardParams& all, BackwardShared<C>& shared) {
    if (ptx::warp_index() < 4) {
      consume_side<C, Side::p>(all, shared);
    } else {
      consume_side<C, Side::ds>(all, shared);
    }
  });
}

}  // namespace tessera::sm90
