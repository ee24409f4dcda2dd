// Tiles between global and shared memory. What lies outside the valid rows and columns is not read: zeros
// take its place.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "core/attention_params.h"
#include "tile/fragments.cuh"

namespace tessera::tile {

using HalfBits = unsigned short;

// The first row of a tensor that a block works on, and how far the next one is.
struct Rows {
  const void* data;
  long long stride;
  bool wide;  // float32, to be rounded
};
[[nodiscard]] __device__ inline Rows rows_of(const RowsArg& arg, int b, int row, int head) {
  const long long offset = b * arg.batch + row * arg.seq + head * arg.head;
  return {static_cast<const char*>(arg.data) + offset * (arg.wide ? 4 : 2), arg.seq, arg.wide};
}

// Eight numbers one by one, those from valid on as zeros.
template <Half type>
[[nodiscard]] __device__ inline uint4 gather(const Rows& from, long long index, int valid) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned pair = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (2 * i + c >= valid) continue;
      const long long at = index + 2 * i + c;
      const unsigned short x = from.wide ? ptx::narrow<type>(static_cast<const float*>(from.data)[at])
                                         : static_cast<const HalfBits*>(from.data)[at];
      pair |= static_cast<unsigned>(x) << (16 * c);
    }
    words[i] = pair;
  }
  return {words[0], words[1], words[2], words[3]};
}

// Where a thread's pieces go in tiles of `cols` columns: one column of pieces in each group, every
// row_step-th row. Tiles of a width share the registers. fresh: what follows from the thread's index is
// worked out again every time and not kept; where that spares the compiler a spill is found by trying.
template <int threads, int cols, bool fresh = false>
struct Pieces {
  using Row = SharedTile<16, cols>;
  // As many neighbouring pieces as a power of two allows.
  static constexpr int group = (Row::pieces & -Row::pieces) < threads ? Row::pieces & -Row::pieces : threads;
  static constexpr int groups = Row::pieces / group, row_step = threads / group;
  static constexpr int period = row_step < 8 ? 8 / row_step : 1;  // of the permutation, in row steps
  static_assert(row_step * period % 8 == 0);

  unsigned offset[period];

  // The thread's first.
  [[nodiscard]] static __device__ __forceinline__ int thread() {
    return fresh ? ptx::thread_index() : threadIdx.x;
  }
  [[nodiscard]] static __device__ __forceinline__ int row() { return thread() / group; }
  [[nodiscard]] static __device__ __forceinline__ int piece() { return thread() % group; }

  __device__ Pieces() {
#pragma unroll
    for (int i = 0; i < period; ++i) {
      const int at = row() + i * row_step;
      offset[i] = ptx::opaque(at * Row::row_bytes + ((piece() ^ Row::permutation(at)) << 4));
    }
  }
  // Of step i of the rows and group g of the columns, both constants.
  [[nodiscard]] __device__ __forceinline__ unsigned at(int i, int g) const {
    return offset[i % period] + i / period * (period * row_step * Row::row_bytes) + g * (group * 16);
  }
};

// Starts copying rows first .. first + rows - 1. aligned: by cp.async, complete after the group that the
// caller closes; else at once.
template <Half type, bool aligned, int threads, int rows, int cols, bool fresh>
__device__ __forceinline__ void load_tile(const SharedTile<rows, cols>& tile,
                                          const Pieces<threads, cols, fresh>& pieces, const Rows& from,
                                          int first, int valid_rows, int valid_cols) {
  using Places = Pieces<threads, cols, fresh>;
  static_assert(rows % Places::row_step == 0);
  const unsigned address = ptx::shared_address(tile.data);
  const long long step = Places::row_step * from.stride;
  const int row = Places::row(), piece = Places::piece();
  const auto copy = [&](auto&& valid_of) {
    long long source = (0LL + first + row) * from.stride + piece * 8;
#pragma unroll
    for (int i = 0; i < rows / Places::row_step; ++i) {
#pragma unroll
      for (int g = 0; g < Places::groups; ++g) {
        const int valid = valid_of(i, g);
        const unsigned to = address + pieces.at(i, g);
        if constexpr (aligned) {
          ptx::copy_async(to, static_cast<const HalfBits*>(from.data) + source + g * Places::group * 8,
                          valid > 0 ? 16 : 0);
        } else {
          ptx::store(to, gather<type>(from, source + g * Places::group * 8, valid));
        }
      }
      source += step;
    }
  };
  const auto checked = [&](int i, int g) {
    return i * Places::row_step < valid_rows - row ? valid_cols - (piece + g * Places::group) * 8 : 0;
  };
  // Most tiles are whole. Twice the code pays for 128 columns, and costs for 64 and 256 (sm80/NOTES.md).
  if (aligned && cols == 128 && valid_rows >= rows && valid_cols == cols) {
    copy([](int, int) { return 8; });
  } else {
    copy(checked);
  }
}

// One number of a tensor of either width.
template <Half type>
[[nodiscard]] __device__ __forceinline__ float load_number(const void* data, long long index, bool wide) {
  return wide ? static_cast<const float*>(data)[index]
              : ptx::widen<type>(static_cast<const HalfBits*>(data)[index]);
}
template <Half type>
__device__ __forceinline__ void store_number(void* data, long long index, bool wide, float x) {
  if (wide) {
    static_cast<float*>(data)[index] = x;
  } else {
    static_cast<HalfBits*>(data)[index] = ptx::narrow<type>(x);
  }
}

[[nodiscard]] __device__ inline const float* lse_of_row(const AttentionParams& params, int b, int h,
                                                        int row) {
  return static_cast<const float*>(params.lse.data) + b * params.lse.batch + h * params.lse.head +
         row * params.lse.seq;
}
// Where the delta of a row lies. row counts within the batch entry, or all packed rows.
[[nodiscard]] __device__ inline long long delta_index(const AttentionParams& params, int b, int h, int row) {
  return (params.packed() ? h : 1LL * h * params.batch + b) * params.rows_q + row;
}

// Writes C tiles, 16 * m rows from first_row of the block on, to rows of a tensor: through shared memory in
// whole pieces where the tensor allows it. Rows from valid_rows on and columns from valid_cols on are not
// written. The tile is the warp's own: rows first_row .. of it. fresh: as of Pieces.
template <Half type, bool fresh = false, int m, int n, class Tile>
__device__ __forceinline__ void store_tile(const FragmentC (&c)[m][n], Tile& tile, int first_row,
                                           const RowsArg& arg, int b, int row, int head, int valid_rows,
                                           int first_col, int valid_cols) {
  const int lane = (fresh ? ptx::thread_index() : threadIdx.x) % 32;
  const long long base = b * arg.batch + row * arg.seq + head * arg.head;
  if (!arg.wide && arg.aligned) {
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        const int at = first_row + i * 16 + lane / 4, col = first_col + j * 8 + lane % 4 * 2;
        tile.pair(at, col) = ptx::pack<type>(c[i][j][0], c[i][j][1]);
        tile.pair(at + 8, col) = ptx::pack<type>(c[i][j][2], c[i][j][3]);
      }
    }
    __syncwarp();
    auto* out = static_cast<HalfBits*>(arg.data) + base;
#pragma unroll 2
    for (int i = 0; i < m * 16 * n; i += 32) {
      const int at = first_row + (i + lane) / n, col = first_col + (i + lane) % n * 8;
      if (at >= valid_rows || col >= valid_cols) continue;
      HalfBits* target = out + at * arg.seq + col;
      const auto* piece = tile.at(at, col / 8);
      if (col + 8 <= valid_cols) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(piece);
      } else {
#pragma unroll 1
        for (int e = 0; col + e < valid_cols; ++e) target[e] = reinterpret_cast<const HalfBits*>(piece)[e];
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = first_row + i * 16 + lane / 4 + e / 2 * 8,
                  col = first_col + j * 8 + lane % 4 * 2 + e % 2;
        if (at < valid_rows && col < valid_cols)
          store_number<type>(arg.data, base + at * arg.seq + col, arg.wide, c[i][j][e]);
      }
    }
  }
}

}  // namespace tessera::tile
