// Tiles in shared memory as TMA writes and wgmma reads them: panels of 64 columns (32 where the columns are
// no multiple of 64) side by side, each row of a panel one span of 128 (64) bytes whose pieces of 16 are
// permuted by the row.
#pragma once

#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace tessera::tile {

[[nodiscard]] constexpr int panel_width(int cols) { return cols % 64 == 0 ? 64 : 32; }

template <int rows_, int cols_>
struct PanelTile {
  static constexpr int rows = rows_, cols = cols_, width = panel_width(cols), panels = cols / width;
  static constexpr int row_bytes = width * 2, panel_bytes = rows * row_bytes, bytes = panels * panel_bytes;
  static_assert(rows % 8 == 0 && cols % 32 == 0);

  alignas(1024) unsigned char data[bytes];

  [[nodiscard]] static __device__ constexpr int permutation(int row) {
    return width == 64 ? row & 7 : row >> 1 & 3;
  }
  [[nodiscard]] static __device__ __forceinline__ int offset(int row, int piece) {
    constexpr int pieces = width / 8;
    return piece / pieces * panel_bytes + row * row_bytes + ((piece % pieces ^ permutation(row)) << 4);
  }
  [[nodiscard]] __device__ unsigned char* at(int row, int piece) { return data + offset(row, piece); }
  // From the address of a row's piece 0 or 1 that of the one an even number of pieces further on.
  [[nodiscard]] static __device__ constexpr unsigned further(unsigned address, int pieces_on) {
    constexpr int pieces = width / 8;
    return (address ^ pieces_on % pieces << 4) + pieces_on / pieces * panel_bytes;
  }
  // The 4 bytes of columns col and col + 1, col even.
  [[nodiscard]] __device__ unsigned& pair(int row, int col) {
    return *reinterpret_cast<unsigned*>(at(row, col >> 3) + (col & 7) * 2);
  }
};

// How wgmma reads a tile. Addresses and strides are in units of 16 bytes; 8 rows of a panel are one unit of
// the permutation.
template <class Tile>
struct PanelOperand {
  static constexpr unsigned eight_rows = 8 * Tile::row_bytes >> 4, next_panel = Tile::panel_bytes >> 4;
  static constexpr ptx::MatrixDescriptor layout = Tile::width == 64 ? 1 : 2;  // of 128 or 64 bytes
  static_assert(next_panel < 1 << 14);

  ptx::MatrixDescriptor first;

  // leading: the step to the next panel for an operand that lies across the rows; of no meaning for one that
  // lies along them.
  __device__ explicit PanelOperand(const Tile& tile)
      : first((ptx::shared_address(tile.data) >> 4 & 0x3FFF) |
              static_cast<ptx::MatrixDescriptor>(next_panel) << 16 |
              static_cast<ptx::MatrixDescriptor>(eight_rows) << 32 | layout << 62) {}

  // The part from a row on, a multiple of 8, and a column on, a multiple of a panel's.
  [[nodiscard]] __device__ __forceinline__ PanelOperand part(int row, int col) const {
    PanelOperand operand = *this;
    operand.first += (row * Tile::row_bytes >> 4) + col / Tile::width * next_panel;
    return operand;
  }
  // 16 columns from col on, a multiple of 16: depth along the rows. `number` tiles of the kind further on.
  [[nodiscard]] __device__ __forceinline__ ptx::MatrixDescriptor cols_from(int col, int number = 0) const {
    return along(first, col, number);
  }
  // 16 rows from row on, a multiple of 16: depth across the rows.
  [[nodiscard]] __device__ __forceinline__ ptx::MatrixDescriptor rows_from(int row, int number = 0) const {
    return across(first, row, number);
  }

  // From a descriptor, or its lower half.
  template <class Word>
  [[nodiscard]] static __device__ __forceinline__ Word along(Word from, int col, int number) {
    return from + number * (Tile::bytes >> 4) + col / Tile::width * next_panel + (col % Tile::width * 2 >> 4);
  }
  template <class Word>
  [[nodiscard]] static __device__ __forceinline__ Word across(Word from, int row, int number) {
    return from + number * (Tile::bytes >> 4) + (row * Tile::row_bytes >> 4);
  }
};

// The same, its descriptors' halves in registers. The upper one the compiler would write again for every
// product, if it knew that zero is 0.
template <class Tile>
struct KeptOperand {
  using Operand = PanelOperand<Tile>;
  unsigned low, high;

  __device__ KeptOperand(const Tile& tile, unsigned zero)
      : low(ptx::kept(static_cast<unsigned>(Operand(tile).first))),
        high(Operand::eight_rows | static_cast<unsigned>(Operand::layout << 30) | zero) {}
  [[nodiscard]] __device__ __forceinline__ ptx::MatrixDescriptor cols_from(int col, int number = 0) const {
    return descriptor(Operand::along(low, col, number));
  }
  [[nodiscard]] __device__ __forceinline__ ptx::MatrixDescriptor rows_from(int row, int number = 0) const {
    return descriptor(Operand::across(low, row, number));
  }

 private:
  [[nodiscard]] __device__ __forceinline__ ptx::MatrixDescriptor descriptor(unsigned place) const {
    return static_cast<ptx::MatrixDescriptor>(high) << 32 | place;
  }
};

}  // namespace tessera::tile
