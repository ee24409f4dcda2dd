// Backward on Hopper: a block of keys, a loop over blocks of queries, five matrix products a step by wgmma.
//
//   p = exp2(s - lse), dv += p^T dout, dp = dout v^T, ds = p (dp - delta), dk += ds^T q, dq += ds k
//
// s and dp are computed transposed, 64 keys a warpgroup: then p^T and ds^T are operands of dv and dk as they
// stand in registers, and only ds passes through shared memory, for dq. The products of two steps overlap: s
// of the next is issued before dq and dk of this one, so that p is made while dk and dp run, and ds while dv
// does. The heads of a group are one loop: dk and dv need no other sum.
//
// backward_work.cuh has what is beside the warpgroups that compute: blocks of keys are dealt out there, tiles
// and rows are loaded, and dq is handed to the copy engine, which adds it in float32 in global memory.
//
// NOTES.md beside this file has the roofline and what was tried.
#pragma once

#include "sm90/backward_work.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/gradients.cuh"
#include "tile/panels.cuh"

namespace tessera::sm90 {

// Until nobody reads the memory that dq of a step goes to: that of the step before it, or of the one before
// that. The first time at once.
template <Sm90BackwardConfig C>
__device__ __forceinline__ void wait_dq_free(BackwardShared<C>& shared, unsigned step) {
  const RingPlace last = ring_at<C.dq_turns()>(step - C.dq_stages());
  ptx::wait(shared.dq_there[last.stage].empty, last.parity);
}

// The warp's dq of a step goes to shared memory, from where the copy engine adds it.
template <Sm90BackwardConfig C, int n>
__device__ __forceinline__ void hand_over(BackwardShared<C>& shared, unsigned step,
                                          const tile::FragmentC (&dq)[n]) {
  const int group = ptx::warp_index_again() / 4, warp = ptx::warp_index_again() % 4;
  const unsigned place =
      ptx::shared_address(shared.dq[step % C.dq_stages()][group][warp]) + threadIdx.x % 32 * 16;
  wait_dq_free(shared, step);
#pragma unroll
  for (int j = 0; j < n; ++j) ptx::store(place + j * tile::DqTiles::size * 4, dq[j]);
  __syncwarp();
  release(shared.dq_there[step % C.dq_turns()].full);
}

// dk or dv, 16 keys a warp, leaves through memory of the warp's own, or through its part of dq's, which is
// free for `step`: k and v of the next block of keys are on their way to theirs.
template <Sm90BackwardConfig C, int n>
__device__ __forceinline__ void leave(BackwardShared<C>& shared, unsigned step, const BackwardWork& work,
                                      const tile::FragmentC (&sum)[1][n], const RowsArg& to, int cols) {
  using Tile = tile::PanelTile<warp_rows, n * 8>;
  const int warp = ptx::warp_index_again(), first_key = work.first_key + warp * warp_rows;
  const auto store = [&](auto& memory) {
    static_assert(sizeof(Tile) <= sizeof(memory));
    store_rows<C.type>(sum, reinterpret_cast<Tile&>(memory), to, work.b, work.sequence.k_begin + first_key,
                       work.kv_head, work.sequence.allocated_k - first_key, cols);
  };
  if constexpr (C.own_leave()) {
    store(shared.leaving[warp]);
  } else {
    wait_dq_free(shared, step);
    store(shared.dq[step % C.dq_stages()][warp / 4][warp % 4]);
  }
  __syncwarp();
}

template <Sm90BackwardConfig C>
__device__ __forceinline__ void consume(const Sm90BackwardParams& all, BackwardShared<C>& shared) {
  constexpr int n = C.block_m / 8;
  constexpr bool plain = tile::units_of(C.terms) == tile::Units::raw && !has(C.terms, Terms::dropout);
  constexpr bool begun = has(C.terms, Terms::alibi) && tile::units_of(C.terms) == tile::Units::raw;
  constexpr auto across = ptx::Depth::across_rows;
  const AttentionParams& params = all.attention;
  const int lane = threadIdx.x % 32;
  const int warp_row = ptx::warp_index() * warp_rows;

  // Operands. Of dq the warpgroup has 64 rows and a part of the columns. What depends on the warpgroup is
  // worked out for every product: kept, it would take registers that are not there.
  const tile::PanelOperand k_whole(shared.k);
  const tile::PanelOperand ds_whole(shared.ds[0]);
  const auto group_again = [] { return ptx::warp_index_again() / 4; };
  const auto k_rows = [&] { return k_whole.part(group_again() * group_rows, 0); };
  const auto v_rows = [&] { return tile::PanelOperand(shared.v).part(group_again() * group_rows, 0); };
  const tile::PanelOperand q_operand(shared.q[0]);
  const tile::PanelOperand dout_operand(shared.dout[0]);
  const auto ds_rows = [&] { return ds_whole.part(group_again() / C.dq_parts() * group_rows, 0); };
  const auto ds_cols = [&] { return ds_whole.part(0, group_again() * group_rows); };
  const auto k_cols = [&] {
    return k_whole.part(0, min(group_again() % C.dq_parts() * C.dq_cols(), C.head_dim - C.dq_cols()));
  };

  tile::FragmentC s[1][n], dp[1][n], dq[1][C.dq_cols() / 8];
  tile::FragmentC dk[1][C.head_dim / 8], dv[1][C.head_dim_v / 8];
  constexpr int parts = C.dv_parts > 0 ? C.dv_parts : 1, part_depth = n / 2 / parts;
  tile::FragmentA ds[n / 2];  // if it is kept

  // Where all rings stand follows from the step, counted over all blocks of keys.
  unsigned step = 0;
  const auto q_now = [&] { return ring_at<C.q_stages>(step); };
  const auto q_before = [&] { return ring_at<C.q_stages>(step - 1); };
  const auto dout_now = [&] { return ring_at<C.dout_stages>(step); };
  const auto row_now = [&] { return ring_at<C.row_stages()>(step); };
  const auto facts = [&]() -> const StepFacts& { return shared.facts[row_now().stage]; };
  const auto mask_of_warp = [&] {
    const TileMask mask = facts().mask;
    return TileMask{mask.left - warp_row, mask.right - warp_row, mask.end - warp_row};
  };

  const auto terms_of = [&] { return facts().template terms<C>(params); };
  const auto wait_queries = [&] {
    ptx::wait(shared.rows_there[row_now().stage].full, row_now().parity);
    ptx::wait(shared.q_there[q_now().stage].full, q_now().parity);
  };
  // s = k q^T, in flight.
  const auto issue_scores = [&] {
    if constexpr (begun) {
      terms_of().template start<tile::Orientation::keys_by_queries>(s, facts().first_query,
                                                                    facts().first_key + warp_row);
    }
    const auto k = k_rows();
    ptx::settle(s[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < C.head_dim; d += 16)
      ptx::wgmma<C.type>(s[0], k.cols_from(d), q_operand.cols_from(d, q_now().stage), begun || d > 0);
    ptx::wgmma_commit();
  };
  // dp = v dout^T, in flight.
  const auto issue_dp = [&] {
    ptx::wait(shared.dout_there[dout_now().stage].full, dout_now().parity);
    const auto v = v_rows();
    ptx::settle(dp[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < C.head_dim_v; d += 16)
      ptx::wgmma<C.type>(dp[0], v.cols_from(d), dout_operand.cols_from(d, dout_now().stage), d > 0);
    ptx::wgmma_commit();
  };
  // dv += p^T dout for a part of the queries, in flight.
  const auto issue_dv = [&](int part) {
    tile::FragmentA p[part_depth];
#pragma unroll
    for (int j = 0; j < part_depth; ++j) tile::as_operand<C.type>(p[j], s[0], part * part_depth + j);
    ptx::settle(dv[0]);
    ptx::settle(p);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < part_depth; ++j) {
      ptx::wgmma<C.type>(dv[0], p[j], dout_operand.rows_from((part * part_depth + j) * 16, dout_now().stage),
                         true);
    }
    ptx::wgmma_commit();
  };
  // Of the step before this one: dk += ds^T q, in flight.
  const auto issue_dk = [&] {
    const auto ds_shared = ds_cols();
    ptx::settle(dk[0]);
    if constexpr (C.ds_in_registers) ptx::settle(ds);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      const auto q_rows = q_operand.rows_from(j * 16, q_before().stage);
      if constexpr (C.ds_in_registers) {
        ptx::wgmma<C.type>(dk[0], ds[j], q_rows, true);
      } else {
        ptx::wgmma<C.type, across, across>(dk[0], ds_shared.rows_from(j * 16, (step - 1) % C.ds_stages()),
                                           q_rows, true);
      }
    }
    ptx::wgmma_commit();
  };
  // Of the step before this one: dq = ds k, in flight.
  const auto issue_dq = [&] {
    const auto ds_shared = ds_rows();
    const auto k = k_cols();
    ptx::settle(dq[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int key = 0; key < C.block_n; key += 16)
      ptx::wgmma<C.type, ptx::Depth::along_rows, across>(
          dq[0], ds_shared.cols_from(key, (step - 1) % C.ds_stages()), k.rows_from(key), key > 0);
    ptx::wgmma_commit();
  };
  const auto hide = [&] {
    const TileMask mask = mask_of_warp();
    if (!mask.sees_all(C.block_m, warp_rows)) tile::hide_transposed(s[0], mask);
  };
  // A part of dp becomes ds: transposed in shared memory, and in registers if they are to keep it.
  const unsigned ds_place = ptx::opaque(
      ptx::shared_address(shared.ds[0].at(lane / 16 * 8 + lane % 8, warp_row / 8 + lane / 8 % 2)));
  const auto pass_ds = [&](int part) {
#pragma unroll
    for (int j = part * part_depth; j < (part + 1) * part_depth; ++j) {
      tile::FragmentA now;
      tile::FragmentA& operand = C.ds_in_registers ? ds[j] : now;
      if constexpr (plain) {
        tile::plain_ds(dp[0][2 * j], s[0][2 * j], shared.delta[row_now().stage], 2 * j);
        tile::plain_ds(dp[0][2 * j + 1], s[0][2 * j + 1], shared.delta[row_now().stage], 2 * j + 1);
      }
      tile::as_operand<C.type>(operand, dp[0], j);
      ptx::store_matrices_transposed(
          ds_place + step % C.ds_stages() * sizeof(shared.ds[0]) + j * 16 * shared.ds[0].row_bytes, operand);
    }
  };
  // From s, complete, to p, ds and dv; dp and dv are issued on the way. behind: what to do once all that was
  // issued before is complete. The registers of the last ds are free then, and p needs them.
  // lse of the first tiles, asked for before s is complete: shared memory takes a while.
  constexpr int early = plain ? 4 : 0;
  float2 early_lse[early + 1];
  const auto load_early = [&] {
#pragma unroll
    for (int j = 0; j < early; ++j) early_lse[j] = tile::of_tile(shared.lse[row_now().stage], j);
  };
  const auto weigh = [&](const auto& behind) {
    issue_dp();
    if constexpr (plain) {
      hide();
#pragma unroll
      for (int j = 0; j < n; ++j) {
        tile::plain_p(s[0][j], j < early ? early_lse[j] : tile::of_tile(shared.lse[row_now().stage], j),
                      params.scale_log2);
      }
      ptx::wgmma_wait<1>();
      behind();
    } else {
      ptx::wgmma_wait<0>();
      ptx::settle(dp[0]);
      behind();
      tile::gradients<C.type, C.terms>(s[0], dp[0], shared.lse[row_now().stage],
                                       shared.delta[row_now().stage], terms_of(), mask_of_warp(),
                                       facts().first_query, facts().first_key + warp_row);
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      issue_dv(part);
      if constexpr (C.dv_parts > 0) {
        if (part == 0) ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
        ptx::settle(dv[0]);
      }
      if (part == 0) {
        ptx::settle(dp[0]);
        // Nobody reads the last ds any more. Of two, who writes one has met all others behind their last
        // product with it.
        if constexpr (C.ds_stages() == 1) ptx::wait(shared.ds_there[0].empty, step % 2 ^ 1);
      }
      pass_ds(part);
      if constexpr (C.dv_parts > 0) {
        ptx::wgmma_wait<0>();
        ptx::settle(dv[0]);
      }
    }
    ptx::publish_shared();
    release(shared.dout_there[dout_now().stage].empty);
    release(shared.rows_there[row_now().stage].empty);
  };
  // dq, of the step before this one, leaves.
  const auto pass_dq = [&] { hand_over(shared, step - 1, dq[0]); };
  const auto release_ds = [&] {
    if constexpr (C.ds_stages() == 1) release(shared.ds_there[0].empty);
  };
  const auto meet = [] { ptx::meet(consumers_meet, C.consumers() * group_threads); };

#pragma unroll 1
  for (unsigned block = 0;; ++block) {
    const RingPlace place = ring_at<work_stages>(block);
    ptx::wait(shared.work_there[place.stage].full, place.parity);
    const BackwardWork& work = shared.work[place.stage];
    const int steps = __shfl_sync(~0u, work.steps, 0);
    if (steps < 0) break;
    tile::clear(dk);
    tile::clear(dv);
    // By an if of its own: with an else the compiler takes the steps' loop for one that lanes may leave
    // alone, and passes every descriptor through registers.
    if (steps == 0) leave(shared, step, work, dv, params.dv, params.head_dim_v);
    if (steps > 0) {
      const unsigned past = step + steps;
      ptx::wait(shared.k_there.full, work.loads % 2);
      wait_queries();
      issue_scores();
      load_early();
      ptx::wait(shared.v_there.full, work.loads % 2);
      ptx::wgmma_wait<0>();
      ptx::settle(s[0]);
      weigh([] {});
#pragma unroll 1
      for (++step; step < past; ++step) {
        // Of this step s, dp and dv; of the one before it dq and dk.
        wait_queries();
        issue_scores();
        meet();  // ds is complete
        issue_dq();
        issue_dk();
        load_early();
        ptx::wgmma_wait<1>();
        ptx::settle(s[0]);
        ptx::settle(dq[0]);
        pass_dq();
        weigh([&] {
          ptx::settle(dk[0]);
          release(shared.q_there[q_before().stage].empty);
          release_ds();
        });
      }
      release(shared.v_there.empty);
      meet();
      issue_dq();
      issue_dk();
      leave(shared, step - 1, work, dv, params.dv, params.head_dim_v);
      ptx::wgmma_wait<1>();
      ptx::settle(dq[0]);
      release(shared.k_there.empty);
      pass_dq();
      ptx::wgmma_wait<0>();
      ptx::settle(dk[0]);
      release(shared.q_there[q_before().stage].empty);
      release_ds();
    }
#pragma unroll
    for (int j = 0; j < C.head_dim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[0][j][e] *= params.scale;
    }
    leave(shared, step, work, dk, params.dk, params.head_dim);
    release(shared.work_there[place.stage].empty);
  }
}

template <Sm90BackwardConfig C>
__device__ void backward(const Sm90BackwardParams& params) {
  run<C>(params, [](const Sm90BackwardParams& all, BackwardShared<C>& shared) { consume<C>(all, shared); });
}

}  // namespace tessera::sm90
