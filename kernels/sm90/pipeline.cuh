// Rings of buffers that TMA fills: what Hopper's kernels share.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/attention_params.h"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "tile/panels.cuh"

namespace tessera::sm90 {

inline constexpr int group_rows = 64, group_threads = 128, warp_rows = 16;  // of a warpgroup, of a warp

// Of a buffer. full: what was asked for has come; empty: nobody reads it any more.
struct Barriers {
  ptx::Barrier full, empty;
};

// One of a ring of buffers, and the parity of its barriers' phase.
template <int stages>
struct Cursor {
  unsigned stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The barriers of a ring, by their addresses, for a warp that reads its buffers.
template <int stages>
struct KeptBarriers {
  unsigned full, empty;

  __device__ explicit KeptBarriers(const Barriers (&ring)[stages])
      : full(ptx::kept(ptx::shared_address(&ring[0].full))),
        empty(ptx::kept(ptx::shared_address(&ring[0].empty))) {}

  __device__ __forceinline__ void wait(const Cursor<stages>& at) const {
    ptx::wait(full + at.stage * static_cast<unsigned>(sizeof(Barriers)), at.parity);
  }
  // The warp is done with the buffer.
  __device__ __forceinline__ void release(const Cursor<stages>& at) const {
    if (threadIdx.x % 32 == 0) ptx::arrive(empty + at.stage * static_cast<unsigned>(sizeof(Barriers)));
  }
};

// The same without a state: of the step that is the ring's `use`-th use, from 0 on.
struct RingPlace {
  unsigned stage, parity;
};
template <int stages>
[[nodiscard]] __device__ __forceinline__ RingPlace ring_at(unsigned use) {
  return {use % stages, use / stages % 2};
}

enum class Reuse { soon, once };  // of what is loaded, by other blocks of threads

// Waits until the buffer is free, and announces what will come.
__device__ __forceinline__ void begin_load(Barriers& barriers, unsigned parity, int bytes) {
  ptx::wait(barriers.empty, parity ^ 1);
  barriers.full.arrive_and_expect_tx(bytes);
}

// Rows from `row` on, whatever lies there; zeros beyond the tensor. To the tile's rows from `to` on.
template <Reuse reuse, class Tile>
__device__ __forceinline__ void load_tile(Tile& tile, const TensorMap& map, ptx::Barrier& barrier, int row,
                                          int head, int b, int to = 0) {
  constexpr auto hint =
      reuse == Reuse::soon ? cute::TMA::CacheHintSm90::EVICT_LAST : cute::TMA::CacheHintSm90::EVICT_FIRST;
#pragma unroll
  for (int i = 0; i < Tile::panels; ++i) {
    cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), static_cast<uint64_t>(hint),
                                 tile.data + i * Tile::panel_bytes + to * Tile::row_bytes, i * Tile::width,
                                 row, head, b);
  }
}

// Rows from first_row on become 0: another sequence's, or padding, lie there, and may be NaN. By `threads` of
// them, of which this is one; those who read the tile have to meet them.
template <int threads, class Tile>
__device__ __forceinline__ void clear_rows(Tile& tile, int first_row) {
  constexpr int pieces = Tile::cols / 8;
  for (int i = threadIdx.x % threads + first_row * pieces; i < Tile::rows * pieces; i += threads)
    *reinterpret_cast<uint4*>(tile.at(i / pieces, i % pieces)) = uint4{0, 0, 0, 0};
  ptx::publish_shared();
}

}  // namespace tessera::sm90
