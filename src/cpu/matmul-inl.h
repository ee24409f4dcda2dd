// The matrix products of attention on float tiles: one microkernel, rows x vectors of accumulators held in
// registers, its A operand read by broadcast along its rows or its depth (so that P and its transpose are the
// same memory), its B operand read as vectors.
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

// Accumulators fill the registers, 24 of AVX-512's and NEON's 32, 12 of the 16 that AVX2 has, in the shape
// that needs the fewest instructions (NOTES.md).
constexpr int micro_rows = 6;
constexpr int micro_vectors = HWY_CAP_GE512 || HWY_ARCH_ARM ? 4 : 2;
constexpr std::int64_t micro_cols = micro_vectors * lanes;
constexpr std::int64_t panel_bytes = 32768;  // of B, that all rows pass over
// A product of at most this depth is one chain of additions.
constexpr std::int64_t uncut_depth = panel_bytes / (micro_cols * static_cast<std::int64_t>(sizeof(float)));

constexpr std::int64_t row_unit = 1;      // tiles have room for their rows rounded up to this
constexpr std::int64_t col_unit = lanes;  // and for their columns: what is spare there is zero
constexpr std::int64_t depth_unit = 1;    // a product's depth is a multiple of this

// p and ds are stored two vectors at a time: neighbours here.
constexpr std::int64_t pair_distance = lanes;

// Of the polynomial that makes a probability.
constexpr int exp2_degree = 6;

// What holds a thread's state in place for the length of a task.
using Session = NoDenormals;

// Along which of the two A's elements are neighbours: (r, k) at data[r * stride + k], or at data[r + k *
// stride].
enum class Along : std::uint8_t { depth, rows };

struct OperandA {
  const float* data;
  std::int64_t stride;
  Along along;

  [[nodiscard]] const float* at(std::int64_t r, std::int64_t k) const {
    return data + (along == Along::depth ? r * stride + k : r + k * stride);
  }
};

// Column panel p (micro_cols columns) begins at data + p * panel; its row k at + k * row.
struct OperandB {
  const float* data;
  std::int64_t row, panel;
};

template <Into into, Along along, int rows, int vectors>
HWY_NOINLINE void microkernel(const float* HWY_RESTRICT a, std::int64_t a_stride, const float* HWY_RESTRICT b,
                              std::int64_t b_row, float* HWY_RESTRICT c, std::int64_t c_row,
                              std::int64_t depth, const float* HWY_RESTRICT scale) {
  // c is added at the end and called for now: it comes from further away than a and b.
  Vec acc[rows][vectors];
  HWY_UNROLL(8)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < vectors; ++v) {
      acc[r][v] = hn::Zero(FloatTag());
      if (into != Into::overwrite && v * lanes % line<float> == 0) hwy::Prefetch(c + r * c_row + v * lanes);
    }
  }
  const float* row[rows];  // of a: a pointer each, and one offset for all
  HWY_UNROLL(8)
  for (int r = 0; r < rows; ++r) row[r] = a + r * (along == Along::depth ? a_stride : 1);
  std::int64_t offset = 0;
  for (std::int64_t k = 0; k < depth; ++k) {
    Vec bk[vectors];
    HWY_UNROLL(8)
    for (int v = 0; v < vectors; ++v) bk[v] = load(b + v * lanes);
    HWY_UNROLL(8)
    for (int r = 0; r < rows; ++r) {
      const Vec ark = set(row[r][offset]);
      HWY_UNROLL(8)
      for (int v = 0; v < vectors; ++v) acc[r][v] = hn::MulAdd(ark, bk[v], acc[r][v]);
    }
    offset += along == Along::depth ? 1 : a_stride;
    b += b_row;
  }
  HWY_UNROLL(8)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < vectors; ++v) {
      float* to = c + r * c_row + v * lanes;
      if constexpr (into == Into::add) acc[r][v] = hn::Add(acc[r][v], load(to));
      if constexpr (into == Into::scaled_add) acc[r][v] = hn::MulAdd(load(to), set(scale[r]), acc[r][v]);
      store(acc[r][v], to);
    }
  }
}

using Microkernel = void (*)(const float*, std::int64_t, const float*, std::int64_t, float*, std::int64_t,
                             std::int64_t, const float*);

// The microkernels of every size up to the full one, at [(rows - 1) * micro_vectors + vectors - 1].
template <Into into, Along along, std::size_t... i>
constexpr std::array<Microkernel, sizeof...(i)> microkernels_of(std::index_sequence<i...>) {
  return {&microkernel<into, along, static_cast<int>(i) / micro_vectors + 1,
                       static_cast<int>(i) % micro_vectors + 1>...};
}
template <Into into, Along along>
constexpr auto microkernels =
    microkernels_of<into, along>(std::make_index_sequence<micro_rows * micro_vectors>());

// One stretch of the depth.
template <Into into, Along along>
HWY_INLINE void multiply_stretch(std::int64_t rows, std::int64_t cols, std::int64_t depth, OperandA a,
                                 OperandB b, float* c, std::int64_t c_row, const float* scale, Ahead& ahead) {
  for (std::int64_t col = 0; col < cols; col += micro_cols) {
    const float* panel = b.data + col / micro_cols * b.panel;
    const std::int64_t vectors = std::min(cols - col, micro_cols) / lanes;
    for (std::int64_t r = 0; r < rows; r += micro_rows) {
      const std::int64_t count = std::min<std::int64_t>(rows - r, micro_rows);
      const Microkernel kernel =
          microkernels<into, along>[static_cast<std::size_t>((count - 1) * micro_vectors + vectors - 1)];
      kernel(a.at(r, 0), a.stride, panel, b.row, c + r * c_row + col, c_row, depth,
             scale == nullptr ? nullptr : scale + r);
      ahead.fetch();
    }
  }
}

// c (rows x cols) from a (rows x depth) and b (depth x cols); cols is a multiple of lanes. The depth is cut
// so that the panel of B which all rows pass over stays in the first-level cache.
template <Into into>
HWY_INLINE void multiply_tiles(std::int64_t rows, std::int64_t cols, std::int64_t depth, OperandA a,
                               OperandB b, float* c, std::int64_t c_row, Ahead& ahead,
                               const float* scale = nullptr) {
  for (std::int64_t k = 0; k < depth; k += uncut_depth) {
    const std::int64_t some = std::min(depth - k, uncut_depth);
    const OperandA ak{a.at(0, k), a.stride, a.along};
    const OperandB bk{b.data + k * b.row, b.row, b.panel};
    if constexpr (into == Into::add) {  // the one that is used with both
      if (a.along == Along::rows) {
        multiply_stretch<Into::add, Along::rows>(rows, cols, some, ak, bk, c, c_row, nullptr, ahead);
        continue;
      }
    }
    if (k == 0) {
      multiply_stretch<into, Along::depth>(rows, cols, some, ak, bk, c, c_row, scale, ahead);
    } else {
      multiply_stretch<Into::add, Along::depth>(rows, cols, some, ak, bk, c, c_row, nullptr, ahead);
    }
  }
}

// A product in steps: one step here, since there is no second unit to run beside.
constexpr bool overlaps = false;
constexpr std::int64_t product_rows = 1024;  // at most; any number would do

template <Into into>
class Product {
 public:
  Product() = default;
  Product(std::int64_t rows, std::int64_t cols, std::int64_t depth, OperandA a, OperandB b, float* c,
          std::int64_t c_row, const float* scale = nullptr)
      : rows_(rows), cols_(cols), depth_(depth), a_(a), b_(b), c_(c), c_row_(c_row), scale_(scale) {}
  [[nodiscard]] std::int64_t steps() const { return rows_ > 0 ? 1 : 0; }
  HWY_INLINE void step(Ahead& ahead) {
    multiply_tiles<into>(rows_, cols_, depth_, a_, b_, c_, c_row_, ahead, scale_);
    rows_ = 0;
  }

 private:
  std::int64_t rows_ = 0, cols_ = 0, depth_ = 0;
  OperandA a_{};
  OperandB b_{};
  float* c_ = nullptr;
  std::int64_t c_row_ = 0;
  const float* scale_ = nullptr;
};

// --- Operands ----------------------------------------------------------------------------------------------

// Rows s .. s + rows - 1 of one head, row-major at stride `ld`; columns up to ld are zero, and so are the
// rows up to `padded`.
HWY_INLINE void load_rows(const View& view, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t rows,
                          std::int64_t cols, Element* to, std::int64_t ld, std::int64_t padded) {
  with_any_type(view.dtype, [&](auto* type) HWY_ATTR {
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
HWY_INLINE OperandA a_rows(const Element* tile, std::int64_t ld) { return {tile, ld, Along::depth}; }
// A, the transpose of a row-major tile (rows x cols).
HWY_INLINE OperandA a_transposed(const Element* tile, std::int64_t ld, std::int64_t /*rows*/,
                                 std::int64_t /*cols*/, Element* /*scratch*/) {
  return {tile, ld, Along::rows};
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
// Stores two vectors of a row, columns c .. and c + pair_distance .. of those that begin at `to`.
HWY_INLINE void store_pair(Vec x, Vec y, Element* to, std::int64_t c) {
  store(x, to + c);
  store(y, to + c + pair_distance);
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
