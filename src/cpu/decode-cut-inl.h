// How decode's work is cut: which rows stream, which splits a sequence has, and what a task takes of it.
#pragma once

#include "core/split.h"
#include "cpu/few-inl.h"
#include "cpu/forward-inl.h"
#if defined(TESSERA_CPU_AMX)
#include "cpu/few-amx-inl.h"
#elif TESSERA_CPU_DOTS
#include "cpu/few-packs-inl.h"
#include "cpu/few-quads-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

constexpr std::int64_t few_rows = 16;      // stream
constexpr std::int64_t stream_block = 64;  // keys; of all heads of a task, a part of the second-level cache
constexpr std::int64_t stream_task_rows = 64;  // of all key heads of a task
constexpr std::int64_t split_rows = 64;        // more are tasks enough: no automatic splits
constexpr std::int64_t max_decode_rows = 256;  // of a task
#if defined(TESSERA_CPU_AMX)
constexpr std::int64_t few_col_unit = col_unit;
constexpr std::int64_t rows_of_short_splits = few_rows;
#else
constexpr std::int64_t few_col_unit = cell_step;
constexpr std::int64_t rows_of_short_splits = 4;
#endif
#if TESSERA_CPU_DOTS
// Of fewest_rows rows and more.
#if defined(TESSERA_CPU_AMX)
using BlockProducts = TileProducts;
#else
using BlockProducts = QuadProducts;
#endif
static_assert(few_rows <= lane_rows &&
              stream_task_rows / BlockProducts::fewest_rows <= BlockProducts::most_heads);
static_assert(BlockProducts::most_heads * BlockProducts::q_rows(BlockProducts::fewest_rows) <=
              2 * stream_task_rows);
#endif
// A block's columns begin with its first key: so it is one unit of them.
static_assert(forward_tiles.block_n % stream_block == 0 && stream_block == col_align);
// The more rows, the more a split leaves behind to be merged: with few of them, or where they take little
// time each, tasks that end at the same time count for more.
constexpr Splits::Rule split_rule(std::int64_t rows) {
  return {forward_tiles.block_n, rows <= rows_of_short_splits ? 512 : 1024, 64};
}
static_assert(few_rows <= forward_tiles.tile_m && 512 % forward_tiles.block_n == 0);

struct DecodeCut {
  std::int64_t rows;  // of a key head: the group's heads, query by query
  std::int64_t row_blocks;
  Splits splits;
  std::int64_t most_splits;  // of such a sequence, whatever its keys: what the workspace has room for

  [[nodiscard]] std::int64_t pieces() const { return splits.count * row_blocks; }  // of a key head
};

HWY_INLINE std::int64_t decode_task_rows(const Problem& problem) {
  const std::int64_t row_bytes = problem.head_dim * static_cast<std::int64_t>(sizeof(Element)) +
                                 problem.head_dim_v * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most = std::min(
      {forward_tiles.task_bytes / row_bytes, max_decode_rows, problem.max_seqlen_q * problem.group_size});
  return round_up(std::max(most, stream_task_rows), forward_tiles.tile_m);
}

HWY_INLINE DecodeCut decode_cut(const Problem& problem, const Sequence& sequence, std::int64_t task_rows) {
  DecodeCut cut;
  cut.rows = sequence.allocated_q * problem.group_size;
  cut.row_blocks = round_up(cut.rows, task_rows) / task_rows;
  const std::int64_t given = problem.cache.num_splits;
  const std::int64_t asked = given == 0 && cut.rows > split_rows ? 1 : given;
  cut.splits = Splits::of(sequence.seqlen_k, asked, split_rule(cut.rows));
  cut.most_splits = Splits::most(problem.max_seqlen_k, asked, split_rule(cut.rows));
  return cut;
}

// Packs take rows of the cache as a whole: they pay where these are long (NOTES.md). It is the problem that
// decides, and the CPU, not what a task takes of it, nor the size of a page: a sequence's bits depend on
// neither.
HWY_INLINE bool in_packs([[maybe_unused]] const Problem& problem, [[maybe_unused]] std::int64_t rows) {
#if TESSERA_CPU_DOTS && !defined(TESSERA_CPU_AMX)
  const std::int64_t least = least_row_bytes();
  const auto is_long = [&](const View& view, std::int64_t dim) {
    return (problem.num_heads_k == 1 || view.head == dim) &&
           problem.num_heads_k * dim * static_cast<std::int64_t>(sizeof(bfloat16)) >= least;
  };
  return problem.k.dtype == DType::bfloat16 && rows <= pack_rows &&
         problem.num_heads_k * pack_width(rows) <= most_places && is_long(problem.k, problem.head_dim) &&
         is_long(problem.v, problem.head_dim_v);
#else
  return false;
#endif
}

// What a task of a sequence takes of it at most. It changes the order of the work, and no result.
struct DecodeShare {
  std::int64_t heads, splits;

  // pieces is how many the call has of one key head: there have to be tasks enough for the threads.
  static DecodeShare of(const Problem& problem, const DecodeCut& cut, std::int64_t pieces, int threads) {
    const bool adjacent = problem.k.head == problem.head_dim && problem.v.head == problem.head_dim_v;
    if (!adjacent || cut.rows > few_rows) return {1, 1};
    const std::int64_t most =
        std::min(problem.num_heads_k, stream_task_rows / std::max<std::int64_t>(cut.rows, 1));
    const std::int64_t heads =
        heads_of_task(problem.num_heads_k, most, in_packs(problem, cut.rows), pieces, threads);
    const std::int64_t tasks = pieces * ((problem.num_heads_k + heads - 1) / heads);
    // Threads are not equally fast, where two share a core least of all: so they take many tasks each.
    constexpr std::int64_t tasks_of_thread = 32;
    return {heads, std::clamp<std::int64_t>(tasks / (tasks_of_thread * static_cast<std::int64_t>(threads)), 1,
                                            cut.splits.count)};
  }
  // Fewer than `most` where there are few pieces.
  static std::int64_t heads_of_task(std::int64_t all, std::int64_t most, bool packs, std::int64_t pieces,
                                    std::int64_t threads) {
    if (threads == 1 || pieces >= 4 * threads) return most;
    std::int64_t heads = most;
    if (!packs) {
      while (heads > 1 && pieces * (all / heads) < 4 * threads) heads = (heads + 1) / 2;
      return heads;
    }
    // A pack of fewer heads takes as long as a fuller one for what it does once: a head more.
    const auto time_of = [&](std::int64_t h) {
      const std::int64_t tasks = pieces * ((all + h - 1) / h);
      return (tasks + threads - 1) / threads * (h + 1);
    };
    for (std::int64_t h = most; h > 1;) {
      h = (h + 1) / 2;
      if (time_of(h) < time_of(heads)) heads = h;
    }
    return heads;
  }
  [[nodiscard]] std::int64_t tasks_of_head(const DecodeCut& cut) const {
    return (cut.splits.count + splits - 1) / splits * cut.row_blocks;
  }
  [[nodiscard]] std::int64_t tasks(const Problem& problem, const DecodeCut& cut) const {
    return (problem.num_heads_k + heads - 1) / heads * tasks_of_head(cut);
  }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
