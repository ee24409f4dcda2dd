// Products of a few rows with rows that lie anywhere in memory, which is read once: by way of pointers,
// not packed.
#pragma once

#include "cpu/features.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// Of a lambda that is called more than once: left to itself, clang makes it a function and keeps the
// accumulators in memory.
#define TESSERA_INLINE_LAMBDA __attribute__((always_inline)) HWY_ATTR

// Rows at once, by keys or by vectors of values: accumulators and operands fit the 16 registers of AVX2, and
// are chains enough to keep two multiply-adds a cycle going. A sum's order is the same in any of them.
constexpr int stream_rows = 4, stream_keys = 8;  // of quads (few-quads-inl.h); else at most 4
constexpr int stream_width(int rows) { return HWY_CAP_GE512 || HWY_ARCH_ARM || rows <= 2 ? 4 : 3; }

// Keeps an address in one register: the compiler would work out by itself each one that is a constant away.
template <class T>
HWY_INLINE void keep_address(T*& p) {
  __asm__("" : "+r"(p));
}

// A vector of a row, which ends n elements from p: what lies behind it counts as 0 and is not read.
template <class T>
HWY_INLINE Vec load_up_to(const T* p, std::int64_t n) {
  if (n >= lanes) return load_as_float(p);
  T copy[lanes] = {};
  std::memcpy(copy, p, static_cast<std::size_t>(n) * sizeof(T));
  return load_as_float(copy);
}

// Of four vectors, in each block of four lanes a part of each one's sum.
HWY_INLINE Vec fold_four(Vec a, Vec b, Vec c, Vec d) {
  const FloatTag f;
  const hn::RepartitionToWide<FloatTag> wide;
  const auto fold = [&](Vec x, Vec y) HWY_ATTR {
    return hn::BitCast(wide, hn::Add(hn::InterleaveLower(f, x, y), hn::InterleaveUpper(f, x, y)));
  };
  const auto ab = fold(a, b), cd = fold(c, d);
  return hn::Add(hn::BitCast(f, hn::InterleaveLower(wide, ab, cd)),
                 hn::BitCast(f, hn::InterleaveUpper(wide, ab, cd)));
}

#if HWY_CAP_GE512
// Blocks of two vectors, added two and two.
HWY_INLINE Vec fold_blocks(Vec x, Vec y) {
  return Vec{
      _mm512_add_ps(_mm512_shuffle_f32x4(x.raw, y.raw, 0x88), _mm512_shuffle_f32x4(x.raw, y.raw, 0xDD))};
}
#endif

// s[r][n] = the sum of acc[r][n]. Four of a row are written: where `keys` is 3, the last means nothing.
template <int rows, int keys>
HWY_INLINE void store_sums(const Vec (&acc)[rows][keys], float* s, std::int64_t s_ld) {
  static_assert(rows <= 4 && (keys == 3 || keys == 4));
  const auto folded = [&](int r) HWY_ATTR {
    return fold_four(acc[r][0], acc[r][1], acc[r][2], keys == 3 ? set(0.0f) : acc[r][keys - 1]);
  };
#if HWY_CAP_GE512
  const Vec first = folded(0);
  const Vec low = fold_blocks(first, rows > 1 ? folded(rows > 1 ? 1 : 0) : first);
  const Vec high = rows > 2 ? fold_blocks(folded(rows > 2 ? 2 : 0), folded(rows - 1)) : low;
  const Vec sums = fold_blocks(low, high);
  _mm_storeu_ps(s, _mm512_castps512_ps128(sums.raw));
  if constexpr (rows > 1) _mm_storeu_ps(s + s_ld, _mm512_extractf32x4_ps(sums.raw, 1));
  if constexpr (rows > 2) _mm_storeu_ps(s + 2 * s_ld, _mm512_extractf32x4_ps(sums.raw, 2));
  if constexpr (rows > 3) _mm_storeu_ps(s + 3 * s_ld, _mm512_extractf32x4_ps(sums.raw, 3));
#else
  HWY_UNROLL(4)
  for (int r = 0; r < rows; ++r) {
    const Vec sums = folded(r);
    if constexpr (lanes == 4) {
      store(sums, s + r * s_ld);
    } else {
      const hn::Half<FloatTag> half;
      hn::StoreU(hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums)), half, s + r * s_ld);
    }
  }
#endif
}

// Rows that will be wanted next, called for line by line between the products: all at once they would hold up
// everything else. Some CPUs forget what is too much (features.h): there, with AVX-512, a line is called for
// again, up to `again` bytes later, as far as the rows lie one after another.
struct Next {
#if HWY_CAP_GE512 && !defined(TESSERA_CPU_AMX)
  static constexpr std::ptrdiff_t again = 48 * 64;
#else
  static constexpr std::ptrdiff_t again = 0;
#endif
  const void* const* rows = nullptr;
  std::int64_t count = 0, bytes = 0;
  const char* begin = nullptr;  // of the rows that lie one after another
  const char* line = nullptr;
  const char* end = nullptr;
  int pace = 1, wait = 1;  // one call of `pace` fetches, the others wait
  Prefetches asks = Prefetches::ask_once;

  Next() = default;
  // For q_rows rows of q, in `passes` passes over the lines.
  Next(const void* const* list, std::int64_t row_count, std::int64_t row_bytes, std::int64_t q_rows,
       std::int64_t passes)
      : rows(list), count(row_count), bytes(row_bytes), pace(static_cast<int>(passes)) {
    if constexpr (again > 0) asks = prefetches();
    // Zen 4: where there is much to do for each line little is forgotten, and to ask again costs more than it
    // brings.
    if (asks == Prefetches::ask_again && q_rows > stream_rows) asks = Prefetches::ask_once;
  }

  HWY_INLINE void fetch(int lines) {
    if (!turn()) return;
    for (int i = 0; i < lines && more(); ++i) call<1>();
  }
  // The same in fewer instructions. Where nothing is called for again it is for one pass; elsewhere a row may
  // end before the last of the lines, which is behind it then.
  template <int lines>
  HWY_INLINE void fetch_run() {
    if constexpr (again == 0) {
      if (end - line < 64 * lines) return fetch(lines);
      call<lines>();
    } else {
      if (pace > 1 && !turn()) return;
      if (more()) call<lines>();
    }
  }
  void fetch_all() {
    while (more()) call<1>();
  }

 private:
  HWY_INLINE bool turn() {
    if (--wait > 0) return false;
    wait = pace;
    return true;
  }
  HWY_INLINE bool more() {
    while (line >= end) {
      if (count == 0) return false;
      const auto* row = static_cast<const char*>(*rows++);
      --count;
      if (row != end) begin = line = row;
      end = row + bytes;
    }
    return true;
  }
  template <int lines>
  HWY_INLINE void call() {
    if (again > 0 && asks == Prefetches::ask_often) {
      const std::ptrdiff_t back = std::min(line - begin, again);
      prefetch<lines, 3>(line);
      prefetch<lines, 3>(line - back);
      prefetch<lines, 3>(line - (back >> 1));
      prefetch<lines, 3>(line - (back >> 2));
    } else {
      prefetch<lines, 2>(line);
      if (again > 0 && asks == Prefetches::ask_again) {
        const std::ptrdiff_t back = std::min(line - begin, again);
        prefetch<lines, 2>(line - back);
        prefetch<lines, 2>(line - (back >> 2));
      }
    }
    line += 64 * lines;
  }
  // Into the second-level cache, or into the first (3).
  template <int lines, int locality>
  static HWY_INLINE void prefetch(const char* from) {
    keep_address(from);
    HWY_UNROLL(8)
    for (int i = 0; i < lines; ++i) __builtin_prefetch(from + 64 * i, 0, locality);
  }
};

// Lines of so many vectors: what a step of the loops below works through.
template <class T, int vectors>
constexpr int lines_of_step = (vectors * static_cast<int>(lanes) * static_cast<int>(sizeof(T)) + 63) / 64;

// s[r][j] = q_r · k_j of `rows` rows and key_count keys, `keys` at a time. The head's elements lie `offset`
// behind the row's pointer. With each step some lines of `next` are called for.
template <int rows, int keys, class T>
HWY_NOINLINE void stream_scores(const float* HWY_RESTRICT q, std::int64_t q_ld, const void* const* k_rows,
                                std::int64_t offset, std::int64_t key_count, std::int64_t dim,
                                float* HWY_RESTRICT s, std::int64_t s_ld, Next& next) {
  constexpr bool step_fetches = keys == 4;  // otherwise all registers are taken
  const std::int64_t whole = dim / lanes * lanes;
  for (std::int64_t j = 0; j < key_count; j += keys) {
    if constexpr (!step_fetches) next.fetch(static_cast<int>(keys * dim * sizeof(T) / 64) + 1);
    const T* k[keys];
    for (int n = 0; n < keys; ++n) k[n] = static_cast<const T*>(k_rows[j + n]) + offset;
    Vec acc[rows][keys];
    HWY_UNROLL(4)
    for (int r = 0; r < rows; ++r) {
      HWY_UNROLL(4)
      for (int n = 0; n < keys; ++n) acc[r][n] = set(0.0f);
    }
    const auto step = [&](std::int64_t c, const auto& load_k) TESSERA_INLINE_LAMBDA {
      if constexpr (step_fetches) next.fetch(lines_of_step<T, keys>);
      Vec kc[keys];
      HWY_UNROLL(4)
      for (int n = 0; n < keys; ++n) kc[n] = load_k(k[n] + c);
      HWY_UNROLL(4)
      for (int r = 0; r < rows; ++r) {
        const Vec qc = load(q + r * q_ld + c);
        HWY_UNROLL(4)
        for (int n = 0; n < keys; ++n) acc[r][n] = hn::MulAdd(qc, kc[n], acc[r][n]);
      }
    };
    for (std::int64_t c = 0; c < whole; c += lanes)
      step(c, [](const T* p) HWY_ATTR { return load_as_float(p); });
    if (whole < dim) step(whole, [&](const T* p) HWY_ATTR { return load_up_to(p, dim - whole); });
    store_sums(acc, s + j, s_ld);
  }
}

// acc_o[r] += sum over j of p[r][j] v_j, in `vectors` vectors from column c on; left is what of a row's
// elements is there.
template <int rows, int vectors, bool whole, class T>
HWY_NOINLINE void stream_columns(const float* HWY_RESTRICT p, std::int64_t p_ld, const void* const* v_rows,
                                 std::int64_t offset, std::int64_t key_count, std::int64_t c,
                                 std::int64_t left, float* HWY_RESTRICT acc_o, std::int64_t o_ld,
                                 Next& next) {
  Vec acc[rows][vectors];
  HWY_UNROLL(4)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(4)
    for (int n = 0; n < vectors; ++n) acc[r][n] = load(acc_o + r * o_ld + c + n * lanes);
  }
  for (std::int64_t j = 0; j < key_count; ++j) {
    next.fetch(lines_of_step<T, vectors>);
    const T* row = static_cast<const T*>(v_rows[j]) + offset + c;
    Vec v[vectors];
    HWY_UNROLL(4)
    for (int n = 0; n < vectors; ++n)
      v[n] = whole ? load_as_float(row + n * lanes) : load_up_to(row + n * lanes, left - n * lanes);
    HWY_UNROLL(4)
    for (int r = 0; r < rows; ++r) {
      const Vec pj = set(p[r * p_ld + j]);
      HWY_UNROLL(4)
      for (int n = 0; n < vectors; ++n) acc[r][n] = hn::MulAdd(pj, v[n], acc[r][n]);
    }
  }
  HWY_UNROLL(4)
  for (int r = 0; r < rows; ++r) {
    HWY_UNROLL(4)
    for (int n = 0; n < vectors; ++n) store(acc[r][n], acc_o + r * o_ld + c + n * lanes);
  }
}

template <int rows, class T>
HWY_INLINE void stream_values(const float* p, std::int64_t p_ld, const void* const* v_rows,
                              std::int64_t offset, std::int64_t key_count, std::int64_t dim, float* acc_o,
                              std::int64_t o_ld, Next& next) {
  constexpr int most = stream_width(rows);
  std::int64_t c = 0;
  const auto columns = [&](auto vectors, auto whole) HWY_ATTR {
    stream_columns<rows, vectors, whole, T>(p, p_ld, v_rows, offset, key_count, c, dim - c, acc_o, o_ld,
                                            next);
  };
  // Two and two rather than three and one: one vector is too few chains.
  for (; c + most * lanes <= dim && (most == 4 || (dim - c) / lanes != 4); c += most * lanes)
    columns(std::integral_constant<int, most>(), std::true_type());
  for (; c + 2 * lanes <= dim; c += 2 * lanes) columns(std::integral_constant<int, 2>(), std::true_type());
  for (; c < dim; c += lanes) columns(std::integral_constant<int, 1>(), std::false_type());
}

// Calls body(r, count) for the rows 0 .. rows - 1, `count` a constant, at most that of the template.
template <int count = stream_rows, class Body>
HWY_INLINE void over_few_rows(std::int64_t rows, const Body& body, std::int64_t r = 0) {
  for (; r + count <= rows; r += count) body(r, std::integral_constant<int, count>());
  if constexpr (count > 1) over_few_rows<count - 1>(rows, body, r);
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
