// Decode's last kernel: the splits of a sequence's keys become one.
#pragma once

#include "tile/states.cuh"

namespace tessera {

// A warp has a row of a tile.
template <Half type, int threads>
__device__ void combine(const DecodeParams& params) {
  const AttentionParams& a = params.attention;
  const unsigned number = ptx::block_index() * (threads / 32) + threadIdx.x / 32;
  const unsigned tile_number = number / params.partial_rows,
                 sequence_tile = params.head_tiles_k.quotient(tile_number);
  const int r = number % params.partial_rows, b = params.split_tiles.quotient(sequence_tile);
  if (b >= a.batch) return;
  const tile::DecodeTile tile(params, b, params.split_tiles.remainder(sequence_tile),
                              params.head_tiles_k.remainder(tile_number));
  const auto [query, h, there] = tile.row(params, r);
  if (!there) return;
  const int seqlen_q = tile.sequence.seqlen_q;
  const int seen = static_cast<int>(params.mask(tile.sequence).keys_of_any({0, seqlen_q}).size());
  const int count = params.splits(seqlen_q, seen).count;
  if (count == 1) return;  // its block has written o
  const auto row_of = [&](int split) { return tile.partial_row(params, split) + r; };
  for (int col = threadIdx.x % 32 * 4; col < a.head_dim_v; col += 128) {
    float4 o;
    const float2 state = tile::fold(
        o, count, [&](int i) { return reinterpret_cast<const float2*>(params.state_partial)[row_of(i)]; },
        [&](int i) {
          return *reinterpret_cast<const float4*>(params.o_partial + row_of(i) * params.partial_cols + col);
        });
    tile::store_row<type>(a, tile.b, tile.sequence.q_begin + query, h, col, o,
                          tile::end_row<type>(a, h, state));
  }
}

}  // namespace tessera
