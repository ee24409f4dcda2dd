// The matrix products of attention on AMX tiles: bfloat16 operands, float accumulators, 2 x 2 tiles of 16 x
// 16 at a time. The vocabulary is that of matmul-inl.h.
//
// A tile of A is 16 rows by 32 of the depth. A tile of B holds 32 of the depth by 16 columns, two of the
// depth side by side in each 32-bit cell, and is stored whole, 1 KiB. Which two is ours to choose, as long as
// A and B agree: neighbours in q kᵀ, whose A are rows as they lie in the tensor; elsewhere j and j + 16,
// since two vectors of floats become such cells by a shift and a mask, and neighbours only by slow shuffles.
#pragma once

#include "cpu/amx.h"
#include "cpu/simd-inl.h"
#include "cpu/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

using Element = bfloat16;
using Rows = RowsOf<Element>;

constexpr std::int64_t tile_rows = 16, tile_cols = 16, tile_depth = 32;
constexpr std::int64_t tile_elements = tile_cols * tile_depth;  // of B

constexpr std::int64_t row_unit = tile_rows;
constexpr std::int64_t col_unit = 2 * tile_cols;
constexpr std::int64_t depth_unit = tile_depth;
constexpr std::int64_t uncut_depth = 1 << 20;  // a product is one chain of additions, however deep

// Which two of the depth are side by side in a cell, but for q kᵀ.
constexpr std::int64_t pair_distance = tile_depth / 2;

// A probability is rounded to 8 bits.
constexpr int exp2_degree = 4;

struct Session {
  NoDenormals no_denormals;
  tile::Configured tiles;
};

struct OperandA {
  const Element* data;
  std::int64_t row;
};

// Column tile t begins at data + t * col; its tiles follow one another down the depth.
struct OperandB {
  const Element* data;
  std::int64_t col;
};

// The accumulators of a block of c: one or two row tiles, two column tiles.
template <int row_tiles>
struct Block {
  static HWY_INLINE void zero() {
    tile::zero<0>();
    tile::zero<1>();
    if constexpr (row_tiles == 2) {
      tile::zero<2>();
      tile::zero<3>();
    }
  }
  static HWY_INLINE void load(const float* c, std::int64_t c_row) {
    const std::int64_t stride = c_row * static_cast<std::int64_t>(sizeof(float));
    tile::load<0>(c, stride);
    tile::load<1>(c + tile_cols, stride);
    if constexpr (row_tiles == 2) {
      tile::load<2>(c + tile_rows * c_row, stride);
      tile::load<3>(c + tile_rows * c_row + tile_cols, stride);
    }
  }
  static HWY_INLINE void store(float* c, std::int64_t c_row) {
    const std::int64_t stride = c_row * static_cast<std::int64_t>(sizeof(float));
    tile::store<0>(c, stride);
    tile::store<1>(c + tile_cols, stride);
    if constexpr (row_tiles == 2) {
      tile::store<2>(c + tile_rows * c_row, stride);
      tile::store<3>(c + tile_rows * c_row + tile_cols, stride);
    }
  }
  static HWY_INLINE void multiply_add(std::int64_t depth, const Element* a, std::int64_t a_row,
                                      const Element* b, std::int64_t b_col) {
    const std::int64_t stride = a_row * static_cast<std::int64_t>(sizeof(Element));
    for (std::int64_t k = 0; k < depth; k += tile_depth, a += tile_depth, b += tile_elements) {
      tile::load<6>(b, 64);
      tile::load<4>(a, stride);
      tile::multiply_add<0, 4, 6>();
      tile::load<7>(b + b_col, 64);
      tile::multiply_add<1, 4, 7>();
      if constexpr (row_tiles == 2) {
        tile::load<5>(a + tile_rows * a_row, stride);
        tile::multiply_add<2, 5, 6>();
        tile::multiply_add<3, 5, 7>();
      }
    }
  }
};

template <bool overwrite, int row_tiles>
HWY_INLINE void multiply_block(std::int64_t depth, const Element* a, std::int64_t a_row, const Element* b,
                               std::int64_t b_col, float* c, std::int64_t c_row) {
  if constexpr (overwrite) {
    Block<row_tiles>::zero();
  } else {
    Block<row_tiles>::load(c, c_row);
  }
  Block<row_tiles>::multiply_add(depth, a, a_row, b, b_col);
  Block<row_tiles>::store(c, c_row);
}

// The last rows, fewer than a tile: c has room for no more, so the tile is a copy.
template <bool overwrite>
HWY_NOINLINE void multiply_last_rows(std::int64_t rows, std::int64_t depth, const Element* a,
                                     std::int64_t a_row, const Element* b, std::int64_t b_col, float* c,
                                     std::int64_t c_row) {
  alignas(64) float copy[tile_rows * col_unit] = {};
  if constexpr (!overwrite) {
    for (std::int64_t r = 0; r < rows; ++r)
      std::memcpy(copy + r * col_unit, c + r * c_row, col_unit * sizeof(float));
  }
  multiply_block<overwrite, 1>(depth, a, a_row, b, b_col, copy, col_unit);
  for (std::int64_t r = 0; r < rows; ++r)
    std::memcpy(c + r * c_row, copy + r * col_unit, col_unit * sizeof(float));
}

// c (rows x cols) from a (rows x depth) and b (depth x cols). a has room for whole tiles; what is in its
// spare rows does not matter. cols and depth are multiples of their units.
template <Into into>
HWY_INLINE void multiply_tiles(std::int64_t rows, std::int64_t cols, std::int64_t depth, OperandA a,
                               OperandB b, float* c, std::int64_t c_row, Ahead& ahead) {
  static_assert(into != Into::scaled_add, "Product does that");
  constexpr bool overwrite = into == Into::overwrite;
  for (std::int64_t col = 0; col < cols; col += col_unit) {
    const Element* bc = b.data + col / tile_cols * b.col;
    std::int64_t r = 0;
    for (; r + 2 * tile_rows <= rows; r += 2 * tile_rows) {
      ahead.fetch();
      multiply_block<overwrite, 2>(depth, a.data + r * a.row, a.row, bc, b.col, c + r * c_row + col, c_row);
    }
    if (r + tile_rows <= rows) {
      multiply_block<overwrite, 1>(depth, a.data + r * a.row, a.row, bc, b.col, c + r * c_row + col, c_row);
      r += tile_rows;
    }
    if (r < rows) {
      multiply_last_rows<overwrite>(rows - r, depth, a.data + r * a.row, a.row, bc, b.col,
                                    c + r * c_row + col, c_row);
    }
  }
}

// The product of one row tile of softmax, a step at a time: what is done between two steps is done beside the
// tile unit, and must leave the tiles alone. c has room for whole tiles.
constexpr bool overlaps = true;
constexpr std::int64_t product_rows = 2 * tile_rows;  // at most

template <Into into>
class Product {
 public:
  Product() = default;
  Product(std::int64_t rows, std::int64_t cols, std::int64_t depth, OperandA a, OperandB b, float* c,
          std::int64_t c_row, const float* scale = nullptr)
      : a_(a), b_(b), c_(c), c_row_(c_row), rows_(rows), depth_(depth) {
    steps_ = cols / col_unit * ((depth + step_depth - 1) / step_depth);
    if constexpr (into == Into::scaled_add) {
      for (std::int64_t r = 0; r < rows; ++r) {
        if (scale[r] == 1.0f) continue;
        for (std::int64_t i = 0; i < cols; i += lanes)
          store(hn::Mul(load(c + r * c_row + i), set(scale[r])), c + r * c_row + i);
      }
    }
  }
  [[nodiscard]] std::int64_t steps() const { return steps_; }  // that are left
  HWY_INLINE void step(Ahead& ahead) {
    ahead.fetch();
    if (rows_ > tile_rows) {
      step_block<Block<2>>();
    } else {
      step_block<Block<1>>();
    }
  }

 private:
  static constexpr std::int64_t step_depth = 4 * tile_depth;

  OperandA a_{};
  OperandB b_{};
  float* c_ = nullptr;
  std::int64_t c_row_ = 0, rows_ = 0, depth_ = 0, k_ = 0, steps_ = 0;

  template <class Accumulators>
  HWY_INLINE void step_block() {
    if (k_ == 0) {
      if constexpr (into == Into::overwrite) {
        Accumulators::zero();
      } else {
        Accumulators::load(c_, c_row_);
      }
    }
    Accumulators::multiply_add(std::min(step_depth, depth_ - k_), a_.data + k_, a_.row,
                               b_.data + k_ * tile_cols, b_.col);
    --steps_;
    k_ += step_depth;
    if (k_ < depth_) return;
    Accumulators::store(c_, c_row_);
    k_ = 0;
    c_ += col_unit;
    b_.data += 2 * b_.col;
  }
};

// --- Operands ----------------------------------------------------------------------------------------------

// n elements. Those of an 8-bit cache, as they are loaded, are all bfloat16 numbers.
HWY_INLINE void copy_row(const Element* from, std::int64_t n, Element* to) {
  std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(Element));
}
template <class T>
HWY_INLINE void copy_row(const T* from, std::int64_t n, Element* to) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store_from_float(load_as_float(from + i), to + i);
  for (; i < n; ++i) to[i] = from_float<Element>(as_loaded(from[i]));
}

HWY_INLINE void load_rows(const View& view, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t rows,
                          std::int64_t cols, Element* to, std::int64_t ld, std::int64_t padded) {
  with_any_type(view.dtype, [&](auto* type) HWY_ATTR {
    const auto* from = static_cast<decltype(type)>(view.data) + view.offset(b, s, h);
    for (std::int64_t r = 0; r < rows; ++r) {
      copy_row(from + r * view.seq, cols, to + r * ld);
      if (ld > cols) zero_row(to + r * ld + cols, ld - cols);
    }
  });
  if (padded > rows) zero_row(to + rows * ld, (padded - rows) * ld);
}

// B's tiles are copies in any case: rows need no copy of their own where nothing is to be padded.
HWY_INLINE Rows rows_to_transpose(const View& view, std::int64_t b, std::int64_t s, std::int64_t h,
                                  std::int64_t rows, std::int64_t cols, Element* to, std::int64_t ld,
                                  std::int64_t padded) {
  const Element* from = static_cast<const Element*>(view.data) + view.offset(b, s, h);
  // An odd stride would cut the 32-bit cells of a transpose in two.
  if (view.dtype == DType::bfloat16 && rows == padded && cols % tile_depth == 0 && view.seq % 2 == 0)
    return {from, view.seq};
  load_rows(view, b, s, h, rows, cols, to, ld, padded);
  return {to, ld};
}
HWY_INLINE Rows rows_for_b(const View& view, std::int64_t b, std::int64_t s, std::int64_t h,
                           std::int64_t rows, std::int64_t cols, Element* to, std::int64_t ld,
                           std::int64_t padded) {
  return rows_to_transpose(view, b, s, h, rows, cols, to, ld, padded);
}

// 16 x 16 cells of 32 bits, transposed; strides in cells.
HWY_INLINE void transpose_tile(const void* from, std::int64_t from_row, void* to, std::int64_t to_row) {
  for (std::int64_t r = 0; r < 16; r += lanes) {
    for (std::int64_t c = 0; c < 16; c += lanes) {
      transpose_cells(static_cast<const std::uint32_t*>(from) + r * from_row + c, from_row,
                      static_cast<std::uint32_t*>(to) + c * to_row + r, to_row);
    }
  }
}

// Two rows side by side: cell c is (upper[c], lower[c]). 16 cells.
HWY_INLINE void zip_rows(const Element* upper, const Element* lower, void* to) {
  const UintTag u;
  for (std::int64_t c = 0; c < tile_cols; c += lanes) {
    const auto low = hn::PromoteTo(u, hn::LoadU(HalfBitsTag(), &upper[c].bits));
    const auto high = hn::ShiftLeft<16>(hn::PromoteTo(u, hn::LoadU(HalfBitsTag(), &lower[c].bits)));
    hn::StoreU(hn::Or(low, high), u, static_cast<std::uint32_t*>(to) + c);
  }
}

// Two rows of cells, 16 each: their low halves side by side, and their high halves.
HWY_INLINE void zip_cells(const Element* upper, const Element* lower, std::uint32_t* low,
                          std::uint32_t* high) {
  const UintTag u;
  const auto high_half = hn::Set(u, 0xFFFF0000u);
  for (std::int64_t c = 0; c < tile_cols; c += lanes) {
    const auto x = hn::LoadU(u, reinterpret_cast<const std::uint32_t*>(upper) + c);
    const auto y = hn::LoadU(u, reinterpret_cast<const std::uint32_t*>(lower) + c);
    hn::StoreU(hn::OrAnd(hn::ShiftLeft<16>(y), x, hn::Set(u, 0xFFFFu)), u, low + c);
    hn::StoreU(hn::OrAnd(hn::ShiftRight<16>(x), y, high_half), u, high + c);
  }
}

HWY_INLINE OperandA a_rows(const Element* tile, std::int64_t ld) { return {tile, ld}; }

// Of p or ds: its columns lie in pairs (store_pair).
HWY_INLINE OperandA a_transposed(const Element* tile, std::int64_t ld, std::int64_t rows, std::int64_t cols,
                                 Element* scratch) {
  for (std::int64_t r = 0; r < rows; r += tile_depth) {
    for (std::int64_t c = 0; c < cols; c += 2 * pair_distance) {
      alignas(64) std::uint32_t low[16 * 16], high[16 * 16];
      for (std::int64_t j = 0; j < pair_distance; ++j) {
        const Element* upper = tile + (r + j) * ld + c;
        zip_cells(upper, upper + pair_distance * ld, low + 16 * j, high + 16 * j);
      }
      transpose_tile(low, 16, scratch + c * rows + r, rows / 2);
      transpose_tile(high, 16, scratch + (c + pair_distance) * rows + r, rows / 2);
    }
  }
  return {scratch, rows};
}
constexpr std::int64_t a_transposed_size(std::int64_t rows, std::int64_t cols) { return rows * cols; }

HWY_INLINE OperandB b_rows(const Element* tile, std::int64_t ld, std::int64_t depth, std::int64_t cols,
                           Element* scratch) {
  Element* to = scratch;
  for (std::int64_t c = 0; c < cols; c += tile_cols) {
    for (std::int64_t k = 0; k < depth; k += tile_depth) {
      for (std::int64_t j = 0; j < pair_distance; ++j, to += 2 * tile_cols)
        zip_rows(tile + (k + j) * ld + c, tile + (k + j + pair_distance) * ld + c, to);
    }
  }
  return {scratch, depth * tile_cols};
}
constexpr std::int64_t b_rows_size(std::int64_t depth, std::int64_t cols) { return depth * cols; }

HWY_INLINE OperandB b_transposed(const Element* tile, std::int64_t ld, std::int64_t depth, std::int64_t cols,
                                 Element* scratch) {
  Element* to = scratch;
  for (std::int64_t c = 0; c < cols; c += tile_cols) {
    for (std::int64_t k = 0; k < depth; k += tile_depth, to += tile_elements) {
      transpose_tile(tile + c * ld + k, ld / 2, to, 16);
    }
  }
  return {scratch, depth * tile_cols};
}
constexpr std::int64_t b_transposed_size(std::int64_t depth, std::int64_t cols) { return depth * cols; }

HWY_INLINE OperandB b_below(OperandB b, std::int64_t depth) { return {b.data + depth * tile_cols, b.col}; }
HWY_INLINE OperandB b_right(OperandB b, std::int64_t cols) {
  return {b.data + cols / tile_cols * b.col, b.col};
}

// Half as large as the floats, so that a row ends in its first half.
HWY_INLINE Element* elements_in(float* tile) { return reinterpret_cast<Element*>(tile); }
constexpr std::int64_t element_stride(std::int64_t tile_ld) { return 2 * tile_ld; }
// Two vectors of a row, columns c .. and c + pair_distance .., as cells. Rounded to nearest, ties away from
// 0. A NaN stays one if its lower half is not all ones: see canonical().
HWY_INLINE hn::Vec<UintTag> pair_cells(Vec x, Vec y) {
  const UintTag u;
  const auto half = hn::Set(u, 0x8000u);
  const auto low = hn::ShiftRight<16>(hn::Add(hn::BitCast(u, x), half));
  const auto high = hn::Add(hn::BitCast(u, y), half);
  return hn::OrAnd(low, high, hn::Set(u, 0xFFFF0000u));
}
// Stores them to - with the others of the pair - the cells of 2 * pair_distance columns that begin at `to`.
HWY_INLINE void store_pair(Vec x, Vec y, Element* to, std::int64_t c) {
  hn::StoreU(pair_cells(x, y), UintTag(), reinterpret_cast<std::uint32_t*>(to) + c);
}
// The same columns as floats, for what AMX has no part in.
HWY_INLINE void store_pair(Vec x, Vec y, float* to, std::int64_t c) {
  store(x, to + c);
  store(y, to + c + pair_distance);
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
