// Forward on Hopper: two threads ask TMA for tiles, warpgroups of 64 queries multiply them by wgmma.
//
// Two things hide the softmax. Within a warpgroup S(n) = Q K(n)^T and O += P(n + 1) V(n + 1) are issued
// together, and while the second still runs S(n) becomes P(n). Among warpgroups, where they are two, they are
// issued in turn, so that the softmax of one falls into the products of another; more of them need no order.
//
// Of a few queries a tile has several of the heads that share a key head, a power of two of rows each.
//
// forward_load.cuh has what lies in shared memory, and those two threads. NOTES.md beside this file has the
// roofline and what was tried.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "sm90/forward_load.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/schedule.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/panels.cuh"
#include "tile/scores.cuh"
#include "tile/softmax.cuh"

namespace tessera::sm90 {

// Named barriers.
[[nodiscard]] __device__ constexpr int turn_of(int group) { return 1 + group; }
[[nodiscard]] __device__ constexpr int meeting_of(int group) { return 5 + group; }

// A warp's warpgroup and first row, worked out anew at every call.
[[nodiscard]] __device__ __forceinline__ int group_again() { return ptx::warp_index_again() / 4; }
[[nodiscard]] __device__ __forceinline__ int row_again() { return ptx::warp_index_again() * warp_rows; }

template <class Tile>
__device__ __forceinline__ void clear_rows(Tile& tile, int first_row, int group) {
  clear_rows<group_threads>(tile, first_row);
  ptx::meet(meeting_of(group), group_threads);
}

// What acc_o's rows become o by, and lse.
template <Sm90ForwardConfig C>
__device__ __forceinline__ void conclude(const Sm90ForwardParams& all, int h, tile::Softmax<1>& softmax,
                                         float (&by)[2], float (&lse)[2]) {
  const AttentionParams& params = all.attention;
  const bool has_sink = params.sinks != nullptr;
  const float sink = has_sink
                         ? tile::load_number<C.type>(params.sinks, h * params.sinks_stride, params.sinks_wide)
                         : -ptx::infinity;
  constexpr tile::Units units = tile::units_of(C.terms);
  const float unit = units == tile::Units::raw       ? params.scale
                     : units == tile::Units::natural ? 1.0f
                                                     : ptx::ln_2;
  softmax.conclude(0, by, lse, unit, sink, has_sink, params.dropout.scale, [](int, float) {});
}

// o, which acc_o has become, by way of the warp's rows of the tile, and lse. All columns are left there for
// TMA, or sent from there, some at a time.
template <Sm90ForwardConfig C, int nv>
__device__ __forceinline__ void store(const Sm90ForwardParams& all, const ForwardWork& work, int group,
                                      const OutRows& rows, OutTile<C>& o, ptx::Barrier& left,
                                      tile::FragmentC (&acc_o)[1][nv], float (&lse)[2]) {
  const AttentionParams& params = all.attention;
  const int warp_row = ptx::warp_index() % 4 * warp_rows;
  const int row = rows.first + tile::element(0, 0, 0).row;
  if (work.queries < C.block_m) {  // padding
    ptx::settle(acc_o[0]);         // so that it is a branch
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 < work.queries) continue;
      lse[half] = -ptx::infinity;
#pragma unroll
      for (int j = 0; j < nv; ++j) acc_o[0][j][half * 2] = acc_o[0][j][half * 2 + 1] = 0.0f;
    }
  }

  if constexpr (!C.o_apart()) ptx::meet(meeting_of(group), group_threads);  // nobody reads q any more
  const int lane = ptx::thread_index() & 31;
#pragma unroll
  for (int part = 0; part < C.head_dim_v; part += C.o_cols()) {
    auto& columns = reinterpret_cast<tile::FragmentC(&)[1][C.o_cols() / 8]>(acc_o[0][part / 8]);
    if constexpr (C.o_apart()) {  // what was there has been read
      if (lane == 0) cute::tma_store_wait<0>();
      __syncwarp();
    }
    if (rows.by_tma) {
      const unsigned to = ptx::shared_address(o.at(warp_row + (lane & 15), lane >> 4));
#pragma unroll
      for (int j = 0; j < C.o_cols() / 16; ++j) {
        tile::FragmentA pairs;
        tile::as_operand<C.type>(pairs, columns[0], j);
        ptx::store_matrices(OutTile<C>::further(to, j * 2), pairs);
      }
    } else if (rows.there > 0) {
      RowsArg to = params.o;
      to.data = static_cast<char*>(to.data) + part * (to.wide ? 4 : 2);
      const int before = rows.first - warp_row;  // of the head's rows, those of warpgroups before this one
      tile::store_tile<C.type>(columns, o, warp_row, to, work.b,
                               work.sequence.q_begin + work.first_query + before, rows.h, rows.there - before,
                               0, params.head_dim_v - part);
    }
    ptx::publish_shared();
    __syncwarp();
    if (lane == 0) {
      if constexpr (C.o_apart()) {
        if (rows.by_tma) send<C>(all, work, rows, o, warp_row, part);
        cute::tma_store_arrive();
      } else {
        ptx::arrive(left);
      }
    }
  }
  // Behind o: whoever publishes shared memory waits for what was stored before.
  if (params.lse.data == nullptr || threadIdx.x % 4 != 0) return;
  float* to = static_cast<float*>(params.lse.data) + work.b * params.lse.batch + rows.h * params.lse.head +
              (0LL + work.sequence.q_begin + work.first_query + row) * params.lse.seq;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 < rows.there) to[half * 8 * params.lse.seq] = lse[half];
  }
}

// The consumers: a warpgroup has 64 of the tile's rows.
template <Sm90ForwardConfig C>
__device__ __forceinline__ void consume(const Sm90ForwardParams& all, ForwardShared<C>& shared) {
  constexpr int n = C.block_n / 8, nv = C.head_dim_v / 8;
  constexpr auto by_keys = tile::Orientation::queries_by_keys;
  constexpr tile::Units units = tile::units_of(C.terms);
  const AttentionParams& params = all.attention;
  const int group = ptx::warp_index() / 4, warp_row = row_of<C>(all, ptx::warp_index() * warp_rows);
  const KeptBarriers k_there(shared.k_there), v_there(shared.v_there);
  // A longer head dim has more descriptors than there are registers for: their upper halves are not kept.
  // Else the compiler may load them again in the loop.
  const unsigned zero = C.head_dim > 128                             ? 0
                        : C.terms == Terms::plain && C.head_dim > 64 ? ptx::kept(all.zero)
                                                                     : all.zero;
  const tile::KeptOperand k_operand(shared.k[0], zero);
  const tile::KeptOperand v_operand(shared.v[0], zero);
  const float scale_log2 = units == tile::Units::raw       ? params.scale_log2
                           : units == tile::Units::natural ? ptx::log2_e
                                                           : 1.0f;
  // Registers beside those of s, p and o. Where they are scarce, what can be found again is not kept.
  constexpr bool roomy = C.block_n / 2 + C.block_n / 4 + C.head_dim_v / 2 <= 160;
  constexpr int widest = C.head_dim > C.head_dim_v ? C.head_dim : C.head_dim_v;
  constexpr bool scarce = (widest > 96 && is_several(C.terms)) || (C.grouped && !roomy) ||
                          (widest > 128 && has(C.terms, Terms::softcap | Terms::dropout | Terms::wide_bias));
  CapInExponent cap = params.cap;
  if constexpr (tile::ScoreTerms<C.type, C.terms>::caps_in_exponent) {
    cap.a = ptx::kept(cap.a);
    cap.b = ptx::kept(cap.b);
    cap.times = ptx::kept(cap.times);
  }
  const auto own_row = [&] { return scarce ? row_of<C>(all, row_again()) : warp_row; };  // the warp's first
  // The warp is done with q's buffer.
  const auto release = [](ptx::Barrier& empty) {
    if (threadIdx.x % 32 == 0) ptx::arrive(empty);
  };
  // The warpgroups' turns to issue products.
  const auto take_turn = [&] {
    if constexpr (C.turns) ptx::meet(turn_of(group), 2 * group_threads);
  };
  const auto pass_turn = [&] {
    if constexpr (C.turns)
      ptx::arrive(turn_of(group + 1 == C.consumers() ? 0 : group + 1), 2 * group_threads);
  };
  if (group + 1 == C.consumers()) pass_turn();

  Cursor<C.q_stages> q;
  Cursor<C.stages> k, v;

  while (true) {
    ptx::wait(shared.q_there[q.stage][scarce ? group_again() : group].full, q.parity);
    const ForwardWork work = receive(shared.work[work_stage<C>(q)][group]);
    if (!work.there()) break;
    const auto& [b, h, sequence, first_query, queries, tile_first_block, tile_past_block, own] = work;
    const auto& [first_block, past_block, first_whole, past_whole] = own;
    const NarrowMask mask = all.mask(sequence);
    // Blocks that only others of the tile's queries see.
    const auto skip = [&](int blocks) {
      if constexpr (!C.turns) {
#pragma unroll 1
        for (; blocks > 0; --blocks) {
          k_there.wait(k);
          v_there.wait(v);
          __syncwarp();  // no lane stays behind, and finds another phase
          k_there.release(k);
          v_there.release(v);
          k.next();
          v.next();
        }
      }
    };
    using ScoreTerms = tile::ScoreTerms<C.type, C.terms, scarce>;
    const ScoreTerms terms(params, sequence, b, h);  // of a head: not where there are several
    QueryTile<C>& place = shared.queries[q.stage][group];
    // With terms q's upper half is not kept: products that are issued all at once are in the way of the rest.
    const tile::KeptOperand q_operand(place.q, C.terms == Terms::plain ? zero : 0);

    tile::FragmentC s[1][n], acc_o[1][nv];
    tile::FragmentA p[n / 2];
    tile::Softmax<1> softmax;
    // Without a look at the maxima, if the scores are what they usually are. ALiBi's rise from block to
    // block.
    constexpr bool capping = ScoreTerms::caps_in_exponent,
                   at_once = capping || (units == tile::Units::raw && !has(C.terms, Terms::alibi));
    // Then p is made before a block's maxima are known, below a limit. Where scores rise from block to block
    // it is given up for the rest of the tile.
    bool ready = false;
    int chances = 4;
    float limit[1][2] = {{1 << static_cast<int>(softmax.slack), 1 << static_cast<int>(softmax.slack)}};

    // s = q k^T, in flight.
    const auto issue_scores = [&](int block) {
      constexpr bool begun = has(C.terms, Terms::alibi) && units == tile::Units::raw;
      if constexpr (begun) terms.template start<by_keys>(s, first_query + warp_row, block * C.block_n);
      ptx::settle(s[0]);
      ptx::wgmma_fence();
#pragma unroll
      for (int d = 0; d < C.head_dim; d += 16)
        ptx::wgmma<C.type>(s[0], q_operand.cols_from(d), k_operand.cols_from(d, k.stage), begun || d > 0);
      ptx::wgmma_commit();
    };
    // acc_o += p v, in flight.
    const auto issue_values = [&] {
      ptx::settle(acc_o[0]);
      ptx::settle(p);
      ptx::wgmma_fence();
#pragma unroll
      for (int j = 0; j < n / 2; ++j)
        ptx::wgmma<C.type>(acc_o[0], p[j], v_operand.rows_from(j * 16, v.stage), true);
      ptx::wgmma_commit();
    };
    // acc_o has it, and v's buffer is free. k's is free when nobody will compute the scores again.
    const auto end_values = [&] {
      ptx::wgmma_wait<0>();
      ptx::settle(acc_o[0]);
      v_there.release(v);
      v.next();
    };
    const auto end_keys = [&] {
      k_there.release(k);
      k.next();
    };
    const auto load_bias = [&](int block) {
      if constexpr (has(C.terms, Terms::bias)) {
        const int own = scarce ? group_again() : group;
        terms.template load_bias<group_threads, true>(shared.bias[own], first_query + own * group_rows,
                                                      block * C.block_n);
        cute::cp_async_fence();
      }
    };
    // scores becomes scale * scores + bias; the next block's bias is asked for.
    const auto add_bias = [&](auto& scores, float scale, int block) {
      if constexpr (has(C.terms, Terms::bias)) {
        cute::cp_async_wait<0>();
        const int own = scarce ? group_again() : group;
        ptx::meet(meeting_of(own), group_threads);
        terms.add_bias(scores, scale, shared.bias[own], own_row() - own * group_rows);
        if constexpr (scarce) ptx::settle(scores[0]);  // else this waits until the next bias is asked for
        ptx::meet(meeting_of(own), group_threads);
        if (block > first_block) load_bias(block - 1);
      }
    };
    // The scores once more, by the warp alone.
    const auto compute_again = [&](int block) {
      terms.template start<by_keys>(s, first_query + warp_row, block * C.block_n);
      const int lane = ptx::thread_index() % 32;
#pragma unroll 1
      for (int d = 0; d < C.head_dim; d += 16) {
        auto& keys = shared.k[k.stage];
        const unsigned from =
            ptx::opaque(ptx::shared_address(keys.at(lane % 8 + lane / 16 * 8, d / 8 + lane / 8 % 2)));
        tile::FragmentA a, pair;
        ptx::load_matrices(a, ptx::shared_address(place.q.at(
                                  ptx::thread_index() / 32 % 4 * warp_rows + lane % 16, d / 8 + lane / 16)));
#pragma unroll
        for (int j = 0; j < n / 2; ++j) {
          ptx::load_matrices(pair, from + j * 16 * keys.row_bytes);
          tile::multiply_add<C.type>(s[0][2 * j], a, pair[0], pair[1]);
          tile::multiply_add<C.type>(s[0][2 * j + 1], a, pair[2], pair[3]);
        }
      }
    };
    const auto sees_part = [&](int block) { return block < first_whole || block >= past_whole; };
    const auto hide_keys = [&](int block, bool partly) {
      if (partly) tile::hide(s, mask.tile(first_query + own_row(), block * C.block_n));
    };
    // s becomes p, not yet rounded, by its maxima; shrink hears what that does to acc_o.
    const auto weigh = [&](int block, bool partly, const auto& shrink) {
      const int first_key = block * C.block_n;
      const auto hide = [&] { hide_keys(block, partly); };
      const auto exponentiate = [&](const auto&... exponent_of) {
#pragma unroll
        for (int j = 0; j < n; ++j) softmax.exponentiate(s[0][j], 0, exponent_of...);
      };
      bool capped = false;
      if constexpr (capping) {
        float maximum[1][2];
        hide();
        softmax.maxima(s, maximum);
        capped = tile::holds(cap, maximum, softmax.reference);
        if (capped) {
#pragma unroll
          for (int half = 0; half < 2; ++half) maximum[0][half] = cap(maximum[0][half], 0.0f);
          // Not lazily where it is below what exponentials without a look at the maxima want.
          softmax.follow(maximum, 1.0f, shrink, cap.least);
          exponentiate(cap);
        }
      }
      if (!capped) {
        terms.template apply<by_keys>(
            s, first_query + own_row(), first_key,
            [&](auto& scores, float scale) { add_bias(scores, scale, block); }, [](int, int, float) {});
        hide();
        softmax.prepare(s, scale_log2, shrink);
        exponentiate();
      }
      if constexpr (at_once)
        ready = chances > 0 && (!capping || cap.possible) &&
                softmax.ready(scale_log2, capping ? cap.least : -ptx::infinity);
      if constexpr (capping) softmax.limits(cap.highest, limit);
    };
    const auto choose_kept = [&](int block) {
      if constexpr (has(C.terms, Terms::dropout)) {
        __syncwarp();
        constexpr int parts = decltype(shared.kept)::parts;
#pragma unroll(scarce ? 2 : parts)
        for (int i = 0; i < parts; ++i)
          terms.choose(shared.kept, i, first_query + own_row(), block * C.block_n);
        __syncwarp();
      }
    };
    const auto round_p = [&] {
      if constexpr (has(C.terms, Terms::dropout)) terms.drop(s, shared.kept);
#pragma unroll
      for (int j = 0; j < n / 2; ++j) tile::as_operand<C.type>(p[j], s[0], j);
    };

    // What only the end needs is read again; the last product is made meanwhile.
    ForwardWork same;
    float by[2], lse[2];
    const auto tile_row = [&] { return group * group_rows + ptx::warp_index() % 4 * warp_rows; };
    const auto end_softmax = [&] {
      same = receive(shared.work[work_stage<C>(q)][scarce ? group_again() : group]);
      conclude<C>(all, OutRows::of<C>(all, same, tile_row()).h, softmax, by, lse);
    };

    if ((params.packed() || params.seqused_q != nullptr) && queries < (group + 1) * group_rows)
      clear_rows(place.q, max(0, queries - group * group_rows), group);
    skip(tile_past_block - past_block);
    if (first_block < past_block) {
      const int keys_there = sequence.seqlen_k - (past_block - 1) * C.block_n;
      const bool strangers = (params.packed() || params.seqused_k != nullptr) && keys_there < C.block_n;
      k_there.wait(k);
      // How softcap is computed depends on the largest score, seen or not.
      if constexpr (has(C.terms, Terms::softcap)) {
        if (strangers) clear_rows(shared.k[k.stage], keys_there, group);
      }
      issue_scores(past_block - 1);
      load_bias(past_block - 1);
      choose_kept(past_block - 1);
      tile::clear(acc_o);
      ptx::wgmma_wait<0>();
      ptx::settle(s[0]);
      end_keys();
      weigh(past_block - 1, sees_part(past_block - 1), [](int, int, float) {});
      round_p();

      // Keys behind the sequence's last have weight 0: their values have to be numbers.
      if (strangers) {
        v_there.wait(v);
        clear_rows(shared.v[v.stage], keys_there, group);
      }
#pragma unroll 1
      for (int block = past_block - 2; block >= first_block; --block) {
        const bool partly = sees_part(block);
        k_there.wait(k);
        take_turn();
        issue_scores(block);
        v_there.wait(v);
        issue_values();
        pass_turn();
        choose_kept(block);
        ptx::wgmma_wait<1>();
        ptx::settle(s[0]);
        if constexpr (at_once) {
          float sum[1][2];
          int right = 0;  // of a bool the compiler would make a byte, at two instructions more
          if (ready) {
            hide_keys(block, partly);
            if constexpr (capping) {
              softmax.exponentiate_at_once(s, sum, cap);
            } else {
              softmax.exponentiate_at_once(s, sum);
            }
            right = softmax.accept(sum, limit) ? 1 : 0;
          }
          end_values();
          if (right == 0 && !(ready && softmax.accept_after_all(s, sum, limit))) {
            if (ready) {
              --chances;
              compute_again(block);
            }
            weigh(block, partly, [&](int, int half, float x) { softmax.shrink_rows(acc_o, 0, half, x); });
          }
          end_keys();
        } else {
          // What rows of acc_o are to be multiplied by, if one has moved: seldom, so nothing is set
          // otherwise.
          float shrunk[2];
          int moved = 0;
          weigh(block, partly, [&](int, int half, float x) {
            shrunk[half] = x;
            moved = 1;
          });
          end_keys();
          end_values();
          if (moved != 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) softmax.shrink_rows(acc_o, 0, half, shrunk[half]);
          }
        }
        round_p();
      }
      if constexpr (C.o_apart()) release(shared.q_there[0][group].empty);
      v_there.wait(v);
      issue_values();
      end_softmax();
      end_values();
    } else {
      tile::clear(acc_o);
      ptx::settle(acc_o[0]);  // here: or it would be done for all, and there once more
      if constexpr (C.o_apart()) release(shared.q_there[0][group].empty);
      end_softmax();
    }
    skip(first_block - same.first_block);
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax.shrink_rows(acc_o, 0, half, by[half]);
    const OutRows rows = OutRows::of<C>(all, same, tile_row());
    ptx::Barrier& left = shared.q_there[q.stage][group].empty;
    if constexpr (C.o_apart()) {
      store<C>(all, same, group, rows, shared.o[group], left, acc_o, lse);
    } else {
      store<C>(all, same, group, rows, place.o, left, acc_o, lse);
    }
    q.next();
  }
  if constexpr (C.o_apart()) {
    if (ptx::thread_index() % 32 == 0) cute::tma_store_wait<0>();
  }
  if constexpr (C.turns) {
    if (group == 0) take_turn();  // the last one passed
  }
}

template <Sm90ForwardConfig C>
__device__ void forward(const Sm90ForwardParams& params) {
  static_assert(C.block_m % group_rows == 0 && C.block_n % 16 == 0 &&
                (!C.grouped || C.terms == Terms::plain));
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<C>*>(shared_bytes);
  if (threadIdx.x == 0) {
    const auto init = [](auto& all, int readers) {
      for (auto& barriers : all) {
        barriers.full.init(1);
        barriers.empty.init(readers);
      }
    };
    init(shared.k_there, C.consumers() * 4);  // every warp
    init(shared.v_there, C.consumers() * 4);
    for (auto& groups : shared.q_there) init(groups, 4);
    cutlass::arch::fence_barrier_init();
  }
  if (params.order.sorted) {
    shared.sequences.sort(params.attention, C.block_m,
                          reinterpret_cast<SortedSequences::Lengths&>(shared.k[0].data));
    ptx::publish_shared();  // TMA writes there next
  }
  __syncthreads();
  const int warp = ptx::warp_index();
  if (warp >= C.consumers() * 4) {
    cutlass::arch::warpgroup_reg_dealloc<C.producer_registers()>();
    if (threadIdx.x % 32 != 0) return;
    if (warp == C.consumers() * 4) {
      load_keys<C>(params, shared);
    } else if (warp == C.consumers() * 4 + 1) {
      serve_queries<C>(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C.consumer_registers()>();
    consume<C>(params, shared);
  }
}

}  // namespace tessera::sm90
