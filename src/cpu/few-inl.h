// The rows of a key head that stream: s = q kᵀ of a block of keys, and o += p v, in the products that suit
// the cache's type. Head by head, but for few-packs-inl.h.
#pragma once

#include "cpu/append-inl.h"
#include "cpu/dots-inl.h"
#include "cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

struct Few {
  float *q, *s, *o;
  std::int64_t q_ld, s_ld, o_ld, rows;
};

// Row `row` of q, with zeros up to ld.
HWY_INLINE void load_query(const TaskRows& task, std::int64_t row, float* to, std::int64_t ld) {
  const Problem& problem = task.problem;
  with_type(problem.q.dtype, [&](auto* type) HWY_ATTR {
    const auto* from = static_cast<decltype(type)>(problem.q.data) +
                       problem.q.offset(task.b, task.sequence.q_begin + task.query(row), task.head(row));
    row_to_float(from, problem.head_dim, to, ld);
  });
  if (problem.cache.rotates()) rotate_row(problem.cache, problem.query_position(task.b, task.query(row)), to);
}

// Against rows of the cache as T. p takes the place of s. How often the rows are passed over: lines are
// called for with all of the passes. Products that work block by block have a softmax of their own.
template <class T>
struct FloatProducts {
  using P = float;
  static constexpr bool by_block = false, heads_at_once = false;
  struct State {  // of a task's thread
    explicit State(std::int64_t /*rows*/) {}
  };
  static std::int64_t q_rows(std::int64_t rows) { return rows; }  // that q takes
  static std::int64_t passes_of_scores(std::int64_t rows) { return (rows + stream_rows - 1) / stream_rows; }
  static std::int64_t passes_of_values(std::int64_t rows) { return passes_of_scores(rows); }
  static HWY_INLINE void load_queries(const TaskRows& task, const Few& few) {
    for (std::int64_t r = 0; r < few.rows; ++r) load_query(task, r, few.q + r * few.q_ld, few.q_ld);
  }
  static HWY_INLINE void scores(const Few& few, const void* const* k_rows, std::int64_t offset,
                                std::int64_t keys, std::int64_t dim, Next& next) {
    over_few_rows(few.rows, [&](std::int64_t r, auto count) HWY_ATTR {
      constexpr int width = stream_width(count);
      stream_scores<count, width, T>(few.q + r * few.q_ld, few.q_ld, k_rows, offset, keys, dim,
                                     few.s + r * few.s_ld, few.s_ld, next);
    });
  }
  static HWY_INLINE void after_softmax(const Few& /*few*/, std::int64_t /*keys*/) {}
  static HWY_INLINE void values(const Few& few, const void* const* v_rows, std::int64_t offset,
                                std::int64_t keys, std::int64_t dim, Next& next) {
    over_few_rows(few.rows, [&](std::int64_t r, auto count) HWY_ATTR {
      stream_values<count, T>(few.s + r * few.s_ld, few.s_ld, v_rows, offset, keys, dim, few.o + r * few.o_ld,
                              few.o_ld, next);
    });
  }
  static HWY_INLINE void after_values(const Few& /*few*/, std::int64_t /*dim*/) {}
};

// The same with dot products, of fewer than four rows: q and p are bfloat16, in the place of the floats.
struct DotProducts {
  // In the place of s, of which a pair of vectors must have been read before one of p is stored there: where
  // it is four vectors instead (the emulation of AMX in 256 bits), p is rounded afterwards.
  using P = std::conditional_t<pair_distance == lanes, DotCell, float>;
  static constexpr bool by_block = false, heads_at_once = false;
  static constexpr int most_rows = 3;
  using State = FloatProducts<float>::State;
  static std::int64_t q_rows(std::int64_t rows) { return rows; }
  static std::int64_t passes_of_scores(std::int64_t /*rows*/) { return 1; }
  static std::int64_t passes_of_values(std::int64_t /*rows*/) { return 1; }
  static HWY_INLINE void load_queries(const TaskRows& task, const Few& few) {
    const std::int64_t dim = task.problem.head_dim, rounded = round_up(dim, lanes);
    for (std::int64_t r = 0; r < few.rows; ++r) {
      float* row = few.q + r * few.q_ld;
      load_query(task, r, row, rounded);
      round_row(row, rounded);
      zero_row(cells(row) + rounded, round_up(dim, cell_step) - rounded);
    }
  }
  static HWY_INLINE void scores(const Few& few, const void* const* k_rows, std::int64_t offset,
                                std::int64_t keys, std::int64_t dim, Next& next) {
    over_few_rows<most_rows>(few.rows, [&](std::int64_t r, auto count) HWY_ATTR {
      dot_scores<count>(cells(few.q + r * few.q_ld), 2 * few.q_ld, k_rows, offset, keys, dim,
                        few.s + r * few.s_ld, few.s_ld, next);
    });
  }
  static HWY_INLINE void after_softmax(const Few& few, std::int64_t keys) {
    if constexpr (std::is_same_v<P, float>) {
      for (std::int64_t r = 0; r < few.rows; ++r) round_row(few.s + r * few.s_ld, round_up(keys, lanes));
    }
  }
  static HWY_INLINE void values(const Few& few, const void* const* v_rows, std::int64_t offset,
                                std::int64_t keys, std::int64_t dim, Next& next) {
    over_few_rows<most_rows>(few.rows, [&](std::int64_t r, auto count) HWY_ATTR {
      dot_values<count>(RowCells{cells(few.s + r * few.s_ld), 2 * few.s_ld}, v_rows, offset, keys, dim,
                        few.o + r * few.o_ld, few.o_ld, next);
    });
  }
  static HWY_INLINE void after_values(const Few& few, std::int64_t dim) {
    for (std::int64_t r = 0; r < few.rows; ++r) unzip_row(few.o + r * few.o_ld, dim);
  }

 private:
  static HWY_INLINE bfloat16* cells(float* row) { return reinterpret_cast<bfloat16*>(row); }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
