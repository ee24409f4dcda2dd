// Decode's first stage: new keys and values go to the cache, rotated, and rounded where it is of 8 bits.
#pragma once

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

HWY_INLINE float angle_at(const View& view, std::int64_t position, std::int64_t i) {
  const std::int64_t at = position * view.seq + i;
  if (view.dtype == DType::float16) return to_float(static_cast<const float16*>(view.data)[at]);
  if (view.dtype == DType::bfloat16) return to_float(static_cast<const bfloat16*>(view.data)[at]);
  return static_cast<const float*>(view.data)[at];
}

// One row of q or k_new, in place: the pairs of its first rotary_dim elements.
template <class T>
HWY_INLINE void rotate_row(const Cache& cache, std::int64_t position, T* row) {
  const std::int64_t half = cache.rotary_dim / 2;
  const std::int64_t step = cache.interleaved ? 2 : 1, distance = cache.interleaved ? 1 : half;
  for (std::int64_t i = 0; i < half; ++i) {
    T &x = row[i * step], &y = row[i * step + distance];
    const float cos = angle_at(cache.cos, position, i), sin = angle_at(cache.sin, position, i);
    const float a = to_float(x), b = to_float(y);
    x = from_float<T>(a * cos - b * sin);
    y = from_float<T>(a * sin + b * cos);
  }
}

// Of one row for an 8-bit cache.
template <class T, class Stored>
HWY_INLINE void quantize_row(const T* from, std::int64_t n, const Cache& cache, std::int64_t position,
                             bool rotates, float scale, Stored* to) {
  float row[max_head_dim];
  row_to_float(from, n, row, n);
  if (rotates) rotate_row(cache, position, row);
  for (std::int64_t i = 0; i < n; ++i) to[i] = from_float<Stored>(row[i] / scale);
}

// The new keys and values of one key head.
template <class Stored>
HWY_NOINLINE void append_quantized(const Problem& problem, std::int64_t b, std::int64_t h) {
  const Sequence sequence = problem.sequence(b);
  const Cache& cache = problem.cache;
  with_type(problem.dtype, [&](auto* type) HWY_ATTR {
    using T = std::remove_pointer_t<decltype(type)>;
    for (std::int64_t j = 0; j < sequence.seqlen_new; ++j) {
      const std::int64_t position = cache.seqlens[b] + j, from = sequence.new_begin + j;
      const Problem::Slot slot = problem.slot(b, position);
      quantize_row(static_cast<const T*>(cache.k_new.data) + cache.k_new.offset(b, from, h), problem.head_dim,
                   cache, position, cache.rotates(), cache.k_scale.of(h),
                   static_cast<Stored*>(problem.k.data) + problem.k.offset(slot.b, slot.s, h));
      quantize_row(static_cast<const T*>(cache.v_new.data) + cache.v_new.offset(b, from, h),
                   problem.head_dim_v, cache, position, false, cache.v_scale.of(h),
                   static_cast<Stored*>(problem.v.data) + problem.v.offset(slot.b, slot.s, h));
    }
  });
}
HWY_NOINLINE void append_task(const Problem& problem, std::int64_t b, std::int64_t h) {
  if (problem.k.dtype == DType::float8_e4m3fn) return append_quantized<float8_e4m3fn>(problem, b, h);
  if (problem.k.dtype == DType::int8) return append_quantized<std::int8_t>(problem, b, h);
  const Sequence sequence = problem.sequence(b);
  const Cache& cache = problem.cache;
  with_type(problem.dtype, [&](auto* type) HWY_ATTR {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto row_of = [](const View& view, std::int64_t i, std::int64_t s, std::int64_t head) {
      return static_cast<T*>(view.data) + view.offset(i, s, head);
    };
    for (std::int64_t j = 0; j < sequence.seqlen_new; ++j) {
      const std::int64_t position = cache.seqlens[b] + j, from = sequence.new_begin + j;
      const Problem::Slot slot = problem.slot(b, position);
      T* k = row_of(problem.k, slot.b, slot.s, h);
      std::memcpy(k, row_of(cache.k_new, b, from, h), static_cast<std::size_t>(problem.head_dim) * sizeof(T));
      if (cache.rotates()) rotate_row(cache, position, k);
      std::memcpy(row_of(problem.v, slot.b, slot.s, h), row_of(cache.v_new, b, from, h),
                  static_cast<std::size_t>(problem.head_dim_v) * sizeof(T));
    }
  });
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
