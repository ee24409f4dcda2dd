// Decode's first kernel: the new keys, turned, and the new values go to their slots of the cache, in its
// dtype.
#pragma once

#include "core/eight_bits.h"
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
  const auto key = [&](const RowsArg& from, long long at, int c) {
    return tile::turned<type>(params, from, at, c, angle);
  };
  if (params.stored != Stored::half) {
    const auto round = [&](const RowsArg& from, const RowsArg& to, int width, const ScaleArg& scale,
                           auto&& number) {
      const long long source = b * from.batch + row * from.seq, target = block * to.batch + slot * to.seq;
      for (int i = threadIdx.x; i < a.num_heads_k * width; i += threads) {
        const int h = i / width, c = i % width;
        const float x = __fdiv_rn(number(from, source + h * from.head, c), scale.of(h));
        static_cast<unsigned char*>(to.data)[target + h * to.head + c] =
            params.stored == Stored::int8 ? static_cast<unsigned char>(int8_number(x)) : float8_bits(x);
      }
    };
    round(params.k_new, a.k, a.head_dim, params.k_scale, key);
    round(params.v_new, a.v, a.head_dim_v, params.v_scale, [](const RowsArg& from, long long at, int c) {
      return tile::load_number<type>(from.data, at + c, from.wide);
    });
    return;
  }
  copy(params.k_new, a.k, a.head_dim,
       [&](const RowsArg& from, long long at, int c) { return ptx::narrow<type>(key(from, at, c)); });
  copy(params.v_new, a.v, a.head_dim_v, [&](const RowsArg& from, long long at, int c) {
    return static_cast<const tile::HalfBits*>(from.data)[at + c];
  });
}

}  // namespace tessera
