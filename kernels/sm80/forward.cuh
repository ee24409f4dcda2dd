// FlashAttention-2 forward on mma.sync: a block of queries, a loop over blocks of keys, an online softmax.
//
// One block of threads for each (block of queries, head, batch); each warp owns block_m / warps queries.
// In the loop K(n) is there; V(n) loads while S = Q K^T, K(n - 1) while softmax and O += P V.
//
// NOTES.md beside this file has the roofline and what was tried.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/scores.cuh"
#include "tile/softmax.cuh"

namespace tessera::sm80 {

template <ForwardConfig C>
struct ForwardShared : tile::BiasShared<C.terms, C.block_m, C.block_n>,
                       tile::DropoutShared<has(C.terms, Terms::dropout), C.warps * 32,
                                           C.block_m / C.warps / 16, C.block_n / 8> {
  union {
    struct {
      tile::SharedTile<C.block_m, C.head_dim> q;
      tile::SharedTile<C.block_n, C.head_dim> k;
      tile::SharedTile<C.block_n, C.head_dim_v> v;
    };
    tile::SharedTile<C.block_m, C.head_dim_v> o;
  };
};

// Which queries, of which head.
struct ForwardWork {
  int b, h;
  SequenceArg sequence;
  int m_block;
};
template <ForwardConfig C>
__device__ __forceinline__ ForwardWork find_work(const AttentionParams& params) {
  // The last blocks of a sequence come first: under a causal mask they see most.
  const unsigned index = ptx::block_index();
  const auto tiles =
      static_cast<unsigned>(count_tiles(params.batch, params.rows_q, params.packed(), C.block_m));
  const unsigned number = tiles - 1 - index % tiles;
  const auto [b, m_block] = find_tile(params.cu_seqlens_q, params.batch, params.rows_q, C.block_m, number);
  return {b, static_cast<int>(index / tiles), params.sequence(b), m_block};
}

// o = acc_o / row_sum, and lse, the sink among them.
template <ForwardConfig C, int m, int nv>
__device__ __forceinline__ void finish(const AttentionParams& params, ForwardShared<C>& shared,
                                       tile::Softmax<m>& softmax, tile::FragmentC (&acc_o)[m][nv]) {
  const auto [b, h, sequence, m_block] = find_work<C>(params);
  const int first_query = m_block * C.block_m, warp_row = threadIdx.x / 32 * (m * 16);
  const int rows_there = min(sequence.allocated_q - first_query, C.block_m);
  const bool has_sink = params.sinks != nullptr;
  const float sink = has_sink
                         ? tile::load_number<C.type>(params.sinks, h * params.sinks_stride, params.sinks_wide)
                         : -ptx::infinity;
  float lse[m][2];
  constexpr tile::Units units = tile::units_of(C.terms);
  const float unit = units == tile::Units::raw       ? params.scale
                     : units == tile::Units::natural ? 1.0f
                                                     : ptx::ln_2;
#pragma unroll
  for (int i = 0; i < m; ++i) {
    float by[2];
    softmax.conclude(i, by, lse[i], unit, sink, has_sink, params.dropout.scale,
                     [&](int half, float x) { softmax.shrink_rows(acc_o, i, half, x); });
  }
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + tile::element(i, 0, half * 2).row;
      if (first_query + row >= sequence.seqlen_q) {  // padding
        lse[i][half] = -ptx::infinity;
#pragma unroll
        for (int j = 0; j < nv; ++j) acc_o[i][j][half * 2] = acc_o[i][j][half * 2 + 1] = 0.0f;
      }
      if (params.lse.data != nullptr && threadIdx.x % 4 == 0 && row < rows_there) {
        static_cast<float*>(params.lse.data)[b * params.lse.batch + h * params.lse.head +
                                             (0LL + sequence.q_begin + first_query + row) * params.lse.seq] =
            lse[i][half];
      }
    }
  }
  __syncthreads();  // o takes the place of q, k and v
  tile::store_tile<C.type>(acc_o, shared.o, warp_row, params.o, b, sequence.q_begin + first_query, h,
                           rows_there, 0, params.head_dim_v);
}

template <ForwardConfig C>
__device__ void forward(const AttentionParams& params) {
  constexpr int threads = C.warps * 32, warp_rows = C.block_m / C.warps;
  constexpr int m = warp_rows / 16, n = C.block_n / 8, nv = C.head_dim_v / 8;
  static_assert(warp_rows % 16 == 0 && C.block_n % 16 == 0);
  constexpr bool biased = has(C.terms, Terms::bias);
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<C>*>(shared_bytes);

  // Found again behind the loop: what only the end needs would take the loop's registers.
  const ForwardWork work = find_work<C>(params);
  const auto& [b, h, sequence, m_block] = work;
  if (m_block < 0 || m_block >= tiles_of(sequence.allocated_q, C.block_m)) return;
  const int first_query = m_block * C.block_m;
  const int queries = max(0, min(sequence.seqlen_q - first_query, C.block_m));
  const int warp_row = ptx::warp_index() * warp_rows;
  // Not kept in a register where they are scarce.
  const auto warp_row_again = [&] { return biased ? ptx::thread_index() / 32 * warp_rows : warp_row; };

  // Blocks of keys that some query sees.
  const Range keys = params.mask(sequence).keys_of_any({first_query, first_query + queries});
  const int first_block = static_cast<int>(keys.begin / C.block_n);
  const int past_block =
      keys.empty() ? first_block : static_cast<int>((keys.end + C.block_n - 1) / C.block_n);

  const tile::Rows q = tile::rows_of(params.q, b, sequence.q_begin + first_query, h);
  const tile::Rows k = tile::rows_of(params.k, b, sequence.k_begin, h / params.group_size);
  const tile::Rows v = tile::rows_of(params.v, b, sequence.k_begin, h / params.group_size);
  constexpr bool fresh = C.head_dim <= 64 || biased;
  const tile::Pieces<threads, C.head_dim, fresh> pieces;
  const tile::Pieces<threads, C.head_dim_v, fresh> own_pieces_v;
  const auto& pieces_v = tile::same_if_same(pieces, own_pieces_v);
  const tile::ScoreTerms<C.type, C.terms> terms(params, sequence, b, h);
  // K, and the bias for it.
  const auto load_k = [&](int block) {
    const int first = block * C.block_n;
    tile::load_tile<C.type, C.aligned>(shared.k, pieces, k, first, sequence.seqlen_k - first,
                                       params.head_dim);
    if constexpr (biased) terms.template load_bias<threads>(shared.bias, first_query, first);
    cute::cp_async_fence();
  };
  const auto load_v = [&](int block) {
    const int first = block * C.block_n;
    tile::load_tile<C.type, C.aligned>(shared.v, pieces_v, v, first, sequence.seqlen_k - first,
                                       params.head_dim_v);
    cute::cp_async_fence();
  };

  const tile::Lanes<tile::Order::rows_first, C.head_dim> lanes_q;
  const tile::Lanes<tile::Order::cols_first, C.head_dim> lanes_k;
  const tile::Lanes<tile::Order::rows_first, C.head_dim_v> own_lanes_v;
  const tile::Matrices read_q_tile(shared.q, lanes_q, warp_row);
  const tile::Matrices read_k(shared.k, lanes_k);
  const tile::Matrices read_v(shared.v, tile::same_if_same(lanes_q, own_lanes_v));
  tile::HeldA<C.q_in_registers ? C.head_dim : 16> held_q[m];
  const auto read_q = [&](tile::FragmentA& a, int i, int d) {
    if constexpr (C.q_in_registers) {
      held_q[i].read_a(a, 0, d);
    } else {
      read_q_tile.read_a(a, i * 16, d);
    }
  };

  tile::FragmentC acc_o[m][nv];
  tile::clear(acc_o);
  tile::Softmax<m> softmax;
  // What s is multiplied by on its way into the exponential.
  constexpr tile::Units units = tile::units_of(C.terms);
  const float scale_log2 = units == tile::Units::raw       ? params.scale_log2
                           : units == tile::Units::natural ? ptx::log2_e
                                                           : 1.0f;

  // What was asked for has arrived, and every warp is done with what was before.
  const auto arrived = [] {
    cute::cp_async_wait<0>();
    __syncthreads();
  };
  if (first_block < past_block) {
    tile::load_tile<C.type, C.aligned>(shared.q, pieces, q, 0, queries, params.head_dim);
    load_k(past_block - 1);
    if constexpr (C.q_in_registers) {
      arrived();
#pragma unroll
      for (int i = 0; i < m; ++i) held_q[i].read(read_q_tile, i * 16);
    }
  }
  // Which keys of a block dropout keeps, the n-th parts from `part` on: among the products of the block
  // before.
  const auto choose_kept = [&](int block, int part, int parts) {
    if constexpr (has(C.terms, Terms::dropout)) {
      auto& kept = shared.kept;
#pragma unroll
      for (int i = part * kept.parts / n; i < (part + parts) * kept.parts / n; ++i)
        terms.choose(kept, i, first_query + warp_row, block * C.block_n);
    }
  };
  choose_kept(past_block - 1, 0, n);
  for (int block = past_block - 1; block >= first_block; --block) {
    const int first_key = block * C.block_n;
    arrived();  // K(n), and every warp is done with V(n + 1)
    load_v(block);
    tile::FragmentC s[m][n];
    constexpr auto by_keys = tile::Orientation::queries_by_keys;
    terms.template start<by_keys>(s, first_query + warp_row, first_key);
    tile::multiply_q_k<C.type, C.head_dim>(s, read_q, read_k);
    const Mask mask = params.mask(sequence);
    const bool whole = mask.tile(first_query, first_key).sees_all(C.block_m, C.block_n);
    const auto hide = [&] {
      if (!whole) tile::hide(s, mask.tile(first_query + warp_row_again(), first_key));
    };

    // s becomes p, rounded to 16 bits as the next product needs it.
    const auto exponentiate = [&](const auto&... exponent_of) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int i = 0; i < m; ++i) softmax.exponentiate(s[i][j], i, exponent_of...);
      }
    };
    const auto shrink = [&](int i, int half, float by) { softmax.shrink_rows(acc_o, i, half, by); };
    bool capped = false;
    if constexpr (terms.caps_in_exponent) {
      const CapInExponent& cap = params.cap;
      float maximum[m][2];
      hide();
      softmax.maxima(s, maximum);
      capped = tile::holds(cap, maximum, softmax.reference);
      if (capped) {
#pragma unroll
        for (int i = 0; i < m; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) maximum[i][half] = cap(maximum[i][half], 0.0f);
        }
        softmax.follow(maximum, 1.0f, shrink);
        exponentiate(cap);
      }
    }
    if (!capped) {
      terms.template apply<by_keys>(
          s, first_query + warp_row, first_key,
          [&](auto& scores, float scale) {
            if constexpr (biased) terms.add_bias(scores, scale, shared.bias, warp_row_again());
          },
          [](int, int, float) {});
      hide();
      softmax.prepare(s, scale_log2, shrink);
      exponentiate();
    }
    if constexpr (has(C.terms, Terms::dropout)) terms.drop(s, shared.kept);
    tile::FragmentA p[n / 2][m];
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
#pragma unroll
      for (int i = 0; i < m; ++i) tile::as_operand<C.type>(p[j][i], s[i], j);
    }

    arrived();  // V(n), and every warp is done with K(n)
    if (block > first_block) load_k(block - 1);
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      choose_kept(block - 1, j * 2, 2);
      tile::multiply_step<C.type>(acc_o, p[j], read_v, j * 16);
    }
  }
  finish<C>(params, shared, softmax, acc_o);
}

}  // namespace tessera::sm80
