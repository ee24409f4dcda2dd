// What the kernels need of Highway and Highway has not: exp2, tanh, rows of any dtype to float and back.
// Included once by target.cpp, inside no namespace; every *-inl.h here is compiled once a SIMD target.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "core/half.h"
#include "core/philox.h"
#include "core/problem.h"
#include "cpu/hwy_target.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using IntTag = hn::RebindToSigned<FloatTag>;
using UintTag = hn::RebindToUnsigned<FloatTag>;
using HalfBitsTag = hn::Rebind<std::uint16_t, FloatTag>;
using Vec = hn::Vec<FloatTag>;

constexpr std::int64_t lanes = HWY_LANES(float);
// A piece of a tile that does not begin at its column 0 begins at a multiple of this: whole panels of either
// matmul, and the same place in a reduction's four accumulators.
constexpr std::int64_t col_align = 64;
static_assert(col_align % (4 * lanes) == 0);
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float log2e = 1.4426950408889634f;
constexpr float ln2 = 0.6931471805599453f;

// Row strides that are powers of two put the rows of a narrow panel into a few of the cache's sets: one more
// line a row spreads them over all.
template <class T>
constexpr std::int64_t line = 64 / static_cast<std::int64_t>(sizeof(T));

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// While one lives, numbers below 2^-126 count as 0 in this thread. Nothing here needs them, and x86 takes
// more than a hundred cycles for an operation that makes or meets one: exponentials under ALiBi do in every
// row.
class NoDenormals {
 public:
#if HWY_ARCH_X86
  NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | flush_to_zero | denormals_are_zero); }
  ~NoDenormals() { _mm_setcsr(before_); }
#else
  NoDenormals() = default;
#endif
  NoDenormals(const NoDenormals&) = delete;
  NoDenormals& operator=(const NoDenormals&) = delete;

#if HWY_ARCH_X86
 private:
  static constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
  unsigned before_;
#endif
};

// One NaN for all: what is stored as bfloat16 may lose others (store_pair). bfloat16 inputs have none such.
HWY_INLINE float canonical(float x) { return x == x ? x : not_a_number; }

HWY_INLINE Vec set(float x) { return hn::Set(FloatTag(), x); }
HWY_INLINE Vec load(const float* p) { return hn::LoadU(FloatTag(), p); }
HWY_INLINE void store(Vec x, float* p) { hn::StoreU(x, FloatTag(), p); }

// A polynomial in r, the highest coefficient first.
template <class... Rest>
HWY_INLINE Vec polynomial(Vec r, float first, Rest... rest) {
  Vec p = set(first);
  ((p = hn::MulAdd(p, r, set(rest))), ...);
  return p;
}

// 2^x for x <= 127; exactly 0 for -inf, 0 or next to it below -126, NaN for NaN. Degree 6 is within 1 ulp,
// degree 4 within 3e-6: minimax of the relative error over the interval of r, with AVX-512 of those whose 2^0
// is 1, so that the largest weight of a row is.
template <int degree = 6>
HWY_INLINE Vec exp2(Vec x) {
  static_assert(degree == 4 || degree == 6);
#if HWY_CAP_GE512
  // x less its floor, and p times 2 to the floor of x: an instruction each, which know -inf and NaN.
  const Vec r{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  const Vec p = degree == 6
                    ? polynomial(r, 2.1702254889532924e-4f, 1.243968727067113e-3f, 9.678840637207031e-3f,
                                 5.5483341217041016e-2f, 2.4022983014583588e-1f, 6.931470036506653e-1f, 1.0f)
                    : polynomial(r, 1.3426700606942177e-2f, 5.2242446690797806e-2f, 2.412802129983902e-1f,
                                 6.930448412895203e-1f, 1.0f);
  return Vec{_mm512_scalef_ps(p.raw, x.raw)};
#else
  // The second operand of Max is what x86 returns when one of them is NaN.
  const Vec bounded = hn::Max(set(-127.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; the 127 makes it a float's
  // exponent.
  const Vec magic = set(12582912.0f + 127.0f);
  const Vec shifted = hn::Add(bounded, magic);
  const Vec r = hn::Sub(bounded, hn::Sub(shifted, magic));
  const Vec p = degree == 6
                    ? polynomial(r, 1.534581242594868e-4f, 1.3399930903688073e-3f, 9.618489071726799e-3f,
                                 5.550328642129898e-2f, 2.4022646248340607e-1f, 6.931471824645996e-1f, 1.0f)
                    : polynomial(r, 9.570102207362652e-3f, 5.591785907745361e-2f, 2.40247443318367e-1f,
                                 6.931217908859253e-1f, 9.999992847442627e-1f);
  // A product, not a sum of bits: p keeps a NaN.
  return hn::Mul(p, hn::BitCast(FloatTag(), hn::ShiftLeft<23>(hn::BitCast(IntTag(), shifted))));
#endif
}

HWY_INLINE Vec tanh(Vec x) {
  const Vec y = hn::Abs(x);
  // Small: odd series, where 1 - 2 / (e^2y + 1) would cancel.
  const Vec z = hn::Mul(y, y);
  Vec p = set(-5.660789553076029e-3f);  // minimax of (tanh(y) / y - 1) / z, relative error of the sum 5e-9
  p = hn::MulAdd(p, z, set(2.060200832784176e-2f));
  p = hn::MulAdd(p, z, set(-5.372922867536545e-2f));
  p = hn::MulAdd(p, z, set(1.3331328332424164e-1f));
  p = hn::MulAdd(p, z, set(-3.3333277702331543e-1f));
  const Vec small = hn::MulAdd(hn::Mul(p, z), y, y);
  const Vec e = exp2(hn::Min(hn::Mul(y, set(2.0f * log2e)), set(60.0f)));
  const Vec large = hn::Sub(set(1.0f), hn::Div(set(2.0f), hn::Add(e, set(1.0f))));
  const Vec magnitude = hn::IfThenElse(hn::Lt(y, set(0.625f)), small, large);
  return hn::IfThenElse(hn::Eq(x, x), hn::CopySign(magnitude, x), x);
}

// Where the CPU has no such instructions Highway's conversions truncate, and know neither infinity nor NaN.
#define TESSERA_NATIVE_FLOAT16 (HWY_CAP_GE256 || HWY_ARCH_ARM)

// --- Elements of any dtype ---------------------------------------------------------------------------------

#if !TESSERA_NATIVE_FLOAT16
struct Float8Values {
  float of[256];
  constexpr Float8Values() : of() {
    for (int i = 0; i < 256; ++i) {
      const float x = to_float(float8_e4m3fn{static_cast<std::uint8_t>(i)});
      of[i] = x == x ? x * 0x1p-8f : x;  // no arithmetic of NaN while compiling
    }
  }
};
constexpr Float8Values float8_values;
#endif

HWY_INLINE Vec load_as_float(const float* p) { return load(p); }
HWY_INLINE Vec load_as_float(const bfloat16* p) {
  const auto bits = hn::LoadU(HalfBitsTag(), &p->bits);
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(UintTag(), bits)));
}
HWY_INLINE Vec load_as_float(const float16* p) {
#if TESSERA_NATIVE_FLOAT16
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  return hn::PromoteTo(FloatTag(), hn::BitCast(tag, hn::LoadU(HalfBitsTag(), &p->bits)));
#else
  float values[lanes];
  for (std::int64_t i = 0; i < lanes; ++i) values[i] = to_float(p[i]);
  return load(values);
#endif
}

HWY_INLINE Vec load_as_float(const std::int8_t* p) {
  const hn::Rebind<std::int8_t, FloatTag> tag;
  return hn::ConvertTo(FloatTag(), hn::PromoteTo(IntTag(), hn::LoadU(tag, p)));
}
// A 256th of the number: in a float16 of the same bits the exponent says 8 less, and multiplying each element
// would cost more than multiplying the sum (unit_of).
HWY_INLINE Vec load_as_float(const float8_e4m3fn* p) {
#if TESSERA_NATIVE_FLOAT16
  const hn::Rebind<std::int8_t, FloatTag> tag;
  const hn::Rebind<std::int16_t, FloatTag> wide;
  const hn::Rebind<hwy::float16_t, FloatTag> half;
  const auto bytes = hn::LoadU(tag, reinterpret_cast<const std::int8_t*>(p));
  const auto shifted = hn::ShiftLeft<7>(hn::PromoteTo(wide, bytes));
  const auto bits = hn::AndNot(hn::Set(wide, 0x4000), shifted);  // the sign is there twice
  // All ones but the sign, NaN, is the one that carries.
  const auto carry = hn::And(hn::Add(bits, hn::Set(wide, 0x0080)), hn::Set(wide, 0x4000));
  return hn::PromoteTo(FloatTag(), hn::BitCast(half, hn::Or(bits, carry)));
#else
  float values[lanes];
  for (std::int64_t i = 0; i < lanes; ++i) values[i] = float8_values.of[p[i].bits];
  return load(values);
#endif
}
// What a number that load_as_float and row_to_float made is to be multiplied by.
constexpr float unit_of(DType dtype) { return dtype == DType::float8_e4m3fn ? 256.0f : 1.0f; }

// One element, as load_as_float makes it.
template <class T>
HWY_INLINE float as_loaded(T x) {
  return to_float(x);
}
HWY_INLINE float as_loaded(float8_e4m3fn x) { return to_float(x) * 0x1p-8f; }

// The bits of bfloat16, rounded to nearest even, in the low half of each lane.
HWY_INLINE hn::Vec<UintTag> bfloat16_bits(Vec x) {
  const auto bits = hn::BitCast(UintTag(), x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(UintTag(), 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(UintTag(), 0x7FFFu))));
  const auto is_nan = hn::RebindMask(UintTag(), hn::IsNaN(x));
  return hn::IfThenElse(is_nan, hn::Set(UintTag(), 0x7FC0u), rounded);
}

HWY_INLINE void store_from_float(Vec x, float* p) { store(x, p); }
HWY_INLINE void store_from_float(Vec x, bfloat16* p) {
  hn::StoreU(hn::DemoteTo(HalfBitsTag(), hn::BitCast(IntTag(), bfloat16_bits(x))), HalfBitsTag(), &p->bits);
}
HWY_INLINE void store_from_float(Vec x, float16* p) {
#if TESSERA_NATIVE_FLOAT16
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  hn::StoreU(hn::BitCast(HalfBitsTag(), hn::DemoteTo(tag, x)), HalfBitsTag(), &p->bits);
#else
  float values[lanes];
  store(x, values);
  for (std::int64_t i = 0; i < lanes; ++i) p[i] = from_float<float16>(values[i]);
#endif
}

// n elements, zeros up to padded (a multiple of lanes).
template <class T>
HWY_INLINE void row_to_float(const T* HWY_RESTRICT from, std::int64_t n, float* HWY_RESTRICT to,
                             std::int64_t padded) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store(load_as_float(from + i), to + i);
  for (; i < n; ++i) to[i] = as_loaded(from[i]);
  for (; i < padded; ++i) to[i] = 0.0f;
}

template <class T>
HWY_INLINE void row_from_float(const float* HWY_RESTRICT from, float scale, std::int64_t n,
                               T* HWY_RESTRICT to) {
  const Vec s = set(scale);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store_from_float(hn::Mul(load(from + i), s), to + i);
  for (; i < n; ++i) to[i] = from_float<T>(from[i] * scale);
}

// n a multiple of lanes.
HWY_INLINE void scale_row(float* row, std::int64_t n, float scale) {
  if (scale == 1.0f) return;
  for (std::int64_t i = 0; i < n; i += lanes) store(hn::Mul(load(row + i), set(scale)), row + i);
}

template <class T>
HWY_INLINE void zero_row(T* to, std::int64_t n) {
  std::memset(to, 0, static_cast<std::size_t>(n) * sizeof(T));
}

// Calls body with a null pointer of the element type that dtype names.
template <class Body>
HWY_INLINE void with_type(DType dtype, Body&& body) {
  if (dtype == DType::float32) {
    body(static_cast<float*>(nullptr));
  } else if (dtype == DType::float16) {
    body(static_cast<float16*>(nullptr));
  } else {
    body(static_cast<bfloat16*>(nullptr));
  }
}

// Of a cache, too.
template <class Body>
HWY_INLINE void with_any_type(DType dtype, Body&& body) {
  if (dtype == DType::float8_e4m3fn) {
    body(static_cast<float8_e4m3fn*>(nullptr));
  } else if (dtype == DType::int8) {
    body(static_cast<std::int8_t*>(nullptr));
  } else {
    with_type(dtype, std::forward<Body>(body));
  }
}

// --- Transpose ---------------------------------------------------------------------------------------------

// In every block of four lanes: columns[c] is cell c of the four rows.
HWY_INLINE void transpose_quads(hn::Vec<UintTag> r0, hn::Vec<UintTag> r1, hn::Vec<UintTag> r2,
                                hn::Vec<UintTag> r3, hn::Vec<UintTag> (&columns)[4]) {
  const UintTag u;
  const hn::RepartitionToWide<UintTag> wide;
  const auto low01 = hn::BitCast(wide, hn::InterleaveLower(u, r0, r1));
  const auto high01 = hn::BitCast(wide, hn::InterleaveUpper(u, r0, r1));
  const auto low23 = hn::BitCast(wide, hn::InterleaveLower(u, r2, r3));
  const auto high23 = hn::BitCast(wide, hn::InterleaveUpper(u, r2, r3));
  columns[0] = hn::BitCast(u, hn::InterleaveLower(wide, low01, low23));
  columns[1] = hn::BitCast(u, hn::InterleaveUpper(wide, low01, low23));
  columns[2] = hn::BitCast(u, hn::InterleaveLower(wide, high01, high23));
  columns[3] = hn::BitCast(u, hn::InterleaveUpper(wide, high01, high23));
}

// lanes x lanes cells of 32 bits; strides in cells.
HWY_INLINE void transpose_cells(const std::uint32_t* from, std::int64_t from_row, std::uint32_t* to,
                                std::int64_t to_row) {
  const UintTag u;
  using Cells = hn::Vec<UintTag>;
  // First 4 x 4 cells inside the 128-bit blocks: quad[q][c] is column c (of each block) of rows 4q .. 4q + 3.
  constexpr int quads = static_cast<int>(lanes) / 4;
  Cells quad[quads][4];
  HWY_UNROLL(4)
  for (int q = 0; q < quads; ++q) {
    const std::uint32_t* rows = from + 4 * q * from_row;
    const Cells r0 = hn::LoadU(u, rows), r1 = hn::LoadU(u, rows + from_row);
    const Cells r2 = hn::LoadU(u, rows + 2 * from_row), r3 = hn::LoadU(u, rows + 3 * from_row);
    transpose_quads(r0, r1, r2, r3, quad[q]);
  }
  // Then the blocks.
  HWY_UNROLL(4)
  for (int c = 0; c < 4; ++c) {
#if HWY_CAP_GE512
    const __m512i even01 = _mm512_shuffle_i32x4(quad[0][c].raw, quad[1][c].raw, 0x88);
    const __m512i odd01 = _mm512_shuffle_i32x4(quad[0][c].raw, quad[1][c].raw, 0xDD);
    const __m512i even23 = _mm512_shuffle_i32x4(quad[2][c].raw, quad[3][c].raw, 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(quad[2][c].raw, quad[3][c].raw, 0xDD);
    _mm512_storeu_si512(to + c * to_row, _mm512_shuffle_i32x4(even01, even23, 0x88));
    _mm512_storeu_si512(to + (c + 4) * to_row, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    _mm512_storeu_si512(to + (c + 8) * to_row, _mm512_shuffle_i32x4(even01, even23, 0xDD));
    _mm512_storeu_si512(to + (c + 12) * to_row, _mm512_shuffle_i32x4(odd01, odd23, 0xDD));
#elif HWY_CAP_GE256
    hn::StoreU(hn::ConcatLowerLower(u, quad[1][c], quad[0][c]), u, to + c * to_row);
    hn::StoreU(hn::ConcatUpperUpper(u, quad[1][c], quad[0][c]), u, to + (c + 4) * to_row);
#else
    hn::StoreU(quad[0][c], u, to + c * to_row);
#endif
  }
}

// --- Reductions, four accumulators wide --------------------------------------------------------------------

HWY_INLINE float max_of(Vec x) { return hn::GetLane(hn::MaxOfLanes(FloatTag(), x)); }
HWY_INLINE float sum_of(Vec x) { return hn::GetLane(hn::SumOfLanes(FloatTag(), x)); }

// --- Dropout -----------------------------------------------------------------------------------------------

// The high and low halves of a * b, lane by lane.
HWY_INLINE void multiply(hn::Vec<UintTag> a, hn::Vec<UintTag> b, hn::Vec<UintTag>& high,
                         hn::Vec<UintTag>& low) {
  const UintTag u;
  const auto even = hn::BitCast(u, hn::MulEven(a, b));
  const auto odd = hn::BitCast(u, hn::MulEven(hn::DupOdd(a), hn::DupOdd(b)));
  low = hn::OddEven(hn::DupEven(odd), even);
  high = hn::OddEven(odd, hn::DupOdd(even));
}

// The 16 random bits of keys begin .. end - 1 of one row (begin a multiple of 8). `to` has room for
// 8 * lanes more than that.
HWY_INLINE void dropout_bits(const Dropout& dropout, unsigned head_index, unsigned query, std::int64_t begin,
                             std::int64_t end, std::uint16_t* to) {
  const UintTag u;
  const Philox::Block counter = dropout.counter(head_index, query, 0);
  const auto mul0 = hn::Set(u, Philox::mul0), mul1 = hn::Set(u, Philox::mul1);
  for (std::int64_t block = begin / Philox::keys_per_block; block * Philox::keys_per_block < end;
       block += lanes) {
    auto c0 = hn::Or(hn::Iota(u, static_cast<unsigned>(block)), hn::Set(u, counter.word[0]));
    auto c1 = hn::Set(u, counter.word[1]), c2 = hn::Set(u, counter.word[2]), c3 = hn::Set(u, counter.word[3]);
    unsigned key0 = static_cast<unsigned>(dropout.seed), key1 = static_cast<unsigned>(dropout.seed >> 32);
    for (int round = 0; round < Philox::rounds; ++round, key0 += Philox::weyl0, key1 += Philox::weyl1) {
      hn::Vec<UintTag> high0, low0, high1, low1;
      multiply(mul0, c0, high0, low0);
      multiply(mul1, c2, high1, low1);
      c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(u, key0));
      c1 = low1;
      c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(u, key1));
      c3 = low0;
    }
    // Word by word and block by block is key by key, two keys a word, the low half first.
    alignas(64) std::uint32_t words[4 * lanes];
    hn::StoreInterleaved4(c0, c1, c2, c3, u, words);
    std::memcpy(to + (block * Philox::keys_per_block - begin), words, sizeof(words));
  }
}

// 1 where the element is kept, else 0.
HWY_INLINE Vec kept(const std::uint16_t* bits, unsigned threshold) {
  const auto wide = hn::BitCast(IntTag(), hn::PromoteTo(UintTag(), hn::LoadU(HalfBitsTag(), bits)));
  const auto keep = hn::Lt(wide, hn::Set(IntTag(), static_cast<std::int32_t>(threshold)));
  return hn::IfThenElseZero(hn::RebindMask(FloatTag(), keep), set(1.0f));
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
