// The rows of one key head that stream (few-inl.h), four at a time, in dot products of AVX-512. A quad is
// four rows: a vector of q holds 16 bytes of each, one of s four keys of each, and so does p.
//
//   s (4 rows x 4 keys) = q kᵀ     16 bytes of a key, four times in a vector: every block of lanes sums one
//                                  row, and four keys' blocks are folded at once, a quarter of the shuffles
//                                  that it takes to sum the lanes of each row and key
//   p = softmax of s               as it lies (few-softmax-inl.h)
//   o (rows x columns) += p v      in up to eight rows at once
#pragma once

#include "cpu/few-softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// A quad's scores are s[key / 4][row][key % 4], and so are its weights. `c` is a multiple of four.
struct QuadLayout {
  static constexpr std::int64_t rows = 4;
  static constexpr std::int64_t s_ld = col_align, p_ld = col_align;  // a quad is four times a block's keys
  static constexpr bool called_with_maxima = false;

  static HWY_INLINE Vec load_rows(const float* s, std::int64_t c) { return load(s + rows * c); }
  static HWY_INLINE void store_rows(Vec x, float* s, std::int64_t c) { store(x, s + rows * c); }
  template <class Body>
  static HWY_INLINE void over_keys(std::int64_t cols, const Body& body) {
    for (std::int64_t c = 0; c < cols; c += lanes) {
      HWY_UNROLL(4)
      for (int i = 0; i < 4; ++i) body(c + 4 * i, i);
    }
  }
  static HWY_INLINE auto columns(std::int64_t c) {
    const IntTag i;
    return hn::Add(hn::Set(i, static_cast<std::int32_t>(c)), hn::And(hn::Iota(i, 0), hn::Set(i, 3)));
  }
  static HWY_INLINE Vec of_rows(const float* x) {
    return Vec{_mm512_permutexvar_ps(lane_of_row(), _mm512_castps128_ps512(_mm_loadu_ps(x)))};
  }
  static HWY_INLINE hn::Vec<IntTag> of_rows(const std::int32_t* x) {
    const __m128i loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return hn::Vec<IntTag>{_mm512_permutexvar_epi32(lane_of_row(), _mm512_castsi128_si512(loaded))};
  }
  static HWY_INLINE void keep_rows(Vec x, float* to) {
    const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, x.raw)));
  }
  template <class Combine>
  static HWY_INLINE Vec across_keys(Vec x, const Combine& combine) {
    x = combine(x, Vec{_mm512_permute_ps(x.raw, 0x4E)});
    return combine(x, Vec{_mm512_permute_ps(x.raw, 0xB1)});
  }
  template <class Weigh>
  static HWY_INLINE void store_weights(std::int64_t cols, bfloat16* p, const Weigh& weigh) {
    for (std::int64_t c = 0; c < cols; c += 8) {
      store_vector(weigh(c, 0), p, c);
      store_vector(weigh(c + 4, 1), p, c + 4);
    }
  }
  static HWY_INLINE void store_vector(Vec x, bfloat16* p, std::int64_t c) { store_rounded(x, p + rows * c); }
  // Where the cell of row r and of keys j and j + 1 lies, j even.
  static HWY_INLINE std::int64_t cell(std::int64_t r, std::int64_t j) {
    return 4 * r + 4 * j - 3 * (j & 2);  // 16 (j / 4) + j % 4
  }

 private:
  static HWY_INLINE __m512i lane_of_row() {
    return _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  }
};
static_assert(Next::again > 0 && lanes == 4 * QuadLayout::rows && col_align % lanes == 0 &&
              col_unit % lanes == 0);

struct QuadCells {
  const bfloat16* p;  // of the first row's quad

  HWY_INLINE const bfloat16* at(int r, std::int64_t j) const {
    return p + r / 4 * (4 * QuadLayout::p_ld) + QuadLayout::cell(r % 4, j);
  }
};

constexpr std::int64_t quad_step = 8;  // numbers in a block of lanes

constexpr std::int64_t quad_ld(std::int64_t dim) { return round_up(dim, quad_step); }

// Rows of bfloat16 to quads in the same place, where rows are at least twice as long as quad_ld: elements c
// .. of the quad that begins with row r are at q + r quad_ld + 4 c. A last quad is filled up with zeros.
HWY_INLINE void make_quads(bfloat16* q, std::int64_t q_ld, std::int64_t rows, std::int64_t dim) {
  for (std::int64_t first = 0; first < rows; first += 4) {
    bfloat16 copy[4][max_head_dim] = {};
    for (std::int64_t r = 0; r < std::min<std::int64_t>(4, rows - first); ++r)
      std::memcpy(copy[r], q + (first + r) * q_ld, static_cast<std::size_t>(dim) * sizeof(bfloat16));
    bfloat16* quad = q + first * quad_ld(dim);
    for (std::int64_t c = 0; c < dim; c += quad_step) {
      for (std::int64_t r = 0; r < 4; ++r)
        std::memcpy(quad + 4 * c + r * quad_step, copy[r] + c, quad_step * sizeof(bfloat16));
    }
  }
}

// The 16 bytes at p in every block; n of the row's elements are left.
HWY_INLINE Cells load_block(const bfloat16* p, std::int64_t n) {
  const hn::Repartition<std::uint16_t, UintTag> halves;
  if (n >= quad_step) return hn::BitCast(UintTag(), hn::LoadDup128(halves, &p->bits));
  bfloat16 copy[quad_step] = {};
  std::memcpy(copy, p, static_cast<std::size_t>(n) * sizeof(bfloat16));
  return hn::BitCast(UintTag(), hn::LoadDup128(halves, &copy->bits));
}

// The scores of one or two quads.
template <int quads>
HWY_NOINLINE void quad_scores(const bfloat16* HWY_RESTRICT q, const void* const* k_rows, std::int64_t offset,
                              std::int64_t key_count, std::int64_t dim, float* HWY_RESTRICT s, Next& next) {
  constexpr int keys = stream_keys;
  // The softmax calls for two lines with each vector: as many as these steps would for the same eight keys.
  constexpr std::int64_t quiet = quads * 2 * quad_step;
  for (std::int64_t j = 0; j < key_count; j += keys) {
    const bfloat16* k[keys];
    for (int n = 0; n < keys; ++n) k[n] = static_cast<const bfloat16*>(k_rows[j + n]) + offset;
    Vec acc[quads][keys];
    HWY_UNROLL(2)
    for (int t = 0; t < quads; ++t) {
      HWY_UNROLL(8)
      for (int n = 0; n < keys; ++n) acc[t][n] = set(0.0f);
    }
    const auto step = [&](std::int64_t c, std::int64_t left) TESSERA_INLINE_LAMBDA {
      if (c >= quiet) next.fetch_run<2>();
      Cells qc[quads];
      HWY_UNROLL(2)
      for (int t = 0; t < quads; ++t) qc[t] = load_cells(q + 4 * (t * quad_ld(dim) + c), cell_step);
      HWY_UNROLL(8)
      for (int n = 0; n < keys; ++n) {
        const Cells kc = load_block(k[n] + c, left);
        HWY_UNROLL(2)
        for (int t = 0; t < quads; ++t) acc[t][n] = add_dots(acc[t][n], qc[t], kc);
      }
    };
    std::int64_t c = 0;
    for (; c + quad_step <= dim; c += quad_step) step(c, quad_step);
    if (c < dim) step(c, dim - c);
    HWY_UNROLL(2)
    for (int t = 0; t < quads; ++t) {
      HWY_UNROLL(2)
      for (int n = 0; n < keys; n += 4) {
        QuadLayout::store_rows(fold_four(acc[t][n], acc[t][n + 1], acc[t][n + 2], acc[t][n + 3]),
                               s + t * 4 * QuadLayout::s_ld, j + n);
      }
    }
  }
}

struct QuadProducts {
  static constexpr bool by_block = true, heads_at_once = false;
  static constexpr std::int64_t fewest_rows = 4;
  static constexpr std::int64_t most_heads = 16;  // of a task

  static constexpr std::int64_t q_rows(std::int64_t rows) { return rows; }
  static std::int64_t passes_of_scores(std::int64_t rows) { return (rows + 7) / 8; }
  static std::int64_t passes_of_values(std::int64_t rows) { return (rows + 7) / 8; }
  static HWY_INLINE void load_queries(const TaskRows& task, const Few& few) {
    DotProducts::load_queries(task, few);
    make_quads(reinterpret_cast<bfloat16*>(few.q), 2 * few.q_ld, few.rows, task.problem.head_dim);
  }
  static HWY_INLINE void after_values(const Few& few, std::int64_t dim) {
    DotProducts::after_values(few, dim);
  }

  class State;
};

class QuadProducts::State : public BlockState<QuadProducts::most_heads * lane_rows> {
 public:
  explicit State(std::int64_t rows) : BlockState(rows, lane_rows) {}

  void scores(const Few& few, std::int64_t h, std::int64_t offset, Next& next) {
    const auto* q = reinterpret_cast<const bfloat16*>(few.q);
    const auto quads = [&](std::int64_t r, auto count) HWY_ATTR {
      quad_scores<count>(q + r * quad_ld(dim_), k_rows_, offset, keys_, dim_,
                         s_[h % 2] + r * QuadLayout::s_ld, next);
    };
    std::int64_t r = 0;
    for (; r + 4 < rows_; r += 8) quads(r, std::integral_constant<int, 2>());
    if (r < rows_) quads(r, std::integral_constant<int, 1>());
  }

  HWY_NOINLINE void softmax(const TaskRows& task, const Few& few, std::int64_t h, Range rows,
                            std::int64_t key, Range cols, Next& next) {
    softmax_as<QuadLayout>(task, few, h, rows, key, cols, rows_, s_[h % 2], next);
  }

  void values(const Few& few, std::int64_t offset, Next& next) {
    over_few_rows<8>(rows_, [&](std::int64_t r, auto count) HWY_ATTR {
      const auto* p = reinterpret_cast<const bfloat16*>(few.s);
      dot_values<count>(QuadCells{p + r * QuadLayout::p_ld}, v_rows_, offset, keys_, dim_v_,
                        few.o + r * few.o_ld, few.o_ld, next);
    });
  }
  void finish_values() {}

 private:
  alignas(64) float s_[2][lane_rows * QuadLayout::s_ld] = {};
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
