// The fragments of mma.m16n8k16, and the tiles in shared memory that they come from.
//
// Of a 16 x 8 tile of C a lane holds rows lane / 4 and lane / 4 + 8, columns 2 * (lane % 4) and the next:
// c[0], c[1] in the first row and c[2], c[3] in the second. Two neighbouring C tiles, packed, are one A tile.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace tessera::tile {

using FragmentA = unsigned[4];
using FragmentC = float[4];

// c += a b
template <Half type>
__device__ __forceinline__ void multiply_add(FragmentC& c, const FragmentA& a, unsigned b0, unsigned b1) {
  if constexpr (type == Half::bfloat16) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0],
                                              c[1], c[2], c[3]);
  } else {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0],
                                            c[1], c[2], c[3]);
  }
}

template <int m, int n>
__device__ __forceinline__ void clear(FragmentC (&c)[m][n]) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) c[i][j][0] = c[i][j][1] = c[i][j][2] = c[i][j][3] = 0.0f;
  }
}

// The A tile of columns 16 * k .. 16 * k + 15 of a row of C tiles.
template <Half type, int n>
__device__ __forceinline__ void as_operand(FragmentA& a, const FragmentC (&c)[n], int k) {
  a[0] = ptx::pack<type>(c[2 * k][0], c[2 * k][1]);
  a[1] = ptx::pack<type>(c[2 * k][2], c[2 * k][3]);
  a[2] = ptx::pack<type>(c[2 * k + 1][0], c[2 * k + 1][1]);
  a[3] = ptx::pack<type>(c[2 * k + 1][2], c[2 * k + 1][3]);
}

// A tile of 16-bit numbers in shared memory, row-major in pieces of 16 bytes, whose places in a row are
// permuted by the row: the 8 rows that ldmatrix reads at once lie in 8 different sets of banks.
template <int rows_, int cols_>
struct SharedTile {
  static constexpr int rows = rows_, cols = cols_, pieces = cols / 8, row_bytes = cols * 2;
  static_assert(cols % 32 == 0);

  alignas(128) unsigned char data[rows * row_bytes];

  // What the row changes in the place of a piece.
  [[nodiscard]] static __device__ constexpr int permutation(int row) {
    return cols % 64 == 0 ? row & 7 : row >> 1 & 3;
  }
  [[nodiscard]] __device__ unsigned char* at(int row, int piece) {
    return data + row * row_bytes + ((piece ^ permutation(row)) << 4);
  }
  // The 4 bytes of columns col and col + 1, col even.
  [[nodiscard]] __device__ unsigned& pair(int row, int col) {
    return *reinterpret_cast<unsigned*>(at(row, col >> 3) + (col & 7) * 2);
  }
};

// What a second width needs: its own, or the first one's where the widths agree.
template <class A>
[[nodiscard]] __device__ constexpr const A& same_if_same(const A& first, const A&) {
  return first;
}
template <class A, class B>
[[nodiscard]] __device__ constexpr const B& same_if_same(const A&, const B& second) {
  return second;
}

// Where a lane reads for ldmatrix, in tiles of `cols` columns: 16 x 16 parts, as four 8 x 8 matrices. They
// arrive in four neighbouring registers, and that is how mma wants its operands: hence two orders. Tiles of a
// width share the offsets.
//   rows_first: (0, 0), (8, 0), (0, 8), (8, 8)
//   cols_first: (0, 0), (0, 8), (8, 0), (8, 8)
enum class Order { rows_first, cols_first };

template <Order order, int cols>
struct Lanes {
  using Tile = SharedTile<16, cols>;
  // Pieces are permuted among groups of this many bytes: one offset for each 16 columns of a group.
  static constexpr int group = cols % 64 == 0 ? 128 : 64;
  unsigned offset[group / 32];

  __device__ Lanes() {
    const int lane = threadIdx.x % 32;
    const int row = order == Order::rows_first ? lane % 16 : (lane & 7) + (lane >> 4) * 8;
    const int piece = order == Order::rows_first ? lane >> 4 : lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < group / 32; ++i)
      offset[i] = ptx::opaque(row * Tile::row_bytes + ((piece ^ Tile::permutation(row)) << 4 ^ i * 32));
  }
  // From here on columns count from col, any multiple of 16.
  __device__ __forceinline__ void shift_cols(int col) {
    const unsigned first = offset[0];
#pragma unroll
    for (int i = 0; i < group / 32; ++i) {
      const int byte = (col + i * 16) * 2;
      offset[i] = (first ^ byte % group) + byte / group * group;  // rows begin at multiples of group
    }
  }
  // row and col are multiples of 16, and constants.
  [[nodiscard]] __device__ __forceinline__ unsigned at(int row, int col) const {
    return offset[col * 2 % group / 32] + row * Tile::row_bytes + col * 2 / group * group;
  }
};

// A tile, or the rows of it from first_row on, as matrices to read. Of B an operand is two neighbouring
// tiles: b[0], b[1] and b[2], b[3].
template <Order order, int cols>
struct Matrices {
  unsigned address;
  Lanes<order, cols> lanes;

  template <int rows>
  __device__ Matrices(const SharedTile<rows, cols>& tile, const Lanes<order, cols>& l, int first_row = 0)
      : address(ptx::shared_address(tile.data) + first_row * SharedTile<rows, cols>::row_bytes), lanes(l) {}

  // The columns from col on, a multiple of step.
  template <int step>
  [[nodiscard]] __device__ __forceinline__ Matrices from_col(int col) const {
    Matrices part = *this;
    if constexpr (step * 2 % Lanes<order, cols>::group == 0) {
      part.address += col * 2;
    } else {
      part.lanes.shift_cols(col);
    }
    return part;
  }

  // A, its rows in the tile's rows.
  __device__ __forceinline__ void read_a(FragmentA& a, int row, int col) const {
    static_assert(order == Order::rows_first);
    ptx::load_matrices(a, address + lanes.at(row, col));
  }
  // A, its rows in the tile's columns.
  __device__ __forceinline__ void read_a_transposed(FragmentA& a, int row, int col) const {
    static_assert(order == Order::cols_first);
    ptx::load_matrices_transposed(a, address + lanes.at(row, col));
  }
  // B, its columns in the tile's rows.
  __device__ __forceinline__ void read_b(FragmentA& b, int row, int col) const {
    static_assert(order == Order::cols_first);
    ptx::load_matrices(b, address + lanes.at(row, col));
  }
  // B, its columns in the tile's columns.
  __device__ __forceinline__ void read_b_transposed(FragmentA& b, int row, int col) const {
    static_assert(order == Order::rows_first);
    ptx::load_matrices_transposed(b, address + lanes.at(row, col));
  }
};

// Where a warp stores A operands of 16 rows, from (row, col) of a tile on. Their number is a power of two,
// and col a multiple of its columns.
struct OperandPlace {
  unsigned first;
  int below;  // 8 rows

  template <int rows, int cols>
  __device__ OperandPlace(SharedTile<rows, cols>& tile, int row, int col)
      : below(8 * SharedTile<rows, cols>::row_bytes) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    first = ptx::opaque(ptx::shared_address(tile.at(row + lane % 16, col / 8 + lane / 16)));
#else
    first = ptx::opaque(ptx::shared_address(tile.at(row + lane / 4, col / 8)) + lane % 4 * 4);
#endif
  }
  // The i-th of them, `behind` bytes further on.
  __device__ __forceinline__ void store(const FragmentA& a, int i, unsigned behind = 0) const {
#if __CUDA_ARCH__ >= 900
    ptx::store_matrices((first ^ i << 5) + behind, a);
#else
    const unsigned left = (first ^ i << 5) + behind, right = (first ^ i << 5 ^ 1 << 4) + behind;
    ptx::store(left, a[0]);
    ptx::store(left + below, a[1]);
    ptx::store(right, a[2]);
    ptx::store(right + below, a[3]);
#endif
  }
};

// c += a b for one step of 16 of the depth.
template <Half type, int m, int n, class ReadB>
__device__ __forceinline__ void multiply_step(FragmentC (&c)[m][n], const FragmentA (&a)[m],
                                              const ReadB& read_b, int b_row, int b_col = 0) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) {
    FragmentA b;
    read_b.read_b_transposed(b, b_row, b_col + j * 16);
#pragma unroll
    for (int i = 0; i < m; ++i) {
      multiply_add<type>(c[i][2 * j], a[i], b[0], b[1]);
      multiply_add<type>(c[i][2 * j + 1], a[i], b[2], b[3]);
    }
  }
}

// s += q k^T for the warp's rows. read_q(q, i, d): 16 of the depth from d on, of the i-th 16 rows.
template <Half type, int depth, int m, int n, class ReadQ, class ReadK>
__device__ __forceinline__ void multiply_q_k(FragmentC (&s)[m][n], const ReadQ& read_q, const ReadK& read_k) {
#pragma unroll
  for (int d = 0; d < depth; d += 16) {
    FragmentA q[m];
#pragma unroll
    for (int i = 0; i < m; ++i) read_q(q[i], i, d);
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      FragmentA k;
      read_k.read_b(k, j * 16, d);
#pragma unroll
      for (int i = 0; i < m; ++i) {
        multiply_add<type>(s[i][2 * j], q[i], k[0], k[1]);
        multiply_add<type>(s[i][2 * j + 1], q[i], k[2], k[3]);
      }
    }
  }
}

// 16 rows of A, `depth` deep, kept in registers.
template <int depth>
struct HeldA {
  FragmentA part[depth / 16];

  template <class Source>
  __device__ __forceinline__ void read(const Source& source, int row = 0) {
#pragma unroll
    for (int d = 0; d < depth; d += 16) source.read_a(part[d / 16], row, d);
  }
  __device__ __forceinline__ void read_a(FragmentA& a, int, int col) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = part[col / 16][i];
  }
};

template <bool first, class A, class B>
[[nodiscard]] __device__ constexpr const auto& choose(const A& a, const B& b) {
  if constexpr (first) {
    return a;
  } else {
    return b;
  }
}

}  // namespace tessera::tile
