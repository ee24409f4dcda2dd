// The rows of one key head that stream (few-inl.h), on AMX tiles: rows of keys are an operand as they lie in
// the cache, rows of values are interleaved two and two.
//
//   sᵀ (16 keys x rows) = k qᵀ      q is packed once a task
//   p = softmax of s                in vectors whose lanes are rows: nothing is summed across lanes
//   o (rows x columns) += p v       tiles of o and p have as many rows as there are: neither has more
//
// Vectors wait for a tile that was just stored, and a tile for vectors: so the softmax of a head comes after
// the scores of the next one, and a product of values after the next one's are interleaved.
//
// The lines that are wanted next are called for a few at a time all along: of values with the scores
// and with the softmax, of keys with the values. In bursts they hold up what comes behind them
// (NOTES.md).
//
// Keys that are not there, up to a whole tile, are zeros: nothing behind the last key is read.
#pragma once

#include "cpu/few-softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// A vector of sᵀ has a key's 16 rows or, where two keys' rows fit it (`width` of the rows count), those of
// key c and of key c + 4. p becomes tiles of A.
template <std::int64_t width>
struct TileLayout {
  static constexpr bool two_keys = lanes == 2 * width;
  static constexpr std::int64_t rows = two_keys ? width : lanes;
  static constexpr std::int64_t s_ld = 1, p_ld = col_align;  // p_ld: a block's keys
  static constexpr bool called_with_maxima = true;

  static HWY_INLINE Vec load_rows(const float* s, std::int64_t c) {
    if constexpr (two_keys) {
      const hn::Half<FloatTag> half;
      return hn::Combine(FloatTag(), hn::LoadU(half, s + (c + 4) * tile_cols),
                         hn::LoadU(half, s + c * tile_cols));
    } else {
      return load(s + c * tile_cols);
    }
  }
  static HWY_INLINE void store_rows(Vec x, float* s, std::int64_t c) {
    if constexpr (two_keys) {
      const hn::Half<FloatTag> half;
      hn::StoreU(hn::LowerHalf(half, x), half, s + c * tile_cols);
      hn::StoreU(hn::UpperHalf(half, x), half, s + (c + 4) * tile_cols);
    } else {
      store(x, s + c * tile_cols);
    }
  }
  template <class T>
  static HWY_INLINE auto of_rows(const T* x) {
    const hn::ScalableTag<T> tag;
    if constexpr (two_keys) {
      const auto low = hn::LoadU(hn::Half<hn::ScalableTag<T>>(), x);
      return hn::Combine(tag, low, low);
    } else {
      return hn::LoadU(tag, x);
    }
  }
  static HWY_INLINE auto columns(std::int64_t c) {
    const IntTag i;
    const auto column = hn::Set(i, static_cast<std::int32_t>(c));
    if constexpr (two_keys) {
      return hn::ConcatLowerLower(i, hn::Add(column, hn::Set(i, 4)), column);
    } else {
      return column;
    }
  }
  template <class Combine>
  static HWY_INLINE Vec across_keys(Vec x, const Combine& combine) {
    if constexpr (two_keys) {
      return combine(x, hn::ConcatLowerUpper(FloatTag(), x, x));
    } else {
      return x;
    }
  }
  static HWY_INLINE void keep_rows(Vec x, float* to) {
    if constexpr (two_keys) {
      const hn::Half<FloatTag> half;
      hn::StoreU(hn::LowerHalf(half, x), half, to);
    } else {
      store(x, to);
    }
  }
  template <class Body>
  static HWY_INLINE void over_keys(std::int64_t cols, const Body& body) {
    for (std::int64_t c = 0; c < cols; c += two_keys ? 8 : 4) {
      HWY_UNROLL(4)
      for (int i = 0; i < 4; ++i) body(c + i, i);
    }
  }
  template <class Weigh>
  static HWY_INLINE void store_weights(std::int64_t cols, Element* p, const Weigh& weigh) {
    for (std::int64_t c = 0; c < cols; c += tile_depth) {
      store_cells(
          [&](std::int64_t i) HWY_ATTR {
            const Vec x = weigh(c + i, 0);
            return pair_cells(x, weigh(c + i + pair_distance, 1));
          },
          p + c);
    }
  }

 private:
  // The cells of 16 pairs of keys, which make(first) makes vector by vector, as rows of A.
  template <class MakeCells>
  static HWY_INLINE void store_cells(const MakeCells& make, Element* p) {
    const UintTag u;
    if constexpr (two_keys) {
      Cells quad[2][4];
      HWY_UNROLL(2)
      for (int q = 0; q < 2; ++q) {
        const Cells a = make(8 * q), b = make(8 * q + 1), c = make(8 * q + 2), d = make(8 * q + 3);
        transpose_quads(a, b, c, d, quad[q]);
      }
      HWY_UNROLL(4)
      for (int r = 0; r < 4; ++r) {
        const auto row = [&](int at) HWY_ATTR { return reinterpret_cast<std::uint32_t*>(p + at * p_ld); };
#if HWY_CAP_GE512
        hn::StoreU(Cells{_mm512_shuffle_i32x4(quad[0][r].raw, quad[1][r].raw, 0x88)}, u, row(r));
        hn::StoreU(Cells{_mm512_shuffle_i32x4(quad[0][r].raw, quad[1][r].raw, 0xDD)}, u, row(r + 4));
#endif
      }
    } else {
      alignas(64) std::uint32_t cells[pair_distance * lanes];
      for (std::int64_t i = 0; i < pair_distance; ++i) hn::StoreU(make(i), u, cells + i * lanes);
      for (std::int64_t i = 0; i < pair_distance; i += lanes)
        transpose_cells(cells + i * lanes, lanes, reinterpret_cast<std::uint32_t*>(p) + i, p_ld / 2);
    }
  }
};

struct TileProducts {
  static constexpr bool by_block = true, heads_at_once = false;
  static constexpr std::int64_t fewest_rows = 4;  // one is quicker in dot products
  static constexpr std::int64_t most_heads = 16;  // of a task

  // In floats.
  static constexpr std::int64_t q_rows(std::int64_t rows) { return std::max(rows, tile_rows / 2); }
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
  static HWY_INLINE void after_values(const Few& few, std::int64_t dim) {
    DotProducts::after_values(few, dim);
  }

  class State;
};

// Head by head the scores, and then the values, of a block. The first four tiles have a row for each of q's.
class TileProducts::State : public BlockState<TileProducts::most_heads * lane_rows> {
 public:
  explicit State(std::int64_t rows) : BlockState(rows, lane_rows) { tile::shape(rows); }
  ~State() { tile::shape(tile_rows); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  HWY_INLINE void start_block(const void* const* k_rows, const void* const* v_rows, std::int64_t keys,
                              std::int64_t dim, std::int64_t dim_v) {
    BlockState::start_block(k_rows, v_rows, keys, dim, dim_v);
    for (std::int64_t j = 0; j < most_keys; j += tile_rows)
      stride_[j / tile_rows] = keys - j >= tile_rows && dim % tile_depth == 0 ? stride(k_rows + j) : 0;
  }

  HWY_NOINLINE void scores(const Few& few, std::int64_t h, std::int64_t offset, Next& next) {
    const auto* q = reinterpret_cast<const Element*>(few.q);
    float* s = s_[h % 2];
    const std::int64_t depth = round_up(dim_, tile_depth);
    alignas(64) Element copies[2][tile_rows * max_head_dim];
    for (std::int64_t j = 0; j < keys_; j += 2 * tile_rows) {
      const Element* k[2];
      std::int64_t strides[2];
      for (int i = 0; i < 2; ++i) {
        const std::int64_t first = j + i * tile_rows;
        strides[i] = first < keys_ ? stride_[first / tile_rows] : 0;
        if (strides[i] != 0) {
          k[i] = static_cast<const Element*>(k_rows_[first]) + offset;
        } else {
          k[i] = copies[i];
          strides[i] = depth * static_cast<std::int64_t>(sizeof(Element));
          copy_rows(k_rows_ + first, offset, std::clamp<std::int64_t>(keys_ - first, 0, tile_rows), dim_,
                    copies[i], depth);
        }
      }
      tile::zero<4>();
      tile::zero<5>();
      for (std::int64_t d = 0; d < depth; d += tile_depth) {
        tile::load<7>(q + d * tile_cols, 64);
        next.fetch_run<4>();  // in all, half a line for each that is loaded
        tile::load<6>(k[0] + d, strides[0]);
        next.fetch_run<4>();
        tile::multiply_add<4, 6, 7>();
        next.fetch_run<4>();
        tile::load<6>(k[1] + d, strides[1]);
        tile::multiply_add<5, 6, 7>();
        next.fetch_run<4>();
      }
      tile::store<4>(s + j * tile_cols, 64);
      tile::store<5>(s + (j + tile_rows) * tile_cols, 64);
    }
  }

  HWY_NOINLINE void softmax(const TaskRows& task, const Few& few, std::int64_t h, Range rows,
                            std::int64_t key, Range cols, Next& next) {
    if (rows_ <= tile_rows / 2) {
      softmax_as<TileLayout<tile_rows / 2>>(task, few, h, rows, key, cols, tile_rows / 2, s_[h % 2], next);
    } else {
      softmax_as<TileLayout<tile_rows>>(task, few, h, rows, key, cols, tile_rows, s_[h % 2], next);
    }
  }

  // 32 columns of 32 keys at a time: larger pieces were slower (NOTES.md). A product is left over to the next
  // piece, the last one to finish_values.
  HWY_NOINLINE void values(const Few& few, std::int64_t offset, Next& next) {
    for (std::int64_t c = 0; c < dim_v_; c += pass_cols) {
      for (std::int64_t k = 0; k < keys_; k += tile_depth) {
        Element* to = packed_[side_];
        if (keys_ - k >= tile_depth && dim_v_ - c >= pass_cols) {
          pack<true>(v_rows_ + k, offset + c, tile_depth, pass_cols, to, next);
        } else {
          pack<false>(v_rows_ + k, offset + c, keys_ - k, dim_v_ - c, to, next);
        }
        finish_values();
        waiting_ = {reinterpret_cast<const Element*>(few.s) + k,
                    to,
                    few.o + c,
                    few.o_ld,
                    k == 0,
                    k + tile_depth >= keys_};
        side_ = 1 - side_;
      }
    }
  }
  HWY_INLINE void finish_values() {
    if (waiting_.v == nullptr) return;
    const std::int64_t stride_o = waiting_.o_ld * static_cast<std::int64_t>(sizeof(float));
    if (waiting_.first) {
      tile::load<0>(waiting_.o, stride_o);
      tile::load<1>(waiting_.o + tile_cols, stride_o);
    }
    tile::load<2>(waiting_.p, p_ld * static_cast<std::int64_t>(sizeof(Element)));
    tile::load<6>(waiting_.v, 64);
    tile::multiply_add<0, 2, 6>();
    tile::load<7>(waiting_.v + tile_elements, 64);
    tile::multiply_add<1, 2, 7>();
    if (waiting_.last) {
      tile::store<0>(waiting_.o, stride_o);
      tile::store<1>(waiting_.o + tile_cols, stride_o);
    }
    waiting_ = {};
  }

 private:
  static constexpr std::int64_t most_keys = col_align;      // of a block
  static constexpr std::int64_t pass_cols = 2 * tile_cols;  // of o at once
  static constexpr std::int64_t p_ld = TileLayout<tile_rows>::p_ld;

  struct Waiting {  // o += p v; whether with the block's first keys, and its last
    const Element *p = nullptr, *v = nullptr;
    float* o = nullptr;
    std::int64_t o_ld = 0;
    bool first = false, last = false;
  };

  std::int64_t stride_[most_keys / tile_rows] = {};  // of 16 keys at an even distance; else 0
  alignas(64) float s_[2][most_keys * tile_cols];
  alignas(64) Element packed_[2][tile_depth * pass_cols];
  Waiting waiting_;
  int side_ = 0;

  static HWY_INLINE std::int64_t stride(const void* const* rows) {
    const auto* first = static_cast<const std::byte*>(rows[0]);
    const std::int64_t each = static_cast<const std::byte*>(rows[1]) - first;
    bool even = true;
    for (std::int64_t i = 0; i < tile_rows; ++i) even &= rows[i] == first + i * each;
    return even ? each : 0;
  }
  static HWY_NOINLINE void copy_rows(const void* const* rows, std::int64_t offset, std::int64_t count,
                                     std::int64_t dim, Element* to, std::int64_t ld) {
    for (std::int64_t r = 0; r < tile_rows; ++r, to += ld) {
      const std::int64_t there = r < count ? dim : 0;
      if (there > 0) copy_row(static_cast<const Element*>(rows[r]) + offset, there, to);
      zero_row(to + there, ld - there);
    }
  }

  // 32 columns of 32 keys as tiles of B: keys j and j + 16 side by side in a cell, as p has them, and the
  // columns in the order of dot_columns. `keys` keys and `left` columns are there.
  template <bool whole>
  static HWY_INLINE void pack(const void* const* v_rows, std::int64_t offset, std::int64_t keys,
                              std::int64_t left, Element* to, Next& next) {
    const hn::Repartition<std::uint16_t, UintTag> halves;
    const auto row = [&](std::int64_t j, std::int64_t c) HWY_ATTR {
      if (!whole && j >= keys) return hn::Zero(halves);
      const auto* from = static_cast<const Element*>(v_rows[j]) + offset + c;
      const std::int64_t there = whole ? cell_step : std::clamp<std::int64_t>(left - c, 0, cell_step);
      return hn::BitCast(halves, load_cells(from, there));
    };
    for (std::int64_t j = 0; j < pair_distance; ++j, to += 2 * tile_cols) {
      for (std::int64_t c = 0; c < pass_cols; c += cell_step) {
        const auto x = row(j, c);
        next.fetch_run<1>();  // a line for each that is loaded
        const auto y = row(j + pair_distance, c);
        Element* at = to + c / tile_cols * tile_elements + 2 * (c % tile_cols);
        Element* after = at + (lanes == tile_cols ? tile_elements : 2 * lanes);
        hn::StoreU(hn::InterleaveLower(halves, x, y), halves, &at->bits);
        next.fetch_run<1>();
        hn::StoreU(hn::InterleaveUpper(halves, x, y), halves, &after->bits);
      }
    }
  }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
