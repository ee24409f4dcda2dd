// The rows of one key head that stream (few-inl.h), on AMX tiles: rows of keys are an operand as they lie in
// the cache, rows of values are interleaved two and two.
//
//   sᵀ (16 keys x rows) = k qᵀ      q is packed once a task, and s transposed as it is stored
//   o (rows x columns) += p v       tiles of o and p have as many rows as there are: neither has more
//
// Keys that are not there, up to a whole tile, are zeros: nothing behind the last key is read.
#pragma once

#include "cpu/few-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

struct TileProducts {
  using P = Element;
  using State = tile::Configured;
  static constexpr std::int64_t fewest_rows = 8;  // packing costs more than it brings with fewer

  static std::int64_t q_rows(std::int64_t rows) { return std::max(rows, tile_rows / 2); }  // in floats
  static std::int64_t passes_of_scores(std::int64_t /*rows*/) { return 1; }
  static std::int64_t passes_of_values(std::int64_t /*rows*/) { return 1; }

  static HWY_INLINE void load_queries(const TaskRows& task, const Few& few) {
    const std::int64_t depth = round_up(task.problem.head_dim, tile_depth);
    alignas(64) Element rows[tile_rows * max_head_dim] = {};
    alignas(64) float row[max_head_dim];
    for (std::int64_t r = 0; r < few.rows; ++r) {
      load_query(task, r, row, depth);
      for (std::int64_t i = 0; i < depth; i += lanes) store_rounded(load(row + i), rows + r * depth + i);
    }
    b_transposed(rows, depth, depth, tile_cols, reinterpret_cast<Element*>(few.q));
  }

  static HWY_NOINLINE void scores(const Few& few, const void* const* k_rows, std::int64_t offset,
                                  std::int64_t keys, std::int64_t dim, Next& next) {
    const auto* q = reinterpret_cast<const Element*>(few.q);
    const std::int64_t depth = round_up(dim, tile_depth);
    alignas(64) Element copy[tile_rows * max_head_dim];
    alignas(64) float s[tile_rows * tile_cols];
    for (std::int64_t j = 0; j < keys; j += tile_rows) {
      const Element* k = copy;
      std::int64_t stride = depth * static_cast<std::int64_t>(sizeof(Element));
      if (keys - j >= tile_rows && dim == depth && at_even_distance(k_rows + j)) {
        k = static_cast<const Element*>(k_rows[j]) + offset;
        stride = distance(k_rows + j);
      } else {
        copy_rows(k_rows + j, offset, std::min(tile_rows, keys - j), dim, copy, depth);
      }
      tile::zero<5>();
      for (std::int64_t d = 0; d < depth; d += tile_depth) {
        next.fetch(static_cast<int>(tile_rows / 2));  // a line for each that is loaded
        tile::load<6>(k + d, stride);
        next.fetch(static_cast<int>(tile_rows / 2));
        tile::load<7>(q + d * tile_cols, 64);
        tile::multiply_add<5, 6, 7>();
      }
      tile::store<5>(s, 64);
      // Rows that are not there fall to the next heads, whose scores come later.
      transpose_tile(s, tile_cols, few.s + j, few.s_ld);
    }
  }

  static HWY_INLINE void after_softmax(const Few& /*few*/, std::int64_t /*keys*/) {}
  static HWY_INLINE void values(const Few& few, const void* const* v_rows, std::int64_t offset,
                                std::int64_t keys, std::int64_t dim, Next& next) {
    std::int64_t c = 0;
    for (; dim - c > 2 * tile_cols; c += 4 * tile_cols) columns<4>(few, v_rows, offset, keys, c, dim, next);
    if (c < dim) columns<2>(few, v_rows, offset, keys, c, dim, next);
  }
  static HWY_INLINE void after_values(float* row, std::int64_t dim) { unzip_row(row, dim); }

 private:
  static constexpr std::int64_t most_keys = 64;  // of a block

  static HWY_INLINE std::int64_t distance(const void* const* rows) {
    return static_cast<const std::byte*>(rows[1]) - static_cast<const std::byte*>(rows[0]);
  }
  static HWY_INLINE bool at_even_distance(const void* const* rows) {
    const auto* first = static_cast<const std::byte*>(rows[0]);
    const std::int64_t each = distance(rows);
    bool even = true;
    for (std::int64_t i = 0; i < tile_rows; ++i) even &= rows[i] == first + i * each;
    return even;
  }
  static HWY_INLINE void copy_rows(const void* const* rows, std::int64_t offset, std::int64_t count,
                                   std::int64_t dim, Element* to, std::int64_t ld) {
    for (std::int64_t r = 0; r < tile_rows; ++r, to += ld) {
      const std::int64_t there = r < count ? dim : 0;
      if (there > 0) copy_row(static_cast<const Element*>(rows[r]) + offset, there, to);
      zero_row(to + there, ld - there);
    }
  }

  // Columns c .. of 32 keys as tiles of B: keys j and j + 16 side by side in a cell, as p has them, and the
  // columns in the order of dot_columns.
  template <int tiles>
  static HWY_INLINE void pack(const void* const* v_rows, std::int64_t offset, std::int64_t keys,
                              std::int64_t c, std::int64_t left, Element* to, Next& next) {
    const hn::Repartition<std::uint16_t, UintTag> halves;
    const auto row = [&](std::int64_t j, std::int64_t column) HWY_ATTR {
      const Cells cells = j < keys ? load_cells(static_cast<const Element*>(v_rows[j]) + offset + c + column,
                                                std::clamp<std::int64_t>(left - column, 0, cell_step))
                                   : hn::Zero(UintTag());
      return hn::BitCast(halves, cells);
    };
    const auto put = [&](auto x, std::int64_t j, std::int64_t column) HWY_ATTR {
      Element* at = to + column / tile_cols * tile_elements + 2 * (j * tile_cols + column % tile_cols);
      hn::StoreU(x, halves, &at->bits);
    };
    for (std::int64_t j = 0; j < pair_distance; ++j) {
      for (std::int64_t n = 0; n < tiles * tile_cols; n += cell_step) {
        next.fetch(lines_of_step<Element, 4>);
        const auto x = row(j, n), y = row(j + pair_distance, n);
        put(hn::InterleaveLower(halves, x, y), j, n);
        put(hn::InterleaveUpper(halves, x, y), j, n + lanes);
      }
    }
  }

  template <int tiles>
  static HWY_NOINLINE void columns(const Few& few, const void* const* v_rows, std::int64_t offset,
                                   std::int64_t keys, std::int64_t c, std::int64_t dim, Next& next) {
    alignas(64) Element v[most_keys / tile_depth * tiles * tile_elements];
    Element* to = v;
    for (std::int64_t k = 0; k < keys; k += tile_depth, to += tiles * tile_elements)
      pack<tiles>(v_rows + k, offset, keys - k, c, dim - c, to, next);

    const auto* p = reinterpret_cast<const Element*>(few.s);
    const std::int64_t stride_p = few.s_ld * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t stride_o = few.o_ld * static_cast<std::int64_t>(sizeof(float));
    float* o = few.o + c;
    tile::load<0>(o, stride_o);
    tile::load<1>(o + tile_cols, stride_o);
    if constexpr (tiles == 4) {
      tile::load<2>(o + 2 * tile_cols, stride_o);
      tile::load<3>(o + 3 * tile_cols, stride_o);
    }
    const Element* from = v;
    for (std::int64_t k = 0; k < keys; k += tile_depth, from += tiles * tile_elements) {
      tile::load<4>(p + k, stride_p);
      tile::load<5>(from, 64);
      tile::multiply_add<0, 4, 5>();
      tile::load<6>(from + tile_elements, 64);
      tile::multiply_add<1, 4, 6>();
      if constexpr (tiles == 4) {
        tile::load<7>(from + 2 * tile_elements, 64);
        tile::multiply_add<2, 4, 7>();
        tile::load<5>(from + 3 * tile_elements, 64);
        tile::multiply_add<3, 4, 5>();
      }
    }
    tile::store<0>(o, stride_o);
    tile::store<1>(o + tile_cols, stride_o);
    if constexpr (tiles == 4) {
      tile::store<2>(o + 2 * tile_cols, stride_o);
      tile::store<3>(o + 3 * tile_cols, stride_o);
    }
  }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
