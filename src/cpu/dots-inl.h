// Products of a few rows of bfloat16 with rows of bfloat16 that lie anywhere in memory: stream-inl.h, in dot
// products of pairs.
#pragma once

#include "cpu/engine-inl.h"
#include "cpu/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// A cell is two numbers of bfloat16, and an instruction multiplies cells: as many products as two of float's,
// and nothing to convert.
using Cells = hn::Vec<UintTag>;

HWY_INLINE Vec add_dots(Vec sum, Cells a, Cells b) {
#if TESSERA_CPU_DOTS && !defined(TESSERA_CPU_AMX_EMULATED)
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
#else
  const FloatTag f;
  const Cells high = hn::Set(UintTag(), 0xFFFF0000u);
  const auto low = [&](Cells x) HWY_ATTR { return hn::BitCast(f, hn::ShiftLeft<16>(x)); };
  sum = hn::MulAdd(hn::BitCast(f, hn::And(a, high)), hn::BitCast(f, hn::And(b, high)), sum);
  return hn::MulAdd(low(a), low(b), sum);
#endif
}

#if TESSERA_CPU_DOTS && !defined(TESSERA_CPU_AMX_EMULATED)
// The same, of a vector of cells in memory.
HWY_INLINE Vec add_dots(Vec sum, const bfloat16* a, Cells b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(b.raw), "m"(*reinterpret_cast<const __m512i*>(a)));
  return sum;
}
#endif

constexpr std::int64_t cell_step = 2 * lanes;  // numbers in a vector

// A vector of a row, which ends n elements from p: what lies behind it counts as 0 and is not read.
HWY_INLINE Cells load_cells(const bfloat16* p, std::int64_t n) {
  const hn::Repartition<std::uint16_t, UintTag> halves;
  if (n >= cell_step) return hn::BitCast(UintTag(), hn::LoadU(halves, &p->bits));
  bfloat16 copy[cell_step] = {};
  std::memcpy(copy, p, static_cast<std::size_t>(n) * sizeof(bfloat16));
  return hn::BitCast(UintTag(), hn::LoadU(halves, &copy->bits));
}

// stream_scores of bfloat16 on both sides. q's rows are padded with zeros to whole vectors.
template <int rows>
HWY_NOINLINE void dot_scores(const bfloat16* HWY_RESTRICT q, std::int64_t q_ld, const void* const* k_rows,
                             std::int64_t offset, std::int64_t key_count, std::int64_t dim,
                             float* HWY_RESTRICT s, std::int64_t s_ld, Next& next) {
  constexpr int keys = 4;
  for (std::int64_t j = 0; j < key_count; j += keys) {
    const bfloat16* k[keys];
    for (int n = 0; n < keys; ++n) k[n] = static_cast<const bfloat16*>(k_rows[j + n]) + offset;
    Vec acc[rows][keys];
    HWY_UNROLL(4)
    for (int r = 0; r < rows; ++r) {
      HWY_UNROLL(4)
      for (int n = 0; n < keys; ++n) acc[r][n] = set(0.0f);
    }
    const auto step = [&](std::int64_t c, std::int64_t left) TESSERA_INLINE_LAMBDA {
      Cells kc[keys];
      HWY_UNROLL(4)
      for (int n = 0; n < keys; ++n) {
        next.fetch_run<1>();
        kc[n] = load_cells(k[n] + c, left);
      }
      HWY_UNROLL(4)
      for (int r = 0; r < rows; ++r) {
        const Cells qc = load_cells(q + r * q_ld + c, cell_step);
        HWY_UNROLL(4)
        for (int n = 0; n < keys; ++n) acc[r][n] = add_dots(acc[r][n], qc, kc[n]);
      }
    };
    std::int64_t c = 0;
    for (; c + cell_step <= dim; c += cell_step) step(c, cell_step);
    if (c < dim) step(c, dim - c);
    store_sums(acc, s + j, s_ld);
  }
}

// Rounded to nearest even.
#if TESSERA_CPU_DOTS && !defined(TESSERA_CPU_AMX_EMULATED)
HWY_INLINE __m256i rounded(Vec x) {
  __m256i y;
  __asm__("vcvtneps2bf16 %1, %0" : "=v"(y) : "v"(x.raw));
  return y;
}
HWY_INLINE void store_rounded(Vec x, bfloat16* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded(x));
}
#else
HWY_INLINE void store_rounded(Vec x, bfloat16* to) { store_from_float(x, to); }
#endif
// Floats to bfloat16 in the same place; n a multiple of lanes.
HWY_INLINE void round_row(float* row, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += lanes)
    store_rounded(load(row + i), reinterpret_cast<bfloat16*>(row) + i);
}

// --- Values ------------------------------------------------------------------------------------------------

// A probability as dot_columns takes it: bfloat16, rounded to nearest even, neighbours side by side.
struct DotCell {
  bfloat16 value;
};
HWY_INLINE void store_pair(Vec x, Vec y, DotCell* to, std::int64_t c) {
  store_rounded(x, &to[c].value);
  store_rounded(y, &to[c + pair_distance].value);
}

// Where the cell of row r and of keys j and j + 1 lies, j even: rows one after another.
struct RowCells {
  const bfloat16* p;
  std::int64_t ld;

  HWY_INLINE const bfloat16* at(int r, std::int64_t j) const { return p + r * ld + j; }
};

// stream_values of bfloat16: two keys at a time. Behind the last key p is 0. In each
// cell_step columns of acc_o come first the lower halves of all blocks of eight, then the upper halves
// (unzip_row).
template <int rows, int steps, class P>
HWY_NOINLINE void dot_columns(P p, const void* const* v_rows, std::int64_t offset, std::int64_t key_count,
                              std::int64_t c, std::int64_t left, float* HWY_RESTRICT acc_o, std::int64_t o_ld,
                              Next& next) {
  // Where there is little to do for a line, two at once are too many (NOTES.md).
  constexpr int lines_at_once = rows < stream_rows ? 1 : 2;
  const hn::Repartition<std::uint16_t, UintTag> halves;
  Vec acc[rows][2 * steps];
  HWY_UNROLL(8)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(4)
    for (int n = 0; n < 2 * steps; ++n) acc[r][n] = load(acc_o + r * o_ld + c + n * lanes);
  }
  const auto add = [&](std::int64_t j, const auto& load_second) TESSERA_INLINE_LAMBDA {
    Cells v[2 * steps];
    HWY_UNROLL(4)
    for (int n = 0; n < steps; ++n) {
      next.fetch_run<lines_at_once>();
      const bfloat16* first = static_cast<const bfloat16*>(v_rows[j]) + offset + c + n * cell_step;
      const auto x = hn::BitCast(halves, load_cells(first, steps > 1 ? cell_step : left));
      if constexpr (lines_at_once == 1) next.fetch_run<1>();
      const auto y = hn::BitCast(halves, load_second(n));
      v[2 * n] = hn::BitCast(UintTag(), hn::InterleaveLower(halves, x, y));
      v[2 * n + 1] = hn::BitCast(UintTag(), hn::InterleaveUpper(halves, x, y));
    }
    HWY_UNROLL(8)
    for (int r = 0; r < rows; ++r) {
      std::uint32_t cell;
      std::memcpy(&cell, p.at(r, j), sizeof(cell));
      const Cells pj = hn::Set(UintTag(), cell);
      HWY_UNROLL(4)
      for (int n = 0; n < 2 * steps; ++n) acc[r][n] = add_dots(acc[r][n], pj, v[n]);
    }
  };
  std::int64_t j = 0;
  for (; j + 1 < key_count; j += 2) {
    const bfloat16* second = static_cast<const bfloat16*>(v_rows[j + 1]) + offset + c;
    add(j, [&](int n) HWY_ATTR { return load_cells(second + n * cell_step, steps > 1 ? cell_step : left); });
  }
  if (j < key_count) add(j, [](int) HWY_ATTR { return hn::Zero(UintTag()); });
  HWY_UNROLL(8)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(4)
    for (int n = 0; n < 2 * steps; ++n) store(acc[r][n], acc_o + r * o_ld + c + n * lanes);
  }
}

// Of more than four rows one vector of values at a time: a line is then loaded once.
template <int rows, class P>
HWY_INLINE void dot_values(P p, const void* const* v_rows, std::int64_t offset, std::int64_t key_count,
                           std::int64_t dim, float* acc_o, std::int64_t o_ld, Next& next) {
  std::int64_t c = 0;
  if constexpr (rows <= stream_rows) {
    for (; c + 2 * cell_step <= dim; c += 2 * cell_step)
      dot_columns<rows, 2>(p, v_rows, offset, key_count, c, dim - c, acc_o, o_ld, next);
  }
  for (; c < dim; c += cell_step)
    dot_columns<rows, 1>(p, v_rows, offset, key_count, c, dim - c, acc_o, o_ld, next);
}

// Columns as dot_columns leaves them, put in order.
HWY_INLINE void unzip_row(float* row, std::int64_t dim) {
  float copy[cell_step];
  for (std::int64_t c = 0; c < dim; c += cell_step) {
    std::memcpy(copy, row + c, sizeof(copy));
    for (std::int64_t i = 0; i < cell_step; i += 8) {
      std::memcpy(row + c + i, copy + i / 2, 4 * sizeof(float));
      std::memcpy(row + c + i + 4, copy + lanes + i / 2, 4 * sizeof(float));
    }
  }
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
