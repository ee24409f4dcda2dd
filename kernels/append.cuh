// Decode's first kernel: the new keys, turned, and the new values go to their slots of the cache.
#pragma once

#include "ptx/launch.cuh"
#include "tile/states.cuh"

namespace tessera {

// One block for a new row of all heads.
template <Half type, int threads>
__device__ void append(const DecodeParams& params) {
  ptx::let_next_begin();
  ptx::wait_for_earlier();
  const AttentionParams& a = params.attention;
  const unsigned index = ptx::block_index(), rows = params.rows_new;
  int b, j;
  if (a.packed()) {
    int low = 0, high = a.batch;  // the last b that begins at or before the row
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (a.cu_seqlens_k[middle] <= static_cast<int>(index)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    if (low == a.batch) return;  // behind the last sequence
    b = low;
    j = static_cast<int>(index) - params.sequence(b).new_begin;
  } else {
    b = index / rows;
    j = index % rows;
  }
  const DecodeSequence sequence = params.sequence(b);
  if (j < 0 || j >= sequence.seqlen_new) return;
  const int position = sequence.before + j, row = sequence.new_begin + j;
  const auto [block, slot] = params.slot(b, position);
  const int angle = AttentionParams::clamp(position, 0, params.positions - 1);
  const auto copy = [&](const RowsArg& from, const RowsArg& to, int width, auto&& number) {
    const long long source = b * from.batch + row * from.seq, target = block * to.batch + slot * to.seq;
    for (int i = threadIdx.x; i < a.num_heads_k * width; i += threads) {
      const int h = i / width, c = i % width;
      static_cast<tile::HalfBits*>(to.data)[target + h * to.head + c] =
          number(from, source + h * from.head, c);
    }
  };
  copy(params.k_new, a.k, a.head_dim, [&](const RowsArg& from, long long at, int c) {
    return ptx::narrow<type>(tile::turned<type>(params, from, at, c, angle));
  });
  copy(params.v_new, a.v, a.head_dim_v, [&](const RowsArg& from, long long at, int c) {
    return static_cast<const tile::HalfBits*>(from.data)[at + c];
  });
}

}  // namespace tessera
