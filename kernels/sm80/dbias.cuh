// The gradient of bias, by itself: one block of threads for a tile of bias, which sums ds over everything
// that bias is broadcast over. No memory but the result, and always the same order; the price is s and dp
// once more.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/gradients.cuh"

namespace tessera::sm80 {

template <DbiasConfig C>
struct DbiasShared {
  tile::SharedTile<C.block, C.head_dim> q, k;
  tile::SharedTile<C.block, C.head_dim_v> dout, v;
  float lse[C.block], delta[C.block];
  float sums[C.block][C.block + 1];  // by key, query
};

template <DbiasConfig C>
__device__ void dbias(const AttentionParams& params) {
  constexpr int threads = C.threads(), n = C.block / 8;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<DbiasShared<C>*>(shared_bytes);
  const int lane = threadIdx.x % 32, key_row = threadIdx.x / 32 * 16;

  // The tile of bias, and what it is summed over: one of each, or all.
  const auto* extent = params.dbias.extent;
  const bool each_b = extent[0] > 1, each_h = extent[1] > 1, each_i = extent[2] > 1, each_j = extent[3] > 1;
  const int tiles_i = tiles_of(static_cast<int>(extent[2]), C.block),
            tiles_j = tiles_of(static_cast<int>(extent[3]), C.block);
  long long index = ptx::block_index();
  const int tile_j = static_cast<int>(index % tiles_j), tile_i = static_cast<int>(index / tiles_j % tiles_i);
  index /= 1LL * tiles_j * tiles_i;
  const int bias_h = index % extent[1], bias_b = index / extent[1];

  tile::FragmentC sum[n];
  tile::clear(reinterpret_cast<tile::FragmentC(&)[1][n]>(sum));
  const tile::Pieces<threads, C.head_dim> pieces;
  const tile::Pieces<threads, C.head_dim_v> pieces_v;
  const tile::Lanes<tile::Order::rows_first, C.head_dim> lanes_a;
  const tile::Lanes<tile::Order::cols_first, C.head_dim> lanes_b;
  const tile::Lanes<tile::Order::rows_first, C.head_dim_v> lanes_a_v;
  const tile::Lanes<tile::Order::cols_first, C.head_dim_v> lanes_b_v;
  const tile::Matrices read_q(shared.q, lanes_b);
  const tile::Matrices read_k(shared.k, lanes_a, key_row);
  const tile::Matrices read_dout(shared.dout, lanes_b_v);
  const tile::Matrices read_v(shared.v, lanes_a_v, key_row);

  const auto add_tile = [&](const SequenceArg& sequence, int b, int h, int first_query, int first_key) {
    const int kv_head = h / params.group_size;
    const int queries = sequence.seqlen_q - first_query, keys = sequence.seqlen_k - first_key;
    __syncthreads();  // the tile before is done with
    tile::load_tile<C.type, C.aligned>(shared.q, pieces, tile::rows_of(params.q, b, sequence.q_begin, h),
                                       first_query, queries, params.head_dim);
    tile::load_tile<C.type, C.aligned>(shared.dout, pieces_v,
                                       tile::rows_of(params.dout, b, sequence.q_begin, h), first_query,
                                       queries, params.head_dim_v);
    tile::load_tile<C.type, C.aligned>(shared.k, pieces,
                                       tile::rows_of(params.k, b, sequence.k_begin, kv_head), first_key, keys,
                                       params.head_dim);
    tile::load_tile<C.type, C.aligned>(shared.v, pieces_v,
                                       tile::rows_of(params.v, b, sequence.k_begin, kv_head), first_key, keys,
                                       params.head_dim_v);
    cute::cp_async_fence();
    if (threadIdx.x < C.block) {
      const int row = sequence.q_begin + first_query + threadIdx.x;
      const bool there = static_cast<int>(threadIdx.x) < queries;
      shared.lse[threadIdx.x] =
          tile::lse_for_p<C.terms>(there ? *tile::lse_of_row(params, b, h, row) : ptx::infinity);
      shared.delta[threadIdx.x] = there ? params.delta[tile::delta_index(params, b, h, row)] : 0.0f;
    }
    cute::cp_async_wait<0>();
    __syncthreads();
    tile::FragmentC s[n], dp[n];
    constexpr auto nothing = [](int) {};
    tile::clear(reinterpret_cast<tile::FragmentC(&)[1][n]>(s));
    tile::clear(reinterpret_cast<tile::FragmentC(&)[1][n]>(dp));
    tile::multiply_transposed<C.type, C.head_dim>(s, read_k, read_q, nothing);
    tile::multiply_transposed<C.type, C.head_dim_v>(dp, read_v, read_dout, nothing);
    tile::gradients<C.type, C.terms, true>(
        s, dp, shared.lse, shared.delta, tile::ScoreTerms<C.type, C.terms>(params, sequence, b, h),
        params.mask(sequence).tile(first_query, first_key + key_row), first_query, first_key + key_row);
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] += dp[j][e];
    }
  };

  for (int b = each_b ? bias_b : 0; b < (each_b ? bias_b + 1 : params.batch); ++b) {
    const SequenceArg sequence = params.sequence(b);
    const Mask mask = params.mask(sequence);
    const int end_i = each_i ? tile_i + 1 : tiles_of(sequence.seqlen_q, C.block);
    for (int h = each_h ? bias_h : 0; h < (each_h ? bias_h + 1 : params.num_heads_q); ++h) {
      for (int i = each_i ? tile_i : 0; i < end_i; ++i) {
        const int first_query = i * C.block;
        const Range keys = mask.keys_of_any({first_query, min(first_query + C.block, sequence.seqlen_q)});
        const int begin_j = each_j ? tile_j : static_cast<int>(keys.begin / C.block);
        const int end_j = each_j ? tile_j + 1 : static_cast<int>((keys.end + C.block - 1) / C.block);
        for (int j = begin_j; j < end_j; ++j) {
          if (keys.begin < 1LL * (j + 1) * C.block && keys.end > 1LL * j * C.block && !keys.empty())
            add_tile(sequence, b, h, first_query, j * C.block);
        }
      }
    }
  }

  // Over the rows and columns that bias does not have.
#pragma unroll
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      shared.sums[key_row + lane / 4 + e / 2 * 8][j * 8 + lane % 4 * 2 + e % 2] = sum[j][e];
  }
  __syncthreads();
  const int rows = each_i ? C.block : 1, cols = each_j ? C.block : 1;
  for (int at = threadIdx.x; at < rows * cols; at += threads) {
    const int i = at / cols, j = at % cols;
    const long long query = each_i ? 1LL * tile_i * C.block + i : 0,
                    key = each_j ? 1LL * tile_j * C.block + j : 0;
    if (query >= extent[2] || key >= extent[3]) continue;
    float x = 0.0f;
    for (int y = each_j ? j : 0; y < (each_j ? j + 1 : C.block); ++y) {
      for (int z = each_i ? i : 0; z < (each_i ? i + 1 : C.block); ++z) x += shared.sums[y][z];
    }
    const BiasArg& out = params.dbias;
    tile::store_number<C.type>(
        out.data, bias_b * out.batch + bias_h * out.head + query * out.row + key * out.col, out.wide, x);
  }
}

}  // namespace tessera::sm80
