// The matrix products of attention on float tiles: one microkernel, rows x vectors of accumulators held in
// registers, its A operand read by broadcast at any strides (so that P and its transpose are the same
// memory), its B operand read as vectors.
//
// This file and amx-inl.h define the same vocabulary (engine-inl.h), one of them is compiled into an object.
#pragma once

#include <array>
#include <utility>

#include "cpu/simd-inl.h"
#include "cpu/tasks.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

using Element = float;  // of the operands
using Rows = RowsOf<Element>;

// Accumulators fill the registers, and the panel of B that all rows pass over stays small: 12 x 2 of
// AVX-512's 32 registers, 6 x 2 of the 16 that AVX2 has, 6 x 4 of NEON's 32.
constexpr int micro_rows = HWY_CAP_GE512 ? 12 : 6;
constexpr int micro_vectors = HWY_ARCH_ARM ? 4 : 2;
constexpr std::int64_t micro_cols = micro_vectors * lanes;

constexpr std::int64_t row_unit = 1;      // tiles have room for their rows rounded up to this
constexpr std::int64_t col_unit = lanes;  // and for their columns: what is spare there is zero
constexpr std::int64_t depth_unit = 1;    // a product's depth is a multiple of this

// Of the polynomial that makes a probability.
constexpr int exp2_degree = 6;

// What holds a thread's state in place for the length of a task; nothing here.
struct Session {};

// Element (r, k) at data[r * row + k * depth].
struct OperandA {
  const float* data;
  std::int64_t row, depth;
};

// Column panel p (micro_cols columns) begins at data + p * panel; its row k at + k * row.
struct OperandB {
  const float* data;
  std::int64_t row, panel;
};

template <Into into, int rows, int vectors>
HWY_NOINLINE void microkernel(const float* HWY_RESTRICT a, std::int64_t a_row, std::int64_t a_depth,
                              const float* HWY_RESTRICT b, std::int64_t b_row, float* HWY_RESTRICT c,
                              std::int64_t c_row, std::int64_t depth, const float* HWY_RESTRICT scale) {
  Vec acc[rows][vectors];
  HWY_UNROLL(16)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < vectors; ++v) {
      if constexpr (into == Into::overwrite) {
        acc[r][v] = hn::Zero(FloatTag());
      } else if constexpr (into == Into::add) {
        acc[r][v] = load(c + r * c_row + v * lanes);
      } else {
        acc[r][v] = hn::Mul(load(c + r * c_row + v * lanes), set(scale[r]));
      }
    }
  }
  // Four rows to a pointer: what their addresses differ by then fits into the instructions.
  constexpr int groups = (rows + 3) / 4;
  const float* group[groups];
  HWY_UNROLL(16)
  for (int g = 0; g < groups; ++g) group[g] = a + 4 * g * a_row;
  for (std::int64_t k = 0; k < depth; ++k) {
    Vec bk[vectors];
    HWY_UNROLL(8)
    for (int v = 0; v < vectors; ++v) bk[v] = load(b + v * lanes);
    HWY_UNROLL(16)
    for (int r = 0; r < rows; ++r) {
      const Vec ark = set(group[r / 4][r % 4 * a_row]);
      HWY_UNROLL(8)
      for (int v = 0; v < vectors; ++v) acc[r][v] = hn::MulAdd(ark, bk[v], acc[r][v]);
    }
    HWY_UNROLL(16)
    for (int g = 0; g < groups; ++g) group[g] += a_depth;
    b += b_row;
  }
  HWY_UNROLL(16)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < vectors; ++v) store(acc[r][v], c + r * c_row + v * lanes);
  }
}

using Microkernel = void (*)(const float*, std::int64_t, std::int64_t, const float*, std::int64_t, float*,
                             std::int64_t, std::int64_t, const float*);

// The microkernels of every size up to the full one, at [(rows - 1) * micro_vectors + vectors - 1].
template <Into into, std::size_t... i>
constexpr std::array<Microkernel, sizeof...(i)> microkernels_of(std::index_sequence<i...>) {
  return {&microkernel<into, static_cast<int>(i) / micro_vectors + 1,
                       static_cast<int>(i) % micro_vectors + 1>...};
}
template <Into into>
constexpr auto microkernels = microkernels_of<into>(std::make_index_sequence<micro_rows * micro_vectors>());

// One stretch of the depth.
template <Into into>
HWY_INLINE void multiply_stretch(std::int64_t rows, std::int64_t cols, std::int64_t depth, OperandA a,
                                 OperandB b, float* c, std::int64_t c_row, const float* scale) {
  for (std::int64_t col = 0; col < cols; col += micro_cols) {
    const float* panel = b.data + col / micro_cols * b.panel;
    const std::int64_t vectors = std::min(cols - col, micro_cols) / lanes;
    for (std::int64_t r = 0; r < rows; r += micro_rows) {
      const std::int64_t count = std::min<std::int64_t>(rows - r, micro_rows);
      const Microkernel kernel =
          microkernels<into>[static_cast<std::size_t>((count - 1) * micro_vectors + vectors - 1)];
      kernel(a.data + r * a.row, a.row, a.depth, panel, b.row, c + r * c_row + col, c_row, depth,
             scale == nullptr ? nullptr : scale + r);
    }
  }
}

// c (rows x cols) from a (rows x depth) and b (depth x cols); cols is a multiple of lanes. The depth is cut
// so that the panel of B which all rows pass over stays in the first-level cache.
template <Into into>
HWY_INLINE void multiply_tiles(std::int64_t rows, std::int64_t cols, std::int64_t depth, OperandA a,
                               OperandB b, float* c, std::int64_t c_row, const float* scale = nullptr) {
  constexpr std::int64_t stretch = 16384 / (micro_cols * static_cast<std::int64_t>(sizeof(float)));
  multiply_stretch<into>(rows, cols, std::min(depth, stretch), a, b, c, c_row, scale);
  for (std::int64_t k = stretch; k < depth; k += stretch) {
    multiply_stretch<Into::add>(rows, cols, std::min(depth - k, stretch),
                                {a.data + k * a.depth, a.row, a.depth}, {b.data + k * b.row, b.row, b.panel},
                                c, c_row, nullptr);
  }
}

// --- Operands ----------------------------------------------------------------------------------------------

// Rows s .. s + rows - 1 of one head, row-major at stride `ld`; columns up to ld are zero, and so are the
// rows up to `padded`.
HWY_INLINE void load_rows(const View& view, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t rows,
                          std::int64_t cols, Element* to, std::int64_t ld, std::int64_t padded) {
  with_type(view.dtype, [&](auto* type) HWY_ATTR {
    const auto* from = static_cast<decltype(type)>(view.data) + view.offset(b, s, h);
    for (std::int64_t r = 0; r < rows; ++r) row_to_float(from + r * view.seq, cols, to + r * ld, ld);
  });
  if (padded > rows) zero_row(to + rows * ld, (padded - rows) * ld);
}

// Rows that will be packed into another form: they need no copy of their own where the tensor has what
// load_rows would make.
HWY_INLINE Rows rows_to_transpose(const View& view, std::int64_t b, std::int64_t s, std::int64_t h,
                                  std::int64_t rows, std::int64_t cols, Element* to, std::int64_t ld,
                                  std::int64_t padded) {
  if (view.dtype == DType::float32 && rows == padded && cols % lanes == 0) {
    return {static_cast<const Element*>(view.data) + view.offset(b, s, h), view.seq};
  }
  load_rows(view, b, s, h, rows, cols, to, ld, padded);
  return {to, ld};
}
// B reads its rows many times, and wants them close together: always a copy.
HWY_INLINE Rows rows_for_b(const View& view, std::int64_t b, std::int64_t s, std::int64_t h,
                           std::int64_t rows, std::int64_t cols, Element* to, std::int64_t ld,
                           std::int64_t padded) {
  load_rows(view, b, s, h, rows, cols, to, ld, padded);
  return {to, ld};
}

// A, as it lies in a row-major tile.
HWY_INLINE OperandA a_rows(const Element* tile, std::int64_t ld) { return {tile, ld, 1}; }
// A, the transpose of a row-major tile (rows x cols).
HWY_INLINE OperandA a_transposed(const Element* tile, std::int64_t ld, std::int64_t /*rows*/,
                                 std::int64_t /*cols*/, Element* /*scratch*/) {
  return {tile, 1, ld};
}
constexpr std::int64_t a_transposed_size(std::int64_t /*rows*/, std::int64_t /*cols*/) { return 0; }

// B, as it lies in a row-major tile (depth x cols).
HWY_INLINE OperandB b_rows(const Element* tile, std::int64_t ld, std::int64_t /*depth*/,
                           std::int64_t /*cols*/, Element* /*scratch*/) {
  return {tile, ld, micro_cols};
}
constexpr std::int64_t b_rows_size(std::int64_t /*depth*/, std::int64_t /*cols*/) { return 0; }
// `depth` rows further down.
HWY_INLINE OperandB b_below(OperandB b, std::int64_t depth) {
  return {b.data + depth * b.row, b.row, b.panel};
}
// `cols` columns further right, a multiple of col_align.
HWY_INLINE OperandB b_right(OperandB b, std::int64_t cols) {
  return {b.data + cols / micro_cols * b.panel, b.row, b.panel};
}

// B, the transpose of a row-major tile (cols x depth, both padded to lanes): panels of micro_cols columns,
// written to scratch.
HWY_INLINE OperandB b_transposed(const Element* tile, std::int64_t ld, std::int64_t depth, std::int64_t cols,
                                 Element* scratch) {
  const std::int64_t panel = round_up(depth, lanes) * micro_cols;
  for (std::int64_t c = 0; c < cols; c += lanes) {
    float* to = scratch + c / micro_cols * panel + c % micro_cols;
    for (std::int64_t k = 0; k < depth; k += lanes) {
      transpose_cells(reinterpret_cast<const std::uint32_t*>(tile + c * ld + k), ld,
                      reinterpret_cast<std::uint32_t*>(to + k * micro_cols), micro_cols);
    }
  }
  return {scratch, micro_cols, panel};
}
constexpr std::int64_t b_transposed_size(std::int64_t depth, std::int64_t cols) {
  return round_up(depth, lanes) * round_up(cols, micro_cols);
}

// The elements made from a row of floats take their place, one by one in ascending order: here with the same
// row stride.
HWY_INLINE Element* elements_in(float* tile) { return tile; }
constexpr std::int64_t element_stride(std::int64_t tile_ld) { return tile_ld; }
// Stores one vector of a tile's elements.
HWY_INLINE void store_element(Vec x, Element* to) { store(x, to); }

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
