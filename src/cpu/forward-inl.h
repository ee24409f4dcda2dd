// FlashAttention-2, forward. A task is a block of query rows of one head. It walks the key blocks that its
// rows see; each is brought into the matmul's form once and used by all its row tiles:
//
//   s = q kᵀ · scale …              one tile, in cache
//   m' = max(m, rowmax s)           p = 2^(s - m')        alpha = 2^(m - m')
//   l = alpha l + rowsum p          acc_o = alpha acc_o + p v
//
// and at the end o = acc_o / l, lse = ln 2 (m + log2 l). Key blocks begin at multiples of block_n, whatever
// the task, and a hidden key adds exactly 0, so a row's result depends on its own keys only.
#pragma once

#include <cmath>

#include "cpu/engine-inl.h"
#include "cpu/parallel.h"
#include "cpu/scores-inl.h"
#include "cpu/tasks.h"
#include "cpu/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

constexpr ForwardTiles forward_tiles = TESSERA_CPU_TILES.forward;
constexpr std::int64_t max_task_rows = 1024;
static_assert(forward_tiles.tile_m % row_unit == 0 && forward_tiles.tile_m <= product_rows);
static_assert(forward_tiles.block_n % col_align == 0 && forward_tiles.block_n % col_unit == 0);
static_assert(col_align % depth_unit == 0 && col_unit % depth_unit == 0);
static_assert(forward_tiles.block_n <= uncut_depth, "else where p v is cut depends on the tile's other rows");

// One thread's arrays.
struct ForwardScratch {
  Element *q, *k, *v, *k_operand, *v_operand;
  float* s[2];  // where nothing overlaps, both are one; p takes the place of s
  float* acc_o;
  float *row_max, *row_sum, *alpha, *tile_max;  // row_max in the units of s; row_sum a vector a row
  RowScratch row;

  std::int64_t depth, value_cols;                  // of q kᵀ; of v and acc_o
  std::int64_t depth_ld, value_ld, tile_ld, p_ld;  // row strides of q and k, of v, of s, of p

  ForwardScratch(Carver& carve, const Problem& problem, std::int64_t task_rows) {
    const std::int64_t rows = round_up(task_rows, row_unit);
    const std::int64_t block_n =
        std::min(forward_tiles.block_n, round_up(std::max<std::int64_t>(problem.max_seqlen_k, 1), col_align));
    const std::int64_t tile_m = forward_tiles.tile_m;
    depth = round_up(problem.head_dim, depth_unit);
    value_cols = round_up(problem.head_dim_v, col_unit);
    depth_ld = round_up(depth, col_unit) + line<Element>;
    value_ld = value_cols + line<Element>;
    tile_ld = block_n + line<Element>;
    q = carve.take<Element>(rows * depth_ld);
    k = carve.take<Element>(block_n * depth_ld);
    v = carve.take<Element>(block_n * value_ld);
    k_operand = carve.take<Element>(b_transposed_size(depth, block_n));
    v_operand = carve.take<Element>(b_rows_size(block_n, value_cols));
    s[0] = carve.take<float>(tile_m * tile_ld);
    s[1] = overlaps ? carve.take<float>(tile_m * tile_ld) : s[0];
    p_ld = element_stride(tile_ld);
    acc_o = carve.take<float>(rows * value_cols);
    row_max = carve.take<float>(rows);
    row_sum = carve.take<float>(rows * lanes);
    alpha = carve.take<float>(rows);
    tile_max = carve.take<float>(tile_m);
    row.bias = carve.take<float>(block_n);
    row.random = carve.take<std::uint16_t>(block_n + 8 * lanes);
  }
};

// The rows of a task: row r is query r / heads of head first_head + r % heads. Forward's are those of one
// head; decode puts all heads that share keys into one tile. Either way the ends of a row's keys never
// decrease.
struct TaskRows {
  const Problem& problem;
  const Sequence& sequence;
  std::int64_t b, first_head, heads;
  Mask mask;
  Scoring first;  // of first_head

  TaskRows(const Problem& p, const Sequence& s, std::int64_t batch_index, std::int64_t head,
           std::int64_t head_count)
      : problem(p),
        sequence(s),
        b(batch_index),
        first_head(head),
        heads(head_count),
        mask(p.mask(s)),
        first(p, s, batch_index, head) {}

  [[nodiscard]] std::int64_t query(std::int64_t r) const { return heads == 1 ? r : r / heads; }
  [[nodiscard]] std::int64_t head(std::int64_t r) const { return first_head + (heads == 1 ? 0 : r % heads); }
  // Of the row's head, made in `other` where that is not the first. Heads differ in their ALiBi slope only:
  // they share a key head.
  [[nodiscard]] HWY_INLINE const Scoring& scoring(std::int64_t r, Scoring& other) const {
    if (heads == 1) return first;
    other.h = head(r);
    if (problem.alibi_slopes != nullptr) other.slope = canonical(problem.alibi_slope(b, other.h) * log2e);
    return other;
  }
  [[nodiscard]] HWY_INLINE float exponent_scale(std::int64_t r) const {
    if (heads == 1 || problem.alibi_slopes == nullptr) return first.exponent_scale();
    Scoring other = first;
    return scoring(r, other).exponent_scale();
  }
  [[nodiscard]] Range keys_of_row(std::int64_t r) const { return mask.keys_of_row(query(r)); }
  [[nodiscard]] Range keys_of_any(Range rows) const {
    if (rows.empty()) return {};
    return mask.keys_of_any({query(rows.begin), query(rows.end - 1) + 1});
  }
  // Whose results are not those of padding.
  [[nodiscard]] Range live(Range rows) const {
    return {rows.begin, std::min<long long>(rows.end, sequence.seqlen_q * heads)};
  }
};

// p = 2^(scale x - shift) over the piece, dropped where dropout says so; returns the sum before dropping, in
// a vector.
template <class P>
HWY_INLINE Vec exponentiate(const RowPiece& piece, const float* x, float scale, float shift, P* p,
                            const std::uint16_t* random, unsigned threshold) {
  const Vec s = set(scale), m = set(shift);
  Vec sum[4] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
  const auto one = [&](std::int64_t c, Vec& total) HWY_ATTR {
    const Vec y = exp2<exp2_degree>(hn::MulSub(load(x + c), s, m));
    total = hn::Add(total, y);
    return random == nullptr ? y : hn::Mul(y, kept(random + (c - piece.live.begin), threshold));
  };
  const auto group = [&](std::int64_t c, Vec& first, Vec& second) HWY_ATTR {
    for (std::int64_t i = 0; i < pair_distance; i += lanes) {
      const Vec y = one(c + i, first);
      store_pair(y, one(c + i + pair_distance, second), p + c, i);
    }
  };
  std::int64_t c = piece.live.begin;
  for (; c + 2 * group_cols <= piece.live.end; c += 2 * group_cols) {
    group(c, sum[0], sum[1]);
    group(c + group_cols, sum[2], sum[3]);
  }
  // Which sum takes a vector depends on its place in the row's own columns alone: live.end may depend on what
  // other rows of the tile see.
  int next = 0;
  if (c + group_cols <= piece.live.end) {
    group(c, sum[0], sum[1]);
    c += group_cols;
    next = 2;
  }
  if (c < piece.live.end) store_pair(one(c, sum[next]), set(0.0f), p + c, 0);
  zero_rest(piece, p);
  return hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
}

// Scaled scores up to this are subtracted after their rounding, which all of a row's terms share and its lse
// undoes. Beyond, it could be more than an exponent holds.
constexpr float most_rounded = 1024.0f;

// The online softmax over one tile: s becomes p (at the row stride p_ld, in the same place or in another),
// the rows' state moves on, alpha is what acc_o must shrink by. All rows' maxima first: the exponentials then
// wait for none of them. After each row's exponentials comes between(rows left).
template <class P, class Between>
HWY_NOINLINE void softmax_tile(const TaskRows& task, const ForwardScratch& scratch, float* s, P* tile_p,
                               std::int64_t p_ld, Range rows, std::int64_t first_row, std::int64_t key,
                               Range cols, const Between& between) {
  const Dropout& dropout = task.problem.dropout;
  Scoring other = task.first;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const RowPiece piece(task.query(i), key, cols, task.keys_of_row(i));
    scratch.tile_max[i - rows.begin] =
        score_row(task.scoring(i, other), piece, s + (i - rows.begin) * scratch.tile_ld, scratch.row);
  }
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::int64_t r = i - first_row;
    float* x = s + (i - rows.begin) * scratch.tile_ld;
    P* p = tile_p + (i - rows.begin) * p_ld;
    const RowPiece piece(task.query(i), key, cols, task.keys_of_row(i));
    const float scale = task.exponent_scale(i), before = scratch.row_max[r];
    const float largest = std::max(before, scratch.tile_max[i - rows.begin]);
    // A row that has seen nothing but -inf keeps p = 2^-inf = 0 instead of NaN.
    const float most = largest == -infinity ? 0.0f : largest;
    float shift = most * scale, exponent = before * scale - shift;
    if (!(std::abs(shift) <= most_rounded)) {
      for (std::int64_t c = piece.live.begin; c < piece.live.end; c += lanes)
        store(hn::Sub(load(x + c), set(most)), x + c);
      shift = 0.0f;
      exponent = (before - most) * scale;
    }
    const float alpha = before == largest ? 1.0f : hn::GetLane(exp2(set(exponent)));
    const std::uint16_t* random = nullptr;
    if (dropout.active()) {
      random = scratch.row.random;
      dropout_bits(dropout, task.scoring(i, other).head_index(), static_cast<unsigned>(piece.row),
                   key + piece.live.begin, key + piece.live.end, scratch.row.random);
    }
    const Vec sum = exponentiate(piece, x, scale, shift, p, random, dropout.threshold);
    float* total = scratch.row_sum + r * lanes;
    store(hn::MulAdd(set(alpha), load(total), sum), total);
    scratch.row_max[r] = largest;
    scratch.alpha[r] = alpha;
    between(rows.end - 1 - i);
  }
}

// The state before the first key: nothing seen, or with sinks (if they are this task's to count) the sink. Of
// as many rows as a product takes at once, or of these alone.
HWY_INLINE void start_rows(const TaskRows& task, const ForwardScratch& scratch, Range rows, bool with_sinks,
                           std::int64_t unit = row_unit) {
  const bool sunk = with_sinks && task.problem.sinks != nullptr;
  const std::int64_t spare = round_up(rows.size(), unit);
  std::fill(scratch.row_max, scratch.row_max + spare, -infinity);
  zero_row(scratch.row_sum, spare * lanes);
  for (std::int64_t r = 0; sunk && r < rows.size(); ++r) {
    scratch.row_max[r] = task.problem.sink(task.head(rows.begin + r)) * log2e;
    scratch.row_sum[r * lanes] = 1.0f;
  }
  std::fill(scratch.alpha, scratch.alpha + spare, 1.0f);
  zero_row(scratch.acc_o, spare * scratch.value_cols);
}

// o and lse of one row, from its acc_o, maximum (in the units of its scores) and sum.
template <class T>
HWY_INLINE void finish_row(const TaskRows& task, std::int64_t row, const float* acc_o, float max, float sum,
                           T* o) {
  const Problem& problem = task.problem;
  const std::int64_t s = task.sequence.q_begin + task.query(row), h = task.head(row);
  T* to = o + problem.o.offset(task.b, s, h);
  const bool seen = task.query(row) < task.sequence.seqlen_q && sum != 0.0f;
  if (seen) {
    const float v_scale = problem.cache.v_scale.of(h / problem.group_size) * unit_of(problem.v.dtype);
    row_from_float(acc_o, problem.dropout.scale / sum * v_scale, problem.head_dim_v, to);
  } else {
    zero_row(to, problem.head_dim_v);
  }
  if (!problem.lse.given()) return;
  static_cast<float*>(problem.lse.data)[problem.lse.offset(task.b, s, h)] =
      seen ? max * task.exponent_scale(row) * ln2 + std::log(sum) : -infinity;
}

// o and lse of the rows, from acc_o and the softmax state.
HWY_NOINLINE void finish_rows(const TaskRows& task, const ForwardScratch& scratch, Range rows) {
  with_type(task.problem.o.dtype, [&](auto* type) HWY_ATTR {
    auto* o = static_cast<decltype(type)>(task.problem.o.data);
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const std::int64_t r = i - rows.begin;
      finish_row(task, i, scratch.acc_o + r * scratch.value_cols, scratch.row_max[r],
                 sum_of(load(scratch.row_sum + r * lanes)), o);
    }
  });
}

// Of padding: queries of head h.
HWY_NOINLINE void clear_rows(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h,
                             Range queries) {
  with_type(problem.o.dtype, [&](auto* type) HWY_ATTR {
    auto* o = static_cast<decltype(type)>(problem.o.data);
    for (std::int64_t s = sequence.q_begin + queries.begin; s < sequence.q_begin + queries.end; ++s) {
      zero_row(o + problem.o.offset(b, s, h), problem.head_dim_v);
      if (problem.lse.given()) static_cast<float*>(problem.lse.data)[problem.lse.offset(b, s, h)] = -infinity;
    }
  });
}

// One block of keys and all row tiles that see some of it: scores, softmax, values, tile by tile. Where
// products overlap with softmax, two others run between the rows of a tile's softmax: acc_o += p v of the
// tile before, and then s = q kᵀ of the next one, which goes where that p lay.
HWY_NOINLINE void attend(const TaskRows& task, const ForwardScratch& scratch, Range live, Range block,
                         OperandB k, OperandB v, Ahead ahead) {
  const auto scores_of = [&](Range tile, Range cols, float* s) {
    const std::int64_t r = tile.begin - live.begin;
    return Product<Into::overwrite>(tile.size(), cols.size(), scratch.depth,
                                    a_rows(scratch.q + r * scratch.depth_ld, scratch.depth_ld),
                                    b_right(k, cols.begin), s + cols.begin, scratch.tile_ld);
  };
  const auto values_of = [&](Range tile, Range cols, float* s) {
    const std::int64_t r = tile.begin - live.begin;
    return Product<Into::scaled_add>(tile.size(), scratch.value_cols, cols.size(),
                                     a_rows(elements_in(s) + cols.begin, scratch.p_ld),
                                     b_below(v, cols.begin), scratch.acc_o + r * scratch.value_cols,
                                     scratch.value_cols, scratch.alpha + r);
  };
  Product<Into::overwrite> scores;
  Product<Into::scaled_add> values;
  const auto advance = [&](std::int64_t steps) HWY_ATTR {
    for (; steps > 0 && values.steps() > 0; --steps) values.step(ahead);
    for (; steps > 0 && scores.steps() > 0; --steps) scores.step(ahead);
  };
  const auto finish = [&]() HWY_ATTR { advance(values.steps() + scores.steps()); };

  Range tile, cols;  // whose scores are made
  int side = 0;
  std::int64_t i = live.begin;
  const auto next_tile = [&] {  // that sees some of the block; empty after the last
    for (tile = {}; i < live.end && tile.empty(); i += forward_tiles.tile_m) {
      const Range rows{i, std::min<long long>(i + forward_tiles.tile_m, live.end)};
      cols = columns_of(task.keys_of_any(rows), block);
      if (!cols.empty()) tile = rows;
    }
    if (!tile.empty()) scores = scores_of(tile, cols, scratch.s[side]);
  };
  next_tile();
  finish();
  while (!tile.empty()) {
    const Range now = tile, now_cols = cols;
    float* s = scratch.s[side];
    if constexpr (overlaps) {
      side = 1 - side;
      next_tile();
    }
    softmax_tile(task, scratch, s, elements_in(s), scratch.p_ld, now, live.begin, block.begin, now_cols,
                 [&](std::int64_t rows_left) HWY_ATTR {
                   const std::int64_t steps = values.steps() + scores.steps();
                   advance((steps + rows_left) / (rows_left + 1));
                 });
    finish();
    values = values_of(now, now_cols, s);
    if constexpr (!overlaps) {
      finish();
      next_tile();
      finish();
    }
  }
  finish();
}

// Rows rows of head h: all key blocks they see.
HWY_NOINLINE void forward_task(const Problem& problem, const ForwardScratch& scratch, std::int64_t b,
                               std::int64_t h, Range rows) {
  const Sequence sequence = sequence_or_rest(problem, b);
  if (rows.begin >= sequence.seqlen_q) return clear_rows(problem, sequence, b, h, rows);
  const TaskRows task(problem, sequence, b, h, 1);
  const Range live = task.live(rows), keys = task.keys_of_any(live);
  const std::int64_t block_n = forward_tiles.block_n, kv_head = h / problem.group_size;
  start_rows(task, scratch, rows, true);
  if (!keys.empty()) {
    load_rows(problem.q, b, sequence.q_begin + live.begin, h, live.size(), problem.head_dim, scratch.q,
              scratch.depth_ld, round_up(live.size(), row_unit));
  }

  const std::int64_t first_key = keys.empty() ? keys.end : keys.begin / block_n * block_n;
  for (std::int64_t key = first_key; key < keys.end; key += block_n) {
    const Range block{key, std::min<long long>(key + block_n, sequence.seqlen_k)};
    const std::int64_t padded = round_up(block.size(), col_unit);
    const Rows k_rows = rows_to_transpose(problem.k, b, sequence.k_begin + key, kv_head, block.size(),
                                          problem.head_dim, scratch.k, scratch.depth_ld, padded);
    const Rows v_rows = rows_for_b(problem.v, b, sequence.k_begin + key, kv_head, block.size(),
                                   problem.head_dim_v, scratch.v, scratch.value_ld, padded);
    const OperandB k = b_transposed(k_rows.data, k_rows.ld, scratch.depth, padded, scratch.k_operand);
    const OperandB v = b_rows(v_rows.data, v_rows.ld, padded, scratch.value_cols, scratch.v_operand);

    const Range next{block.end, std::min<long long>({key + 2 * block_n, keys.end, sequence.seqlen_k})};
    attend(task, scratch, live, block, k, v,
           Ahead(problem.k, problem.v, b, sequence.k_begin + next.begin, kv_head, next.size(),
                 problem.head_dim, problem.head_dim_v));
  }
  finish_rows(task, scratch, rows);
}

// As many rows as fit into the cache, so that bringing a key block into form is cheap beside what is done
// with it, and few enough that every thread has several tasks.
HWY_INLINE std::int64_t forward_task_rows(const Problem& problem, int threads) {
  const std::int64_t row_bytes = problem.head_dim * static_cast<std::int64_t>(sizeof(Element)) +
                                 problem.head_dim_v * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t rows = problem.packed ? problem.rows_q : problem.batch * problem.rows_q;
  const std::int64_t share = rows * problem.num_heads_q / (4 * static_cast<std::int64_t>(threads));
  const std::int64_t most =
      std::min({share, forward_tiles.task_bytes / row_bytes, problem.max_seqlen_q, max_task_rows});
  return round_up(std::max<std::int64_t>(most, 1), forward_tiles.tile_m);
}

struct ForwardLayout {
  std::int64_t task_rows;
  std::int64_t* first_task;
  std::byte* scratch;  // one a thread
  std::size_t scratch_bytes, bytes;

  ForwardLayout(const Problem& problem, int threads, void* workspace) {
    task_rows = forward_task_rows(problem, threads);
    Carver one(nullptr);
    ForwardScratch(one, problem, task_rows);
    scratch_bytes = one.used();
    Carver carve(workspace);
    first_task = carve.take<std::int64_t>(sequence_count(problem) + 1);
    scratch = carve.take<std::byte>(static_cast<std::int64_t>(scratch_bytes) * threads);
    bytes = carve.used();
  }
};

HWY_NOINLINE void forward(const Problem& problem, int threads, void* workspace) {
  const ForwardLayout layout(problem, threads, workspace);
  const BlockTasks tasks(problem, problem.num_heads_q, layout.task_rows, layout.first_task,
                         [](const Sequence& sequence) { return sequence.allocated_q; });
  const auto body = [&](std::int64_t index, int slot) {
    const BlockTasks::Task task = tasks.task(index);
    Carver carve(layout.scratch + static_cast<std::size_t>(slot) * layout.scratch_bytes);
    const ForwardScratch scratch(carve, problem, layout.task_rows);
    [[maybe_unused]] const Session session;
    // Under a causal mask the last rows have the most keys: they go first.
    const std::int64_t begin = (task.blocks - 1 - task.block) * layout.task_rows;
    const std::int64_t allocated = sequence_or_rest(problem, task.b).allocated_q;
    forward_task(problem, scratch, task.b, task.h, {begin, std::min(begin + layout.task_rows, allocated)});
  };
  parallel_for(tasks.count(), threads, body);
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
