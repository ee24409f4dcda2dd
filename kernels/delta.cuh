// Backward's first kernel: delta = rowsum(dout * o) - dlse, for every row of every head.
#pragma once

#include "core/attention_params.h"
#include "tile/copy.cuh"

namespace tessera {

// Eight neighbouring numbers of a row.
template <Half type>
__device__ inline void load_eight(float (&x)[8], const RowsArg& arg, long long index, int valid) {
  if (!arg.wide && arg.aligned && valid >= 8) {
    const uint4 piece = *reinterpret_cast<const uint4*>(static_cast<const tile::HalfBits*>(arg.data) + index);
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = ptx::widen<type>(static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2))));
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    x[i] = i < valid ? tile::load_number<type>(arg.data, index + i, arg.wide) : 0.0f;
}

// One block for a row of all heads, which as a rule are neighbours in memory; `lanes` neighbouring lanes, a
// power of two, have one head, 8 of its numbers each, and again. The blocks also clear what backward adds to,
// from its end on: what backward begins with is then the last that was cleared, and still in the L2 cache.
template <Half type, int threads>
__device__ void delta(const AttentionParams& params) {
  const long long pieces = params.clear_bytes / 16, each = (pieces + gridDim.x - 1) / gridDim.x;
  const long long begin = (gridDim.x - 1 - ptx::block_index()) * each;
  for (long long at = begin + threadIdx.x; at < min(begin + each, pieces); at += threads)
    reinterpret_cast<uint4*>(params.dq_acc)[at] = uint4{0, 0, 0, 0};

  int lanes = 1;
  while (lanes * 8 < params.head_dim_v && lanes < 32) lanes *= 2;
  const int lane = threadIdx.x % lanes;
  const unsigned index = ptx::block_index(), rows = params.rows_q;
  if (index >= (params.packed() ? 1LL : params.batch) * rows) return;  // a block that only clears
  const int b = index / rows, row = index % rows;
  const long long dout_row = b * params.dout.batch + row * params.dout.seq;
  const long long o_row = b * params.o.batch + row * params.o.seq;
  for (int first = 0; first < params.num_heads_q; first += threads / lanes) {
    const int h = first + threadIdx.x / lanes;
    const bool there = h < params.num_heads_q;
    float sum = 0.0f;
    for (int col = lane * 8; there && col < params.head_dim_v; col += lanes * 8) {
      float x[8], y[8];
      load_eight<type>(x, params.dout, dout_row + h * params.dout.head + col, params.head_dim_v - col);
      load_eight<type>(y, params.o, o_row + h * params.o.head + col, params.head_dim_v - col);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
    }
    for (int apart = lanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (!there || lane != 0) continue;
    // Nothing depends on a row that sees nothing: not even on the NaN that autograd makes of its lse.
    if (params.dlse.data != nullptr && *tile::lse_of_row(params, b, h, row) != -ptx::infinity) {
      sum -= static_cast<const float*>(
          params.dlse.data)[b * params.dlse.batch + h * params.dlse.head + row * params.dlse.seq];
    }
    params.delta[tile::delta_index(params, b, h, row)] = sum;
  }
}

// dsinks[h] = -sum over the rows of exp(sink - lse) * delta. One block a head, always in the same order.
template <Half type, int threads>
__device__ void dsinks(const AttentionParams& params) {
  __shared__ float sums[threads / 32];
  const int h = ptx::block_index();
  const float sink = tile::load_number<type>(params.sinks, h * params.sinks_stride, params.sinks_wide);
  float sum = 0.0f;
  for (int b = 0; b < params.batch; ++b) {
    const SequenceArg sequence = params.sequence(b);
    for (int i = threadIdx.x; i < sequence.seqlen_q; i += threads) {
      const int row = sequence.q_begin + i;
      const float lse = *tile::lse_of_row(params, b, h, row);
      if (lse > -ptx::infinity || lse != lse)
        sum -= ptx::exp2((sink - lse) * ptx::log2_e) * params.delta[tile::delta_index(params, b, h, row)];
    }
  }
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < threads / 32; ++i) sum += sums[i];
  tile::store_number<type>(params.dsinks, h * params.dsinks_stride, params.dsinks_wide, sum);
}

}  // namespace tessera
