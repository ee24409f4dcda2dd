// Decode: a few queries of each sequence against its cache, which is read once.
//
// First k_new and v_new are appended (append-inl.h). Then a task is (sequence, some key heads, some splits of
// the keys): all query heads that share a key head are rows of one tile, query by query, so that no other
// task reads those keys (core/split.h; many rows are cut into blocks of task_rows). A sequence of several
// splits leaves acc_o, maximum and sum of each in the workspace, and a last pass merges them.
//
// Few rows stream: k and v are read row by row where they lie, by way of pointers, so that a page may have
// any size; converting and packing them for a matmul would cost more than the products. Key heads that lie
// side by side are taken together, block of keys by block of keys: memory then goes by in one piece, which is
// twice as fast as rows at a distance. So are splits, one after another: the first block of a task is the one
// that nobody has called for. Many rows take forward's way.
#pragma once

#include "cpu/append-inl.h"
#include "cpu/decode-cut-inl.h"
#include "cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// --- Memory ---------------------------------------------------------------------------------------------

// One thread's arrays.
struct DecodeScratch : ForwardScratch {
  float *few_q, *few_s, *few_o;  // of rows that stream; q and s with room for tiles of them
  std::int64_t few_cols;         // of few_o
  const void **k_rows[2], **v_rows[2];
  float* wide;  // a block's rows of one head, and where they lie
  const void** wide_rows;
  std::int64_t wide_ld;

  DecodeScratch(Carver& carve, const Problem& problem, std::int64_t task_rows)
      : ForwardScratch(carve, problem, task_rows) {
    few_q = carve.take<float>(2 * stream_task_rows * depth_ld);
    few_s = carve.take<float>((stream_task_rows + few_rows) * few_ld);
    few_cols = round_up(problem.head_dim_v, few_col_unit);
    few_o = carve.take<float>(stream_task_rows * few_cols);
    for (int i = 0; i < 2; ++i) {
      k_rows[i] = carve.take<const void*>(stream_block + stream_keys);
      v_rows[i] = carve.take<const void*>(stream_block + stream_keys);
    }
    wide_ld = round_up(std::max(problem.head_dim, problem.head_dim_v), lanes) + line<float>;
    wide = carve.take<float>(problem.k.dtype == DType::float8_e4m3fn ? stream_block * wide_ld : 0);
    wide_rows = carve.take<const void*>(stream_block + stream_keys);
  }
  // Of the rows from `first` on, as they stream.
  [[nodiscard]] DecodeScratch from(std::int64_t first) const {
    DecodeScratch part = *this;
    part.few_s += first * few_ld;
    part.value_cols = few_cols;
    part.acc_o = few_o + first * few_cols;
    part.row_max += first;
    part.row_sum += first * lanes;
    part.alpha += first;
    part.tile_ld = few_ld;
    return part;
  }
  static constexpr std::int64_t few_ld = stream_block + 16;
};

// Of sequences of several splits, row by row: split s of row r of key head h is row
// first_partial[b] + (s * num_heads_k + h) * rows + r.
struct DecodeLayout {
  std::int64_t task_rows;
  std::int64_t *first_task, *first_partial;
  float *o_partial, *max_partial, *sum_partial;
  std::byte* scratch;  // one a thread
  std::size_t scratch_bytes, bytes;

  DecodeLayout(const Problem& problem, int threads, void* workspace) {
    task_rows = decode_task_rows(problem);
    Carver one(nullptr);
    DecodeScratch(one, problem, task_rows);
    scratch_bytes = one.used();
    std::int64_t partial_rows = 0;
    Carver carve(workspace);
    first_task = carve.take<std::int64_t>(sequence_count(problem) + 1);
    first_partial = carve.take<std::int64_t>(sequence_count(problem) + 1);
    for (std::int64_t b = 0; b < sequence_count(problem); ++b) {
      if (workspace != nullptr) first_partial[b] = partial_rows;
      const DecodeCut cut = decode_cut(problem, sequence_or_rest(problem, b), task_rows);
      if (b < problem.batch && cut.most_splits > 1)
        partial_rows += cut.most_splits * problem.num_heads_k * cut.rows;
    }
    o_partial = carve.take<float>(partial_rows * problem.head_dim_v);
    max_partial = carve.take<float>(partial_rows);
    sum_partial = carve.take<float>(partial_rows);
    scratch = carve.take<std::byte>(static_cast<std::int64_t>(scratch_bytes) * threads);
    bytes = carve.used();
  }
};

// --- Keys and values where they lie ------------------------------------------------------------------------

// How many of the `keys` from slot s on lie one after another.
HWY_INLINE std::int64_t run_length(const Problem& problem, std::int64_t s, std::int64_t keys) {
  if (problem.cache.page_table == nullptr) return keys;
  return std::min(keys, problem.cache.page_size - s % problem.cache.page_size);
}

// run(slot, index, count) for each run of the `keys` from slot s on.
template <class Run>
HWY_INLINE void over_runs(const Problem& problem, std::int64_t b, std::int64_t s, std::int64_t keys,
                          const Run& run) {
  for (std::int64_t done = 0; done < keys;) {
    const std::int64_t count = run_length(problem, s + done, keys - done);
    run(problem.slot(b, s + done), done, count);
    done += count;
  }
}

// Where the keys and values of a block lie. Behind them stand pointers more, of the last key: scores are made
// in groups, and what is made of those is hidden.
HWY_INLINE void find_rows(const Problem& problem, std::int64_t b, std::int64_t s, std::int64_t keys,
                          std::int64_t h, const void** k_rows, const void** v_rows) {
  over_runs(problem, b, s, keys, [&](Problem::Slot slot, std::int64_t at, std::int64_t count) {
    const std::int64_t size = size_of(problem.k.dtype);
    const auto* k =
        static_cast<const std::byte*>(problem.k.data) + problem.k.offset(slot.b, slot.s, h) * size;
    const auto* v =
        static_cast<const std::byte*>(problem.v.data) + problem.v.offset(slot.b, slot.s, h) * size;
    for (std::int64_t i = 0; i < count; ++i) {
      k_rows[at + i] = k + i * problem.k.seq * size;
      v_rows[at + i] = v + i * problem.v.seq * size;
    }
  });
  for (std::int64_t i = keys; keys > 0 && i < keys + stream_keys - 1; ++i) k_rows[i] = k_rows[keys - 1];
}

// --- One task ----------------------------------------------------------------------------------------------

// What a task does, for each of its key heads.
struct DecodeWork {
  const Problem& problem;
  const DecodeLayout& layout;
  Sequence sequence;
  DecodeCut cut;
  std::int64_t b;
  BasicRange<std::int64_t> kv_heads, splits;
  Range rows;       // of each key head
  Range keys = {};  // that some of the rows see, of all its splits

  [[nodiscard]] TaskRows task(std::int64_t kv_head) const {
    return {problem, sequence, b, kv_head * problem.group_size, problem.group_size};
  }
};

// The first `keys` rows of one head to floats, and pointers for whole groups of keys. For each row as many
// lines of `next` are called for.
template <class T>
HWY_NOINLINE const void* const* widen_rows(const DecodeScratch& scratch, const void* const* rows,
                                           std::int64_t offset, std::int64_t keys, std::int64_t dim,
                                           Next& next) {
  const int lines = static_cast<int>((dim * static_cast<std::int64_t>(sizeof(T)) + 63) / 64);
  for (std::int64_t j = 0; j < keys; ++j) {
    float* to = scratch.wide + j * scratch.wide_ld;
    next.fetch(lines);
    row_to_float(static_cast<const T*>(rows[j]) + offset, dim, to, dim);
    scratch.wide_rows[j] = to;
  }
  for (std::int64_t j = keys; keys > 0 && j < keys + stream_keys - 1; ++j)
    scratch.wide_rows[j] = scratch.wide_rows[keys - 1];
  return scratch.wide_rows;
}

// The results of one key head: o and lse, or its part of them.
HWY_NOINLINE void finish_head(const DecodeWork& work, const DecodeScratch& scratch, std::int64_t kv_head,
                              std::int64_t split) {
  if (work.cut.splits.count == 1) return finish_rows(work.task(kv_head), scratch, work.rows);
  const DecodeLayout& layout = work.layout;
  const std::int64_t dim = work.problem.head_dim_v;
  const std::int64_t to = layout.first_partial[work.b] +
                          (split * work.problem.num_heads_k + kv_head) * work.cut.rows + work.rows.begin;
  for (std::int64_t r = 0; r < work.rows.size(); ++r) {
    std::memcpy(layout.o_partial + (to + r) * dim, scratch.acc_o + r * scratch.value_cols,
                static_cast<std::size_t>(dim) * sizeof(float));
    layout.max_partial[to + r] = scratch.row_max[r];
    layout.sum_partial[to + r] = sum_of(load(scratch.row_sum + r * lanes));
  }
}

// The softmax of one head's block, in place, and o scaled by what it makes of the maxima.
template <class P>
HWY_NOINLINE void stream_softmax(const DecodeWork& work, const DecodeScratch& scratch, std::int64_t h,
                                 const Few& few, std::int64_t key, Range cols) {
  const DecodeScratch part = scratch.from(h * few.rows);
  softmax_tile(work.task(work.kv_heads.begin + h), part, few.s, reinterpret_cast<P*>(few.s),
               std::is_same_v<P, float> ? few.s_ld : 2 * few.s_ld, work.rows, 0, key, cols,
               [](std::int64_t) {});
  for (std::int64_t r = 0; r < few.rows; ++r) scale_row(few.o + r * few.o_ld, few.o_ld, part.alpha[r]);
}

// The state of all rows that stream, before and after a split.
HWY_NOINLINE void start_split(const DecodeWork& work, const DecodeScratch& scratch, std::int64_t split) {
  for (std::int64_t h = 0; h < work.kv_heads.size(); ++h) {
    start_rows(work.task(work.kv_heads.begin + h), scratch.from(h * work.cut.rows), work.rows, split == 0, 1);
  }
}
HWY_NOINLINE void finish_split(const DecodeWork& work, const DecodeScratch& scratch, std::int64_t split) {
  for (std::int64_t h = 0; h < work.kv_heads.size(); ++h)
    finish_head(work, scratch.from(h * work.cut.rows), work.kv_heads.begin + h, split);
}

// Key heads that lie side by side, without a row to spare: block by block, first the scores of all of them,
// then the values. Meanwhile the block's values and then the next block's keys are called for. Where float8
// rows would be converted more than once, which costs, they are converted before.
template <class T, class Products>
HWY_NOINLINE void stream_task_as(const DecodeWork& work, const DecodeScratch& scratch) {
  constexpr bool costly = std::is_same_v<T, float8_e4m3fn>;
  constexpr std::int64_t size = sizeof(T);
  const Problem& problem = work.problem;
  const std::int64_t rows = work.rows.size(), heads = work.kv_heads.size();
  const std::int64_t dim = problem.head_dim, dim_v = problem.head_dim_v;
  const bool widened = costly && rows > stream_rows;
  const std::int64_t score_passes = widened ? 1 : Products::passes_of_scores(rows);
  const std::int64_t value_passes = widened ? 1 : Products::passes_of_values(rows);
  const auto few_of = [&](std::int64_t h) {
    const std::int64_t first = h * rows;
    return Few{scratch.few_q + h * Products::q_rows(rows) * scratch.depth_ld,
               scratch.few_s + first * DecodeScratch::few_ld,
               scratch.few_o + first * scratch.few_cols,
               scratch.depth_ld,
               DecodeScratch::few_ld,
               scratch.few_cols,
               rows};
  };
  const auto block_at = [&](std::int64_t key) {
    return Range{key, std::min<long long>(key + stream_block, work.keys.end)};
  };
  const auto find = [&](Range block, int side) {
    find_rows(problem, work.b, work.sequence.k_begin + block.begin, block.size(), work.kv_heads.begin,
              scratch.k_rows[side], scratch.v_rows[side]);
  };
  const auto next_keys = [&](Range block, int side) {
    return Next(scratch.k_rows[side], block.size(), heads * dim * size, rows, value_passes);
  };
  [[maybe_unused]] typename Products::State state(rows);
  int side = 0;
  Range block = block_at(work.keys.begin / stream_block * stream_block);
  find(block, side);
  if constexpr (!Products::heads_at_once) next_keys(block, side).fetch_all();
  for (std::int64_t h = 0; h < heads; ++h)
    Products::load_queries(work.task(work.kv_heads.begin + h), few_of(h));
  const Range seen = work.task(work.kv_heads.begin).keys_of_any(work.rows);
  std::int64_t split = work.splits.begin;
  const auto start = [&] {
    start_split(work, scratch, split);
    if constexpr (Products::by_block) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const DecodeScratch part = scratch.from(h * rows);
        state.start_rows(h, part.row_max, part.row_sum);
      }
    }
  };
  start();
  const auto finish = [&] {
    if constexpr (Products::by_block) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const DecodeScratch part = scratch.from(h * rows);
        state.finish_rows(h, part.row_max, part.row_sum);
      }
    }
    for (std::int64_t h = 0; h < heads; ++h) Products::after_values(few_of(h), dim_v);
    finish_split(work, scratch, split);
    if (++split < work.splits.end) start();
  };
  for (; !block.empty(); side = 1 - side) {
    while (block.begin >= (split + 1) * work.cut.splits.keys) finish();
    const Range next_block = block_at(block.begin + stream_block);
    find(next_block, 1 - side);
    const Range cols = columns_of(seen, block);
    const std::int64_t end = std::min<std::int64_t>(cols.end, block.size());
    const void* const* k_rows = scratch.k_rows[side];
    const void* const* v_rows = scratch.v_rows[side];
    [[maybe_unused]] Next next(v_rows, block.size(), heads * dim_v * size, rows, score_passes), none;
    const auto task_of = [&](std::int64_t h) { return work.task(work.kv_heads.begin + h); };
    if constexpr (Products::heads_at_once) {
      state.start_block(k_rows, v_rows, end, dim, dim_v, heads, scratch.k_rows[1 - side],
                        scratch.v_rows[1 - side], next_block.size());
      state.scores(few_of(0), heads, dim);
      state.softmax(task_of, few_of(0), heads, work.rows, block.begin, cols);
      state.values(few_of(0), heads, dim_v);
    } else if constexpr (Products::by_block) {
      const auto softmax = [&](std::int64_t h) {
        state.softmax(task_of(h), few_of(h), h, work.rows, block.begin, cols, next);
      };
      state.start_block(k_rows, v_rows, end, dim, dim_v);
      for (std::int64_t h = 0; h < heads; ++h) {
        state.scores(few_of(h), h, h * problem.k.head, next);
        if (h > 0) softmax(h - 1);
      }
      softmax(heads - 1);
      next = next_keys(next_block, 1 - side);
      for (std::int64_t h = 0; h < heads; ++h) state.values(few_of(h), h * problem.v.head, next);
      state.finish_values();
    } else {
      for (std::int64_t h = 0; h < heads; ++h) {
        const Few few = few_of(h);
        if (widened) {
          const void* const* wide = widen_rows<T>(scratch, k_rows, h * problem.k.head, end, dim, next);
          FloatProducts<float>::scores(few, wide, 0, end, dim, none);
        } else {
          Products::scores(few, k_rows, h * problem.k.head, end, dim, next);
        }
        stream_softmax<typename Products::P>(work, scratch, h, few, block.begin, cols);
        Products::after_softmax(few, end);
      }
      next = next_keys(next_block, 1 - side);
      for (std::int64_t h = 0; h < heads; ++h) {
        if (widened) {
          const void* const* wide = widen_rows<T>(scratch, v_rows, h * problem.v.head, end, dim_v, next);
          FloatProducts<float>::values(few_of(h), wide, 0, end, dim_v, none);
        } else {
          Products::values(few_of(h), v_rows, h * problem.v.head, end, dim_v, next);
        }
      }
    }
    block = next_block;
  }
  while (split < work.splits.end) finish();
}
#if TESSERA_CPU_DOTS && !defined(TESSERA_CPU_AMX)
static_assert(most_places <= stream_task_rows &&
              most_places * col_align <= (stream_task_rows + few_rows) * DecodeScratch::few_ld);
#endif
HWY_NOINLINE void stream_task(const DecodeWork& work, const DecodeScratch& scratch) {
  with_any_type(work.problem.k.dtype, [&](auto* type) HWY_ATTR {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr bool dots = TESSERA_CPU_DOTS && std::is_same_v<T, bfloat16>;
#if TESSERA_CPU_DOTS
    // p of whole tiles, of whole quads even more so, has room in the place of s.
    static_assert(lane_rows / 2 * col_align <= 2 * BlockProducts::fewest_rows * DecodeScratch::few_ld);
    if constexpr (dots) {
#if !defined(TESSERA_CPU_AMX)
      if (in_packs(work.problem, work.cut.rows)) return stream_task_as<T, PackProducts>(work, scratch);
#endif
      if (work.rows.size() >= BlockProducts::fewest_rows)
        return stream_task_as<T, BlockProducts>(work, scratch);
    }
#endif
    stream_task_as<T, std::conditional_t<dots, DotProducts, FloatProducts<T>>>(work, scratch);
  });
}

// Rows of the cache in the matmul's form, as rows_to_transpose and rows_for_b make them (`direct`) where they
// lie one after another.
template <class Direct>
HWY_INLINE Rows cache_rows(const Problem& problem, const View& view, std::int64_t b, std::int64_t s,
                           std::int64_t h, std::int64_t rows, std::int64_t cols, Element* to, std::int64_t ld,
                           std::int64_t padded, const Direct& direct) {
  if (run_length(problem, s, rows) == rows) {
    const Problem::Slot slot = problem.slot(b, s);
    return direct(view, slot.b, slot.s, h, rows, cols, to, ld, padded);
  }
  over_runs(problem, b, s, rows, [&](Problem::Slot slot, std::int64_t at, std::int64_t count) HWY_ATTR {
    load_rows(view, slot.b, slot.s, h, count, cols, to + at * ld, ld,
              at + count == rows ? padded - at : count);
  });
  return {to, ld};
}

HWY_NOINLINE void multiply_task(const TaskRows& task, const DecodeScratch& scratch, Range rows, Range keys,
                                std::int64_t kv_head) {
  const Problem& problem = task.problem;
  const Sequence& sequence = task.sequence;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    Element* q = scratch.q + (i - rows.begin) * scratch.depth_ld;
    load_rows(problem.q, task.b, sequence.q_begin + task.query(i), task.head(i), 1, problem.head_dim, q,
              scratch.depth_ld, 1);
    if (problem.cache.rotates()) rotate_row(problem.cache, problem.query_position(task.b, task.query(i)), q);
  }
  const std::int64_t spare = round_up(rows.size(), row_unit) - rows.size();
  if (spare > 0) zero_row(scratch.q + rows.size() * scratch.depth_ld, spare * scratch.depth_ld);

  const std::int64_t block_n = forward_tiles.block_n;
  for (std::int64_t key = keys.begin / block_n * block_n; key < keys.end; key += block_n) {
    const Range block{key, std::min<long long>(key + block_n, sequence.seqlen_k)};
    const std::int64_t padded = round_up(block.size(), col_unit), slot = sequence.k_begin + key;
    const Rows k_rows = cache_rows(problem, problem.k, task.b, slot, kv_head, block.size(), problem.head_dim,
                                   scratch.k, scratch.depth_ld, padded,
                                   [](const auto&... x) HWY_ATTR { return rows_to_transpose(x...); });
    const Rows v_rows =
        cache_rows(problem, problem.v, task.b, slot, kv_head, block.size(), problem.head_dim_v, scratch.v,
                   scratch.value_ld, padded, [](const auto&... x) HWY_ATTR { return rows_for_b(x...); });
    const OperandB k = b_transposed(k_rows.data, k_rows.ld, scratch.depth, padded, scratch.k_operand);
    const OperandB v = b_rows(v_rows.data, v_rows.ld, padded, scratch.value_cols, scratch.v_operand);
    attend(task, scratch, rows, block, k, v, Ahead());
  }
}

HWY_NOINLINE void decode_task(const Problem& problem, const DecodeLayout& layout,
                              const DecodeScratch& scratch, const BlockTasks::Task& index,
                              std::int64_t pieces, int threads) {
  const std::int64_t b = index.b;
  const Sequence sequence = sequence_or_rest(problem, b);
  if (b == problem.batch) {  // rows that belong to no sequence
    for (std::int64_t h = 0; h < problem.num_heads_q; ++h)
      clear_rows(problem, sequence, b, h, {0, sequence.allocated_q});
    return;
  }
  const DecodeCut cut = decode_cut(problem, sequence, layout.task_rows);
  const DecodeShare share = DecodeShare::of(problem, cut, pieces, threads);
  const std::int64_t tasks_of_head = share.tasks_of_head(cut), of_head = index.block % tasks_of_head;
  const std::int64_t head = index.block / tasks_of_head * share.heads;
  const std::int64_t split = of_head / cut.row_blocks * share.splits;
  const std::int64_t row = of_head % cut.row_blocks * layout.task_rows;
  DecodeWork work{problem,
                  layout,
                  sequence,
                  cut,
                  b,
                  {head, std::min(head + share.heads, problem.num_heads_k)},
                  {split, std::min<std::int64_t>(split + share.splits, cut.splits.count)},
                  {row, std::min(row + layout.task_rows, cut.rows)}};
  const Range seen = work.task(head).keys_of_any(work.rows);
  work.keys = {std::max<long long>(seen.begin, work.splits.begin * cut.splits.keys),
               std::min<long long>(seen.end, work.splits.end * cut.splits.keys)};
  if (cut.rows <= few_rows) return stream_task(work, scratch);
  const TaskRows task = work.task(head);
  start_rows(task, scratch, work.rows, split == 0);
  if (!work.keys.empty()) multiply_task(task, scratch, work.rows, work.keys, head);
  finish_head(work, scratch, head, split);
}

// The splits of one sequence and key head, merged in their order.
HWY_NOINLINE void combine_task(const Problem& problem, const DecodeLayout& layout,
                               const DecodeScratch& scratch, std::int64_t b, std::int64_t kv_head) {
  const Sequence sequence = problem.sequence(b);
  const DecodeCut cut = decode_cut(problem, sequence, layout.task_rows);
  if (cut.splits.count == 1) return;
  const TaskRows task(problem, sequence, b, kv_head * problem.group_size, problem.group_size);
  const std::int64_t dim = problem.head_dim_v;
  with_type(problem.o.dtype, [&](auto* type) HWY_ATTR {
    auto* o = static_cast<decltype(type)>(problem.o.data);
    for (std::int64_t r = 0; r < cut.rows; ++r) {
      const auto at = [&](std::int64_t split) {
        return layout.first_partial[b] + (split * problem.num_heads_k + kv_head) * cut.rows + r;
      };
      const float scale = task.exponent_scale(r);
      float max = -infinity, sum = 0.0f;
      for (std::int64_t i = 0; i < cut.splits.count; ++i) max = std::max(max, layout.max_partial[at(i)]);
      const float most = max == -infinity ? 0.0f : max;  // -inf - -inf would be NaN
      float* acc = scratch.acc_o;
      zero_row(acc, scratch.value_cols);
      for (std::int64_t i = 0; i < cut.splits.count; ++i) {
        const float weight = hn::GetLane(exp2(set((layout.max_partial[at(i)] - most) * scale)));
        sum += weight * layout.sum_partial[at(i)];
        const float* from = layout.o_partial + at(i) * dim;
        std::int64_t c = 0;
        for (; c + lanes <= dim; c += lanes)
          store(hn::MulAdd(set(weight), load(from + c), load(acc + c)), acc + c);
        for (; c < dim; ++c) acc[c] += weight * from[c];
      }
      finish_row(task, r, acc, max, sum, o);
    }
  });
}

HWY_NOINLINE void decode(const Problem& problem, int threads, void* workspace) {
  const DecodeLayout layout(problem, threads, workspace);
  const auto scratch_of = [&](int slot) {
    Carver carve(layout.scratch + static_cast<std::size_t>(slot) * layout.scratch_bytes);
    return DecodeScratch(carve, problem, layout.task_rows);
  };
  const std::int64_t pairs = problem.batch * problem.num_heads_k;
  if (problem.cache.k_new.given()) {
    parallel_for(pairs, threads, [&](std::int64_t index, int) {
      append_task(problem, index / problem.num_heads_k, index % problem.num_heads_k);
    });
  }
  bool merge = false;
  std::int64_t pieces = 0;  // of one key head
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const DecodeCut cut = decode_cut(problem, problem.sequence(b), layout.task_rows);
    merge = merge || cut.splits.count > 1;
    pieces += cut.pieces();
  }
  // The rows that belong to no sequence are one task.
  std::int64_t b = 0;
  const auto tasks_of = [&](const Sequence& sequence) -> std::int64_t {
    if (b++ == problem.batch) return 1;
    const DecodeCut cut = decode_cut(problem, sequence, layout.task_rows);
    return DecodeShare::of(problem, cut, pieces, threads).tasks(problem, cut);
  };
  const BlockTasks tasks(problem, 1, 1, layout.first_task, tasks_of);
  parallel_for(tasks.count(), threads, [&](std::int64_t index, int slot) {
    [[maybe_unused]] const Session session;
    decode_task(problem, layout, scratch_of(slot), tasks.task(index), pieces, threads);
  });
  if (!merge) return;
  parallel_for(pairs, threads, [&](std::int64_t index, int slot) {
    [[maybe_unused]] const Session session;
    combine_task(problem, layout, scratch_of(slot), index / problem.num_heads_k, index % problem.num_heads_k);
  });
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
