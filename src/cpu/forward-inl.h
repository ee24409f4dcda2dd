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
static_assert(forward_tiles.tile_m % row_unit == 0);
static_assert(forward_tiles.block_n % col_align == 0 && forward_tiles.block_n % col_unit == 0);

// One thread's arrays.
struct ForwardScratch {
  Element *q, *k, *v, *k_operand, *v_operand, *p;
  float *s, *acc_o, *row_max, *row_sum, *alpha, *tile_max;  // row_max in the units of s
  RowScratch row;

  std::int64_t depth, value_cols;                  // of q kᵀ; of v and acc_o
  std::int64_t depth_ld, value_ld, tile_ld, p_ld;  // row strides of q and k, of v, of s, of p

  ForwardScratch(Carver& carve, const Problem& problem, std::int64_t task_rows) {
    const std::int64_t block_n = forward_tiles.block_n, rows = round_up(task_rows, row_unit);
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
    s = carve.take<float>(tile_m * tile_ld);
    p = elements_in(s);
    p_ld = element_stride(tile_ld);
    acc_o = carve.take<float>(rows * value_cols);
    row_max = carve.take<float>(rows);
    row_sum = carve.take<float>(rows);
    alpha = carve.take<float>(rows);
    tile_max = carve.take<float>(tile_m);
    row.bias = carve.take<float>(block_n);
    row.random = carve.take<std::uint16_t>(block_n + 8 * lanes);
  }
};

// p = 2^(scale (x - largest)) over the piece, dropped where dropout says so; returns the sum before dropping.
// The difference comes first: scaled on its own, a huge x would be rounded by more than a whole exponent.
HWY_INLINE float exponentiate(const RowPiece& piece, const float* x, float scale, float largest, Element* p,
                              const std::uint16_t* random, unsigned threshold) {
  const Vec s = set(scale), m = set(largest);
  Vec sum[4] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
  const auto step = [&](std::int64_t c, Vec& total) HWY_ATTR {
    Vec y = exp2<exp2_degree>(hn::Mul(hn::Sub(load(x + c), m), s));
    total = hn::Add(total, y);
    if (random != nullptr) y = hn::Mul(y, kept(random + (c - piece.cols.begin), threshold));
    store_element(y, p + c);
  };
  std::int64_t c = piece.cols.begin;
  for (; c + 4 * lanes <= piece.cols.end; c += 4 * lanes) {
    step(c, sum[0]);
    step(c + lanes, sum[1]);
    step(c + 2 * lanes, sum[2]);
    step(c + 3 * lanes, sum[3]);
  }
  // Which accumulator takes a column depends on the column alone: cols.begin is a multiple of 4 * lanes.
  for (int i = 0; c < piece.cols.end; c += lanes, ++i) step(c, sum[i]);
  return sum_of(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])));
}

// The online softmax over one tile: s becomes p, the rows' state moves on, alpha is what acc_o must shrink
// by. All rows' maxima first: the exponentials then wait for none of them.
HWY_NOINLINE void softmax_tile(const Scoring& scoring, const Mask& mask, const ForwardScratch& scratch,
                               Range rows, std::int64_t first_row, std::int64_t key, Range cols) {
  const Dropout& dropout = scoring.problem.dropout;
  const float scale = scoring.exponent_scale();
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const RowPiece piece(i, key, cols, mask.keys_of_row(i));
    scratch.tile_max[i - rows.begin] =
        score_row(scoring, piece, scratch.s + (i - rows.begin) * scratch.tile_ld, scratch.row);
  }
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::int64_t r = i - first_row;
    const float* x = scratch.s + (i - rows.begin) * scratch.tile_ld;
    Element* p = scratch.p + (i - rows.begin) * scratch.p_ld;
    const RowPiece piece(i, key, cols, mask.keys_of_row(i));
    const float before = scratch.row_max[r];
    const float largest = std::max(before, scratch.tile_max[i - rows.begin]);
    // A row that has seen nothing but -inf keeps p = 2^-inf = 0 instead of NaN.
    const float shift = largest == -infinity ? 0.0f : largest;
    const float alpha = before == largest ? 1.0f : hn::GetLane(exp2(set((before - shift) * scale)));
    const std::uint16_t* random = nullptr;
    if (dropout.active()) {
      random = scratch.row.random;
      dropout_bits(dropout, scoring.head_index(), static_cast<unsigned>(i), key + cols.begin, key + cols.end,
                   scratch.row.random);
    }
    const float sum = exponentiate(piece, x, scale, shift, p, random, dropout.threshold);
    scratch.row_max[r] = largest;
    scratch.row_sum[r] = alpha * scratch.row_sum[r] + sum;
    scratch.alpha[r] = alpha;
  }
}

// o and lse of the rows, from acc_o and the softmax state.
HWY_NOINLINE void finish_rows(const Problem& problem, const ForwardScratch& scratch, const Sequence& sequence,
                              std::int64_t b, std::int64_t h, Range rows, float scale) {
  with_type(problem.o.dtype, [&](auto* type) HWY_ATTR {
    auto* o = static_cast<decltype(type)>(problem.o.data);
    auto* lse = static_cast<float*>(problem.lse.data);
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const std::int64_t r = i - rows.begin;
      auto* to = o + problem.o.offset(b, sequence.q_begin + i, h);
      const bool seen = i < sequence.seqlen_q && scratch.row_sum[r] != 0.0f;
      if (seen) {
        row_from_float(scratch.acc_o + r * scratch.value_cols, problem.dropout.scale / scratch.row_sum[r],
                       problem.head_dim_v, to);
      } else {
        zero_row(to, problem.head_dim_v);
      }
      if (problem.lse.given()) {
        lse[problem.lse.offset(b, sequence.q_begin + i, h)] =
            seen ? scratch.row_max[r] * scale * ln2 + std::log(scratch.row_sum[r]) : -infinity;
      }
    }
  });
}

// Rows rows of head h: all key blocks they see.
HWY_NOINLINE void forward_task(const Problem& problem, const ForwardScratch& scratch, std::int64_t b,
                               std::int64_t h, Range rows) {
  const Sequence sequence = sequence_or_rest(problem, b);
  const Range live{rows.begin, std::min<long long>(rows.end, sequence.seqlen_q)};
  if (live.empty()) return finish_rows(problem, scratch, sequence, b, h, rows, 1.0f);
  const Mask mask = problem.mask(sequence);
  const Range keys = mask.keys_of_any(live);
  const Scoring scoring(problem, sequence, b, h);
  const std::int64_t block_n = forward_tiles.block_n, kv_head = h / problem.group_size;

  const bool sunk = problem.sinks != nullptr;
  const std::int64_t spare = round_up(rows.size(), row_unit);
  std::fill(scratch.row_max, scratch.row_max + spare, sunk ? problem.sink(h) * log2e : -infinity);
  std::fill(scratch.row_sum, scratch.row_sum + spare, sunk ? 1.0f : 0.0f);
  std::fill(scratch.alpha, scratch.alpha + spare, 1.0f);
  zero_row(scratch.acc_o, spare * scratch.value_cols);
  if (!keys.empty()) {
    load_rows(problem.q, b, sequence.q_begin + live.begin, h, live.size(), problem.head_dim, scratch.q,
              scratch.depth_ld, round_up(live.size(), row_unit));
  }

  const std::int64_t first_key = keys.empty() ? keys.end : keys.begin / block_n * block_n;
  for (std::int64_t key = first_key; key < keys.end; key += block_n) {
    const Range block{key, std::min<long long>(key + block_n, sequence.seqlen_k)};
    const Rows k_rows = rows_to_transpose(problem.k, b, sequence.k_begin + key, kv_head, block.size(),
                                          problem.head_dim, scratch.k, scratch.depth_ld, block_n);
    const Rows v_rows = rows_for_b(problem.v, b, sequence.k_begin + key, kv_head, block.size(),
                                   problem.head_dim_v, scratch.v, scratch.value_ld, block_n);
    const OperandB k = b_transposed(k_rows.data, k_rows.ld, scratch.depth, block_n, scratch.k_operand);
    const OperandB v = b_rows(v_rows.data, v_rows.ld, block_n, scratch.value_cols, scratch.v_operand);

    for (std::int64_t i = live.begin; i < live.end; i += forward_tiles.tile_m) {
      const Range tile{i, std::min<long long>(i + forward_tiles.tile_m, live.end)};
      const Range cols = columns_of(mask, block, tile);
      if (cols.empty()) continue;
      const std::int64_t r = i - live.begin, count = tile.size();
      multiply_tiles<Into::overwrite>(count, cols.size(), scratch.depth,
                                      a_rows(scratch.q + r * scratch.depth_ld, scratch.depth_ld),
                                      b_right(k, cols.begin), scratch.s + cols.begin, scratch.tile_ld);
      softmax_tile(scoring, mask, scratch, tile, live.begin, key, cols);
      multiply_tiles<Into::scaled_add>(count, scratch.value_cols, cols.size(),
                                       a_rows(scratch.p + cols.begin, scratch.p_ld), b_below(v, cols.begin),
                                       scratch.acc_o + r * scratch.value_cols, scratch.value_cols,
                                       scratch.alpha + r);
    }
  }
  finish_rows(problem, scratch, sequence, b, h, rows, scoring.exponent_scale());
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
