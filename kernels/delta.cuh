// Backward's first kernel: delta = rowsum(dout * o) - dlse, for every row of every head.
#pragma once

#include "core/attention_params.h"
#include "tile/copy.cuh"

namespace tessera {

// Of eight neighbouring numbers of two rows.
template <Half type>
__device__ inline float dot_eight(const uint4& a, const uint4& b) {
  const unsigned x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum += ptx::widen<type>(static_cast<unsigned short>(x[i / 2] >> (16 * (i % 2)))) *
           ptx::widen<type>(static_cast<unsigned short>(y[i / 2] >> (16 * (i % 2))));
  }
  return sum;
}

// One block for a few rows of all heads, which as a rule are neighbours in memory; `lanes` neighbouring
// lanes, a power of two, have one head, 8 of its numbers each, and again. All that a lane reads is under way
// at once. The blocks also clear what backward adds to, from its end on: what backward begins with is then
// the last that was cleared, and still in the L2 cache.
template <Half type, int threads>
__device__ void delta(const AttentionParams& params) {
  int lanes = 1;
  while (lanes * 8 < params.head_dim_v && lanes < 32) lanes *= 2;
  const int lane = threadIdx.x % lanes;
  const long long all = (params.packed() ? 1LL : params.batch) * params.rows_q;
  const long long begin = 1LL * ptx::block_index() * delta_rows;
  const int count = static_cast<int>(min(all - begin, 0LL + delta_rows));  // may be none: it clears, too
  const auto place_of = [&](int r) {
    const long long index = begin + max(min(r, count - 1), 0);  // the last again
    const unsigned rows = params.rows_q;
    const int b = index < 1LL << 32 ? static_cast<unsigned>(index) / rows : index / rows;
    return int2{b, static_cast<int>(index - 1LL * b * rows)};
  };
  const auto at = [](const RowsArg& arg, int2 place, int h, int col) {
    return place.x * arg.batch + place.y * arg.seq + h * arg.head + col;
  };
  const auto finish = [&](int2 place, int h, float sum) {
    for (int apart = lanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (h >= params.num_heads_q || lane != 0) return;
    const auto [b, row] = place;
    // Nothing depends on a row that sees nothing: not even on the NaN that autograd makes of its lse.
    if (params.dlse.data != nullptr && *tile::lse_of_row(params, b, h, row) != -ptx::infinity) {
      sum -= static_cast<const float*>(
          params.dlse.data)[b * params.dlse.batch + h * params.dlse.head + row * params.dlse.seq];
    }
    params.delta[tile::delta_index(params, b, h, row)] = sum;
  };

  const bool pieces = !params.dout.wide && params.dout.aligned && !params.o.wide && params.o.aligned &&
                      params.head_dim_v % 8 == 0;
  for (int first = 0; first < params.num_heads_q && count > 0; first += threads / lanes) {
    const int h = first + threadIdx.x / lanes, past = h < params.num_heads_q ? params.head_dim_v : 0;
    if (pieces) {
      const auto piece = [](const RowsArg& arg, long long index) {
        return *reinterpret_cast<const uint4*>(static_cast<const tile::HalfBits*>(arg.data) + index);
      };
      float sums[delta_rows] = {};
      for (int col = lane * 8; col < past; col += lanes * 8) {
        uint4 x[delta_rows], y[delta_rows];
#pragma unroll
        for (int r = 0; r < delta_rows; ++r) {
          x[r] = piece(params.dout, at(params.dout, place_of(r), h, col));
          y[r] = piece(params.o, at(params.o, place_of(r), h, col));
        }
#pragma unroll
        for (int r = 0; r < delta_rows; ++r) sums[r] += dot_eight<type>(x[r], y[r]);
      }
#pragma unroll
      for (int r = 0; r < delta_rows; ++r) {
        if (r < count) finish(place_of(r), h, sums[r]);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < count; ++r) {
        const auto number = [](const RowsArg& arg, long long index) {
          return tile::load_number<type>(arg.data, index, arg.wide);
        };
        float sum = 0.0f;
        for (int col = lane * 8; col < past; col += lanes * 8) {
          const long long dout = at(params.dout, place_of(r), h, col), o = at(params.o, place_of(r), h, col);
          for (int i = 0; i < min(8, past - col); ++i)
            sum += number(params.dout, dout + i) * number(params.o, o + i);
        }
        finish(place_of(r), h, sum);
      }
    }
  }

  const long long zeros = params.clear_bytes / 16, each = (zeros + gridDim.x - 1) / gridDim.x;
  const long long from = (gridDim.x - 1 - ptx::block_index()) * each;
  for (long long i = from + threadIdx.x; i < min(from + each, zeros); i += threads)
    reinterpret_cast<uint4*>(params.dq_acc)[i] = uint4{0, 0, 0, 0};
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
