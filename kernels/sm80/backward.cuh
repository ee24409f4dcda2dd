// FlashAttention-2 backward on mma.sync: a block of keys, a loop over blocks of queries, five matrix products
// a step.
//
//   p = exp2(s - lse), dv += p^T dout, dp = dout v^T, ds = p (dp - delta), dk += ds^T q, dq += ds k
//
// s and dp are computed transposed, 16 keys a warp: then p^T and ds^T are operands of dv and dk as they
// stand, and only ds passes through shared memory, for dq. Where dk and dv of 16 keys are too wide for one
// warp, `split` warps share the keys of s, each with its part of the queries; p passes, too, and dk and dv
// are shared out anew. The heads of a group are one loop: dk and dv need no other sum. dq is added up in
// float32 in global memory.
//
// NOTES.md beside this file has the roofline and what was tried.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "tile/copy.cuh"
#include "tile/dq_tiles.cuh"
#include "tile/fragments.cuh"
#include "tile/gradients.cuh"

namespace tessera::sm80 {

template <BackwardConfig C>
struct BackwardShared {
  tile::SharedTile<C.block_n, C.head_dim> k;
  tile::SharedTile<C.block_n, C.head_dim_v> v;
  tile::SharedTile<C.block_m, C.head_dim> q[C.stages];
  tile::SharedTile<C.block_m, C.head_dim_v> dout[C.stages];
  tile::SharedTile<C.block_n, C.block_m> ds[C.split == 1 ? 1 : 2];  // transposed; behind it, if split, p
  float lse[C.block_m], delta[C.block_m];
  int ticket;
};

// Which keys, of which head.
struct BackwardWork {
  int b, kv_head;
  SequenceArg sequence;
  int n_block;
};
template <BackwardConfig C>
__device__ __forceinline__ BackwardWork find_work(const AttentionParams& params,
                                                  const BackwardShared<C>& shared) {
  const unsigned index =
      params.turn != nullptr ? *static_cast<const volatile int*>(&shared.ticket) : ptx::block_index();
  const auto tiles =
      static_cast<unsigned>(count_tiles(params.batch, params.rows_k, params.packed(), C.block_n));
  const auto [b, n_block] =
      find_tile(params.cu_seqlens_k, params.batch, params.rows_k, C.block_n, index % tiles);
  return {b, static_cast<int>(index / tiles), params.sequence(b), n_block};
}

// dk and dv leave through the memory of k and v.
template <BackwardConfig C, int m, int nk, int nv>
__device__ __forceinline__ void finish(const AttentionParams& params, BackwardShared<C>& shared,
                                       tile::FragmentC (&dk)[m][nk], tile::FragmentC (&dv)[m][nv]) {
  cute::cp_async_wait<0>();
  __syncthreads();
  const auto [b, kv_head, sequence, n_block] = find_work(params, shared);
  const int warp = threadIdx.x / 32, key_row = warp / C.dkv_split() * (m * 16), part = warp % C.dkv_split();
  const int first_key = n_block * C.block_n, keys_there = min(sequence.allocated_k - first_key, C.block_n);
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < nk; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[i][j][e] *= params.scale;
    }
  }
  tile::store_tile<C.type>(dk, shared.k, key_row, params.dk, b, sequence.k_begin + first_key, kv_head,
                           keys_there, part * (C.head_dim / C.dkv_split()), params.head_dim);
  tile::store_tile<C.type>(dv, shared.v, key_row, params.dv, b, sequence.k_begin + first_key, kv_head,
                           keys_there, part * (C.head_dim_v / C.dkv_split()), params.head_dim_v);
}

template <BackwardConfig C>
__device__ void backward(const AttentionParams& params) {
  constexpr int warps = C.warps(), threads = warps * 32;
  constexpr int queries_of_warp = C.block_m / C.split, n = queries_of_warp / 8;
  // dk and dv: 16 keys a warp as s has them, or, where p and ds pass through shared memory, fewer columns of
  // more keys.
  constexpr int dkv_rows = C.block_n / (warps / C.dkv_split()), mk = dkv_rows / 16;
  constexpr int dk_cols = C.head_dim / C.dkv_split(), dv_cols = C.head_dim_v / C.dkv_split();
  constexpr int dq_rows = C.block_m / C.dq_warps_m, dq_cols = C.head_dim / (warps / C.dq_warps_m);
  // Half of dq's columns at a time: the first half is added while the second is computed.
  constexpr int dq_part_cols = C.head_dim >= 128 && dq_cols % 32 == 0 ? dq_cols / 2 : dq_cols;
  static_assert(C.block_n % 16 == 0 && queries_of_warp % 16 == 0 && dq_rows % 16 == 0 && dq_cols % 16 == 0);
  static_assert(C.stages <= 2 && dk_cols % 16 == 0 && dv_cols % 16 == 0 && dkv_rows % 16 == 0 &&
                C.block_m <= threads);
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<C>*>(shared_bytes);
  const int warp = ptx::warp_index();
  const int key_row = warp / C.split * 16, part = warp % C.split;  // of the block's keys; of what is shared

  // Where sums have an order, so have the blocks of threads: each waits only for earlier ones.
  if (params.turn != nullptr) {
    if (threadIdx.x == 0) shared.ticket = atomicAdd(params.ticket, 1);
    __syncthreads();
  }
  // Found again behind the loop: what only the end needs would take the loop's registers.
  const auto [b, kv_head, sequence, n_block] = find_work(params, shared);
  if (n_block < 0 || n_block >= tiles_of(sequence.allocated_k, C.block_n)) return;
  const int first_key = n_block * C.block_n;
  const Range keys{first_key, min(first_key + C.block_n, sequence.seqlen_k)};
  const Range rows = params.mask(sequence).rows_of_any(keys);
  const int first_m = static_cast<int>(rows.begin / C.block_m);
  const int m_blocks = rows.empty() ? 0 : static_cast<int>((rows.end + C.block_m - 1) / C.block_m) - first_m;
  // Steps: the query blocks of one head, then of the group's next one.
  struct Step {
    int h, m_block;
  };
  const int first_head = kv_head * params.group_size,
            past_heads = m_blocks == 0 ? first_head : first_head + params.group_size;
  const auto next_of = [&](Step at) {
    return at.m_block + 1 < first_m + m_blocks ? Step{at.h, at.m_block + 1} : Step{at.h + 1, first_m};
  };

  constexpr bool fresh = C.head_dim > 64 && C.terms == Terms::plain;
  const tile::Pieces<threads, C.head_dim, fresh> pieces;
  const tile::Pieces<threads, C.head_dim_v, fresh> own_pieces_v;
  const auto& pieces_v = tile::same_if_same(pieces, own_pieces_v);
  tile::load_tile<C.type, C.aligned>(shared.k, pieces, tile::rows_of(params.k, b, sequence.k_begin, kv_head),
                                     first_key, sequence.seqlen_k - first_key, params.head_dim);
  tile::load_tile<C.type, C.aligned>(shared.v, pieces_v,
                                     tile::rows_of(params.v, b, sequence.k_begin, kv_head), first_key,
                                     sequence.seqlen_k - first_key, params.head_dim_v);

  float next_lse = 0.0f, next_delta = 0.0f;  // one query a thread
  const auto load_step = [&](Step at, int stage) {
    const int h = at.h, first_query = at.m_block * C.block_m, valid = sequence.seqlen_q - first_query;
    tile::load_tile<C.type, C.aligned>(shared.q[stage], pieces,
                                       tile::rows_of(params.q, b, sequence.q_begin, h), first_query, valid,
                                       params.head_dim);
    tile::load_tile<C.type, C.aligned>(shared.dout[stage], pieces_v,
                                       tile::rows_of(params.dout, b, sequence.q_begin, h), first_query, valid,
                                       params.head_dim_v);
    cute::cp_async_fence();
    if (threadIdx.x < C.block_m) {
      const int query = first_query + threadIdx.x;
      const bool there = query < sequence.seqlen_q;
      next_lse = there ? *tile::lse_of_row(params, b, h, sequence.q_begin + query) : ptx::infinity;
      next_delta = there ? params.delta[tile::delta_index(params, b, h, sequence.q_begin + query)] : 0.0f;
    }
  };
  const auto keep_row_numbers = [&] {
    if (threadIdx.x < C.block_m) {
      shared.lse[threadIdx.x] = tile::lse_for_p<C.terms>(next_lse);
      shared.delta[threadIdx.x] = next_delta;
    }
  };

  const tile::Lanes<tile::Order::rows_first, C.head_dim> lanes;
  const tile::Lanes<tile::Order::cols_first, C.head_dim> lanes_b;
  const tile::Lanes<tile::Order::rows_first, C.head_dim_v> own_lanes_v;
  const tile::Lanes<tile::Order::cols_first, C.head_dim_v> own_lanes_b_v;
  const auto& lanes_v = tile::same_if_same(lanes, own_lanes_v);
  const auto& lanes_b_v = tile::same_if_same(lanes_b, own_lanes_b_v);
  const tile::Matrices read_k(shared.k, lanes, key_row);
  const tile::Matrices read_v(shared.v, lanes_v, key_row);
  const int first_part = part * queries_of_warp;

  tile::FragmentC dk[mk][dk_cols / 8], dv[mk][dv_cols / 8];
  tile::clear(dk);
  tile::clear(dv);

  Step at{first_head, first_m};
  tile::HeldA<C.kv_in_registers ? C.head_dim : 16> held_k;
  tile::HeldA<C.kv_in_registers ? C.head_dim_v : 16> held_v;
  if (at.h < past_heads) {
    load_step(at, 0);
    keep_row_numbers();
    if constexpr (C.kv_in_registers) {
      cute::cp_async_wait<0>();
      __syncthreads();
      held_k.read(read_k);
      held_v.read(read_v);
    }
  }
  int stage = 0;
  while (at.h < past_heads) {
    const auto [h, m_block] = at;
    const int first_query = m_block * C.block_m;
    const Step next = next_of(at);
    const bool more = next.h < past_heads;
    auto& q = shared.q[stage];
    auto& dout = shared.dout[stage];
    cute::cp_async_wait<0>();  // q and dout have arrived, and every warp is done with the step before
    __syncthreads();
    if constexpr (C.stages > 1) {
      if (more) load_step(next, stage ^ 1);
    }

    // s and dp; then p among the products of dp, and ds among those of dv: the tensor cores run on meanwhile.
    tile::FragmentC s[n], dp[n];
    const tile::Matrices read_q_rows(q, lanes_b, first_part);
    const tile::Matrices read_dout_rows(dout, lanes_b_v, first_part);
    const tile::Matrices read_q(q, lanes);
    const tile::Matrices read_dout(dout, lanes_v);
    const float *lse = shared.lse + first_part, *delta = shared.delta + first_part;
    constexpr auto nothing = [](int) {};
    const auto& operand_k = tile::choose<C.kv_in_registers>(held_k, read_k);
    const auto& operand_v = tile::choose<C.kv_in_registers>(held_v, read_v);
    constexpr bool plain = tile::units_of(C.terms) == tile::Units::raw && !has(C.terms, Terms::dropout);
    const int query0 = first_query + first_part, key0 = first_key + key_row;
    const tile::ScoreTerms<C.type, C.terms> terms(params, sequence, b, h);
    terms.template start<tile::Orientation::keys_by_queries>(reinterpret_cast<tile::FragmentC(&)[1][n]>(s),
                                                             query0, key0);
    tile::clear(reinterpret_cast<tile::FragmentC(&)[1][n]>(dp));
    tile::multiply_transposed<C.type, C.head_dim>(s, operand_k, read_q_rows, nothing);
    const TileMask mask = params.mask(sequence).tile(query0, key0);
    if constexpr (plain) {
      if (!mask.sees_all(queries_of_warp, 16)) tile::hide_transposed(s, mask);
      constexpr int depth_steps = C.head_dim_v / 16;
      tile::multiply_transposed<C.type, C.head_dim_v>(dp, operand_v, read_dout_rows, [&](int at) {
#pragma unroll
        for (int j = at * n / depth_steps; j < (at + 1) * n / depth_steps; ++j)
          tile::plain_p(s[j], lse, j, params.scale_log2);
      });
    } else {
      tile::multiply_transposed<C.type, C.head_dim_v>(dp, operand_v, read_dout_rows, nothing);
      tile::gradients<C.type, C.terms>(s, dp, lse, delta, terms, mask, query0, key0);
    }
    // Two tiles of ds, and of p where other warps need it, to shared memory.
    static_assert((n & (n - 1)) == 0);
    const tile::OperandPlace place(shared.ds[0], key_row, first_part);
    const auto pass_on = [&](int i, tile::FragmentA& ds) {
      if constexpr (plain) {
        tile::plain_ds(dp[2 * i], s[2 * i], delta, 2 * i);
        tile::plain_ds(dp[2 * i + 1], s[2 * i + 1], delta, 2 * i + 1);
      }
      tile::as_operand<C.type>(ds, dp, i);
      place.store(ds, i);
      if constexpr (C.split > 1) {
        tile::FragmentA p;
        tile::as_operand<C.type>(p, s, i);
        place.store(p, i, sizeof(shared.ds[0]));
      }
    };
    tile::FragmentA ds[n / 2][1];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      if constexpr (C.split == 1) {
        tile::FragmentA p[1];
        tile::as_operand<C.type>(p[0], s, i);
        tile::multiply_step<C.type>(dv, p, read_dout, i * 16);
      }
      pass_on(i, ds[i][0]);
    }
    if constexpr (C.split == 1) {
#pragma unroll
      for (int i = 0; i < n / 2; ++i) tile::multiply_step<C.type>(dk, ds[i], read_q, i * 16);
    }
    __syncthreads();  // ds is complete
    if constexpr (C.split > 1) {
      const int dkv_row = warp / C.dkv_split() * dkv_rows, dkv_part = warp % C.dkv_split();
      const tile::Lanes<tile::Order::rows_first, C.block_m> lanes_m;
      const tile::Matrices read_ds(shared.ds[0], lanes_m, dkv_row), read_p(shared.ds[1], lanes_m, dkv_row);
      const auto read_q_part = read_q.template from_col<dk_cols>(dkv_part * dk_cols);
      const auto read_dout_part = read_dout.template from_col<dv_cols>(dkv_part * dv_cols);
#pragma unroll
      for (int i = 0; i < C.block_m / 16; ++i) {
        tile::FragmentA p[mk], ds[mk];
#pragma unroll
        for (int r = 0; r < mk; ++r) read_p.read_a(p[r], r * 16, i * 16);
        tile::multiply_step<C.type>(dv, p, read_dout_part, i * 16);
#pragma unroll
        for (int r = 0; r < mk; ++r) read_ds.read_a(ds[r], r * 16, i * 16);
        tile::multiply_step<C.type>(dk, ds, read_q_part, i * 16);
      }
      if constexpr (C.stages == 1) __syncthreads();  // every warp is done with q and dout
    }
    if constexpr (C.stages == 1) {
      if (more) load_step(next, 0);
    }
    if (more) keep_row_numbers();

    // dq of this block of queries: rows and columns shared by all warps.
    const int dq_row = warp / (warps / C.dq_warps_m) * dq_rows,
              dq_col = warp % (warps / C.dq_warps_m) * dq_cols;
    const tile::Lanes<tile::Order::cols_first, C.block_m> lanes_m;
    const auto read_ds = tile::Matrices(shared.ds[0], lanes_m).template from_col<dq_rows>(dq_row);
    const auto read_k_cols = tile::Matrices(shared.k, lanes).template from_col<dq_cols>(dq_col);
    tile::FragmentA ds_rows[C.block_n / 16][dq_rows / 16];
    int* turn = nullptr;
#pragma unroll
    for (int col = 0; col < dq_cols; col += dq_part_cols) {
      tile::FragmentC dq[dq_rows / 16][dq_part_cols / 8];
      tile::clear(dq);
#pragma unroll
      for (int key = 0; key < C.block_n / 16; ++key) {
#pragma unroll
        for (int i = 0; i < dq_rows / 16 && col == 0; ++i)
          read_ds.read_a_transposed(ds_rows[key][i], key * 16, i * 16);
        tile::multiply_step<C.type>(dq, ds_rows[key], read_k_cols, key * 16, col);
      }
      if (col == 0 && params.turn != nullptr) {
        const long long all = count_tiles(params.batch, params.rows_q, params.packed(), C.block_m);
        turn = params.turn + h * all + first_tile(params.cu_seqlens_q, b, params.rows_q, C.block_m) + m_block;
        const Range seen =
            params.mask(sequence).keys_of_any({first_query, min(first_query + C.block_m, sequence.seqlen_q)});
        const int mine = n_block - static_cast<int>(seen.begin / C.block_n);
        if (threadIdx.x == 0) {
          while (ptx::load_acquire(turn) != mine) {
          }
        }
        __syncthreads();
      }
      float* first = tile::DqTiles::row_of_tiles(params, b, h, (first_query + dq_row) / 16) +
                     (dq_col + col) / 8 * tile::DqTiles::size;
      const int cols_there = params.head_dim - dq_col - col;
#pragma unroll
      for (int i = 0; i < dq_rows / 16; ++i) {
        if (first_query + dq_row + i * 16 >= sequence.seqlen_q) continue;
        float* row = first + i * tile::DqTiles::row_size(params);
        const auto add = [&](bool whole) {
#pragma unroll
          for (int j = 0; j < dq_part_cols / 8; ++j) {
            if (whole || j * 8 < cols_there) tile::DqTiles::add(row + j * tile::DqTiles::size, dq[i][j]);
          }
        };
        if (cols_there >= dq_part_cols) {
          add(true);
        } else {
          add(false);
        }
      }
    }
    if (turn != nullptr) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) ptx::store_release(turn, ptx::load_acquire(turn) + 1);
    }
    at = next;
    if constexpr (C.stages > 1) stage ^= 1;
  }

  finish(params, shared, dk, dv);
}

}  // namespace tessera::sm80
