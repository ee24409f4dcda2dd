// Where dq is summed in float32: tiles of 16 rows and 8 columns, each as the C fragments of one warp, so that
// the 32 lanes that add to a tile touch whole lines. Tiles of a row of tiles lie side by side, heads one
// after the other.
#pragma once

#include "core/attention_params.h"
#include "tile/fragments.cuh"

namespace tessera::tile {

struct DqTiles {
  static constexpr int rows = 16, cols = 8, size = rows * cols;

  // The tiles of rows 16 * i .. of sequence b begin here.
  [[nodiscard]] static __device__ float* row_of_tiles(const AttentionParams& params, int b, int h, int i) {
    const auto all = static_cast<int>(count_tiles(params.batch, params.rows_q, params.packed(), rows));
    const long long tile = 1LL * h * all + first_tile(params.cu_seqlens_q, b, params.rows_q, rows) + i;
    return params.dq_acc + tile * row_size(params);
  }
  [[nodiscard]] static __device__ int row_size(const AttentionParams& params) {
    return tiles_of(params.head_dim, cols) * size;
  }
  // Element e of a lane, behind the tile's begin. Four floats a lane where one instruction adds four of them.
  [[nodiscard]] static __device__ constexpr int place(int lane, int e) {
#if __CUDA_ARCH__ >= 900
    return lane * 4 + e;
#else
    return e * 32 + lane;
#endif
  }
  static __device__ __forceinline__ void load(FragmentC& c, const float* tile) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    const auto four = *reinterpret_cast<const float4*>(tile + place(lane, 0));
    c[0] = four.x;
    c[1] = four.y;
    c[2] = four.z;
    c[3] = four.w;
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] = tile[place(lane, e)];
#endif
  }
  // Where four floats of a lane are neighbours.
  static __device__ __forceinline__ void store(float* tile, const FragmentC& c) {
    *reinterpret_cast<float4*>(tile + place(threadIdx.x % 32, 0)) = {c[0], c[1], c[2], c[3]};
  }
  static __device__ __forceinline__ void add(float* tile, const FragmentC& c) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    ptx::add_global(tile + place(lane, 0), c[0], c[1], c[2], c[3]);
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) atomicAdd(tile + place(lane, e), c[e]);
#endif
  }
};

}  // namespace tessera::tile
