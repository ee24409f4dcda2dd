// Decode's last kernel: the splits of a sequence's keys become one.
#pragma once

#include "ptx/bytes.cuh"
#include "ptx/launch.cuh"
#include "tile/states.cuh"

namespace tessera {

// A warp has a row of a tile.
template <Half type, int threads>
__device__ void combine(const DecodeParams& params) {
  ptx::let_next_begin();
  // The main kernel had waited for the lengths before it let this one begin.
  const AttentionParams& a = params.attention;
  const unsigned number = ptx::block_index() * (threads / 32) + threadIdx.x / 32;
  const unsigned place = number / params.partial_rows;
  const int r = number % params.partial_rows;
  const tile::DecodeTile tile(params, params.partial_tile(place));
  const auto [query, h, there] = tile.row(params, r);
  const int seqlen_q = tile.sequence.seqlen_q;
  const int seen = static_cast<int>(params.mask(tile.sequence).keys_of_any({0, seqlen_q}).size());
  const int count = params.blocks_of(params.splits(seqlen_q, seen)).count;
  ptx::wait_for_earlier();  // all threads, or this kernel could end before the main one
  if (tile.b == a.batch || !there || count == 1) return;  // 1: its block has written o
  constexpr int parts = 16, levels = 3;  // parts at a time; DecodeParams::most_blocks = parts << levels
  static_assert(parts << levels == DecodeParams::most_blocks);
  const int lane = threadIdx.x % 32;
  const long long first_row = params.partial_row(place, 0) + r;
  const auto row_of = [&](int split) { return first_row + 1LL * split * params.partial_rows; };
  for (int col = lane * 4; col < a.head_dim_v; col += 128) {
    float4 o, waiting[levels];
    float2 state, states[levels];
    const int last = (count - 1) / parts;
#pragma unroll 1
    for (int i = 0; i <= last; ++i) {
      state = tile::join_tree<parts>(
          o, count - i * parts,
          [&](int s) { return reinterpret_cast<const float2*>(params.state_partial)[row_of(i * parts + s)]; },
          [&](int s) {
            return *reinterpret_cast<const float4*>(params.o_partial +
                                                    row_of(i * parts + s) * params.partial_cols + col);
          });
      bool climbs = true;
#pragma unroll
      for (int level = 0; level < levels; ++level) {
        if (!climbs) continue;
        if ((i >> level & 1) != 0) {
          const tile::Joined both(states[level], state);
          const float4& left = waiting[level];
          state = both.state;
          o = {both.sum(left.x, o.x), both.sum(left.y, o.y), both.sum(left.z, o.z), both.sum(left.w, o.w)};
        } else if (i != last) {
          waiting[level] = o;
          states[level] = state;
          climbs = false;
        }
      }
    }
    tile::RowEnd end = tile::end_row<type>(a, h, state);
    end.factor *= params.v_scale.of(tile.head_k) * ptx::byte_unit(params.stored);
    tile::store_row<type>(a, tile.b, tile.sequence.q_begin + query, h, col, o, end);
  }
}

}  // namespace tessera
