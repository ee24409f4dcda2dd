// Backward's last kernel: dq from the float32 tiles in which it was summed, scaled and in its own type.
#pragma once

#include "core/attention_params.h"
#include "ptx/launch.cuh"
#include "tile/copy.cuh"
#include "tile/dq_tiles.cuh"

namespace tessera {

// A warp has 16 rows of one head. The last heads come first: of them most is in the L2 cache.
template <Half type, int threads>
__device__ void convert_dq(const AttentionParams& params) {
  constexpr int cols = 64, n = cols / 8;
  __shared__ tile::SharedTile<16, cols> staging[threads / 32];
  ptx::wait_for_earlier();
  const auto tiles =
      static_cast<unsigned>(count_tiles(params.batch, params.rows_q, params.packed(), tile::DqTiles::rows));
  const unsigned long long all = 1ULL * tiles * params.num_heads_q;
  const unsigned long long from_end = 1ULL * ptx::block_index() * (threads / 32) + threadIdx.x / 32;
  if (from_end >= all) return;
  const unsigned long long number = all - 1 - from_end;
  const int h = number / tiles;
  const auto [b, i] =
      find_tile(params.cu_seqlens_q, params.batch, params.rows_q, tile::DqTiles::rows, number % tiles);
  const SequenceArg sequence = params.sequence(b);
  if (i < 0 || i >= tiles_of(sequence.allocated_q, tile::DqTiles::rows)) return;
  const int valid_rows = min(sequence.allocated_q - i * 16, 16);
  // Where sums have an order, nobody has cleared what nobody adds to.
  const bool seen = !params.mask(sequence).keys_of_any({16 * i, min(16 * i + 16, sequence.seqlen_q)}).empty();
  const float* source = tile::DqTiles::row_of_tiles(params, b, h, i);
  for (int first = 0; first < params.head_dim; first += cols) {
    tile::FragmentC c[1][n];
    tile::clear(c);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      if (seen && first + j * 8 < params.head_dim)
        tile::DqTiles::load(c[0][j], source + (first / 8 + j) * tile::DqTiles::size);
    }
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[0][j][e] *= params.scale;
    }
    RowsArg dq = params.dq;
    dq.data = static_cast<char*>(dq.data) + first * (dq.wide ? 4 : 2);
    tile::store_tile<type>(c, staging[threadIdx.x / 32], 0, dq, b, sequence.q_begin + i * 16, h, valid_rows,
                           0, min(params.head_dim - first, cols));
    __syncwarp();
  }
}

}  // namespace tessera
