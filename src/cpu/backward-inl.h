// FlashAttention-2, backward. A task is a block of keys of one key head: it holds their dk and dv and walks
// the row tiles that see them, of every query head of the group:
//
//   p = 2^(s - lse)        dv += pᵀ do        dp = do vᵀ
//   ds = p ∘ (dp - delta)  dk += dsᵀ q        dq += ds k
//
// with delta = rowsum(do ∘ o) - dlse from a first pass. dq gathers one term a key block, always in ascending
// order: a task waits its turn at each row tile. Tasks are handed out in that order too and walk the tiles
// the same way, so the turn has mostly come when it is wanted. The result is bitwise the same for any number
// of threads.
#pragma once

#include <atomic>
#include <cmath>
#include <type_traits>

#include "cpu/engine-inl.h"
#include "cpu/parallel.h"
#include "cpu/scores-inl.h"
#include "cpu/tasks.h"
#include "cpu/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

constexpr BackwardTiles backward_tiles = TESSERA_CPU_TILES.backward;
static_assert(backward_tiles.tile_m % row_unit == 0 && backward_tiles.tile_m % depth_unit == 0);
static_assert(backward_tiles.block_n % col_align == 0 && backward_tiles.block_n % col_unit == 0);

// The tiles of one call. A tile computes what any of its rows sees, so under a narrow window it has fewer;
// and the operands of a key block, with its dk and dv, stay in the second-level cache.
struct BackwardTiling {
  std::int64_t tile_m = backward_tiles.tile_m, block_n = backward_tiles.block_n;

  explicit BackwardTiling(const Problem& problem) {
    constexpr std::int64_t unit = 32, parts = 8;
    static_assert(unit % row_unit == 0 && unit % depth_unit == 0);
    const std::int64_t left = problem.window_left, right = problem.window_right;
    if (left < Mask::unbounded && right < Mask::unbounded)
      tile_m = std::min(tile_m, round_up((left + right) / parts + 1, unit));
    const std::int64_t row = std::max(problem.head_dim, problem.head_dim_v) * std::int64_t{sizeof(Element)};
    while (block_n > col_align && block_n * row > backward_tiles.block_bytes) block_n -= col_align;
  }
};

// What the threads share: one number a row of every query head, and dq before its conversion.
struct BackwardRows {
  BackwardTiling tiling;
  std::int64_t rows;        // of one head, all sequences
  std::int64_t depth_cols;  // of dq
  float *lse, *delta;       // [num_heads_q][rows]; lse in units of log2 e, +inf for a row that sees nothing
  float* dq;                // [num_heads_q][rows][depth_cols]
  std::int32_t* turn;       // [row tile tasks]: the key block whose term dq takes next; atomic
  std::int64_t *first_row_tile, *first_key_block;

  BackwardRows(Carver& carve, const Problem& problem) : tiling(problem) {
    rows = problem.packed ? problem.rows_q : problem.batch * problem.rows_q;
    depth_cols = round_up(round_up(problem.head_dim, depth_unit), col_unit);
    const std::int64_t all = rows * problem.num_heads_q;
    lse = carve.take<float>(all);
    delta = carve.take<float>(all);
    dq = carve.take<float>(all * depth_cols);
    const std::int64_t tiles = all / tiling.tile_m + sequence_count(problem) * problem.num_heads_q;
    turn = carve.take<std::int32_t>(tiles);
    first_row_tile = carve.take<std::int64_t>(sequence_count(problem) + 1);
    first_key_block = carve.take<std::int64_t>(sequence_count(problem) + 1);
  }
  [[nodiscard]] std::int64_t index(const Problem& problem, const Sequence& sequence, std::int64_t b,
                                   std::int64_t h, std::int64_t i) const {
    return h * rows + (problem.packed ? sequence.q_begin : b * problem.rows_q) + i;
  }
};

// One thread's arrays.
struct BackwardScratch {
  BackwardTiling tiling;
  Element *k, *v, *k_transposed, *v_transposed, *k_rows;
  Element *q, *dout, *q_rows, *dout_rows;
  float *s, *dp, *dk, *dv, *dq;
  Element *p, *ds, *p_transposed, *ds_transposed;
  float* dbias;
  RowScratch row;

  std::int64_t depth, value_depth;      // of q kᵀ, of do vᵀ
  std::int64_t depth_cols, value_cols;  // of q, k, dk, dq; of v, do, dv
  std::int64_t depth_ld, value_ld;      // row strides of q and k; of v and do
  std::int64_t tile_ld, p_ld;           // row strides of s and dp; of p and ds

  BackwardScratch(Carver& carve, const Problem& problem) : tiling(problem) {
    const auto [tile_m, block_n] = tiling;
    depth = round_up(problem.head_dim, depth_unit);
    value_depth = round_up(problem.head_dim_v, depth_unit);
    depth_cols = round_up(depth, col_unit);
    value_cols = round_up(value_depth, col_unit);
    depth_ld = depth_cols + line<Element>;
    value_ld = value_cols + line<Element>;
    tile_ld = block_n + line<Element>;
    k = carve.take<Element>(block_n * depth_ld);
    v = carve.take<Element>(block_n * value_ld);
    k_transposed = carve.take<Element>(b_transposed_size(depth, block_n));
    v_transposed = carve.take<Element>(b_transposed_size(value_depth, block_n));
    k_rows = carve.take<Element>(b_rows_size(block_n, depth_cols));
    q = carve.take<Element>(tile_m * depth_ld);
    dout = carve.take<Element>(tile_m * value_ld);
    q_rows = carve.take<Element>(b_rows_size(tile_m, depth_cols));
    dout_rows = carve.take<Element>(b_rows_size(tile_m, value_cols));
    s = carve.take<float>(tile_m * tile_ld);
    dp = carve.take<float>(tile_m * tile_ld);
    dk = carve.take<float>(block_n * depth_cols);
    dv = carve.take<float>(block_n * value_cols);
    p = elements_in(s);
    ds = elements_in(dp);
    p_ld = element_stride(tile_ld);
    p_transposed = carve.take<Element>(a_transposed_size(tile_m, block_n));
    ds_transposed = carve.take<Element>(a_transposed_size(tile_m, block_n));
    dbias = carve.take<float>(problem.dbias.given() ? tile_m * tile_ld : 0);
    row.bias = carve.take<float>(block_n);
    row.random = carve.take<std::uint16_t>(block_n + 8 * lanes);
  }
};

// --- The first pass: delta, lse, and the turns of dq -------------------------------------------------------

template <class T, class U>
HWY_INLINE float dot(const T* a, const U* b, std::int64_t n) {
  Vec sum = set(0.0f);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) sum = hn::MulAdd(load_as_float(a + i), load_as_float(b + i), sum);
  float total = sum_of(sum);
  for (; i < n; ++i) total += to_float(a[i]) * to_float(b[i]);
  return total;
}

HWY_INLINE float dot_rows(const View& a, const View& b, std::int64_t batch, std::int64_t s, std::int64_t h,
                          std::int64_t n) {
  float result = 0.0f;
  with_type(a.dtype, [&](auto* a_type) HWY_ATTR {
    with_type(b.dtype, [&](auto* b_type) HWY_ATTR {
      result = dot(static_cast<decltype(a_type)>(a.data) + a.offset(batch, s, h),
                   static_cast<decltype(b_type)>(b.data) + b.offset(batch, s, h), n);
    });
  });
  return result;
}

HWY_INLINE void zero_rows(const View& view, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t rows,
                          std::int64_t cols) {
  with_type(view.dtype, [&](auto* type) HWY_ATTR {
    auto* to = static_cast<decltype(type)>(view.data) + view.offset(b, s, h);
    for (std::int64_t r = 0; r < rows; ++r) zero_row(to + r * view.seq, cols);
  });
}

HWY_NOINLINE void prepare_rows(const Problem& problem, const BackwardRows& shared, std::int64_t task,
                               std::int64_t b, std::int64_t h, Range rows) {
  const Sequence sequence = sequence_or_rest(problem, b);
  const Range live{rows.begin, std::min<long long>(rows.end, sequence.seqlen_q)};
  const Range keys = problem.mask(sequence).keys_of_any(live);
  shared.turn[task] = static_cast<std::int32_t>(keys.begin / shared.tiling.block_n);
  if (keys.empty()) {
    zero_rows(problem.dq, b, sequence.q_begin + rows.begin, h, rows.size(), problem.head_dim);
  } else if (rows.end > live.end) {
    zero_rows(problem.dq, b, sequence.q_begin + live.end, h, rows.end - live.end, problem.head_dim);
  }
  for (std::int64_t i = live.begin; i < live.end; ++i) {
    const std::int64_t at = shared.index(problem, sequence, b, h, i), s = sequence.q_begin + i;
    const float lse = static_cast<const float*>(problem.lse.data)[problem.lse.offset(b, s, h)];
    // A row that sees nothing: p = 2^(s - inf) = 0.
    shared.lse[at] = lse == -infinity ? infinity : canonical(lse * log2e);
    if (lse == -infinity) {
      shared.delta[at] = 0.0f;  // whatever dlse says: nothing depends on this row
      continue;
    }
    float delta = dot_rows(problem.dout, problem.o, b, s, h, problem.head_dim_v);
    if (problem.dlse.given()) {
      delta -= static_cast<const float*>(problem.dlse.data)[problem.dlse.offset(b, s, h)];
    }
    shared.delta[at] = canonical(delta);
  }
}

// dsink = -Σ p_sink · delta over the rows of a head, p_sink = e^(sink - lse).
HWY_NOINLINE void sink_gradient(const Problem& problem, const BackwardRows& shared, std::int64_t h) {
  const double sink = problem.sink(h);
  double sum = 0.0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence sequence = problem.sequence(b);
    for (std::int64_t i = 0; i < sequence.seqlen_q; ++i) {
      const std::int64_t at = shared.index(problem, sequence, b, h, i);
      sum -= std::exp(sink - shared.lse[at] * 0.6931471805599453) * shared.delta[at];
    }
  }
  with_type(problem.sinks_dtype, [&](auto* type) HWY_ATTR {
    using T = std::remove_pointer_t<decltype(type)>;
    static_cast<T*>(problem.dsinks)[h * problem.dsinks_stride] = from_float<T>(static_cast<float>(sum));
  });
}

// --- One tile ----------------------------------------------------------------------------------------------

// Whose derivative: that of q·k (through the softcap), to ds; or that of the score, where a bias is added, in
// float and in place of dp.
enum class Of : std::uint8_t { product, score };

template <Of of, bool plain>
HWY_INLINE void gradient_row(const Scoring& scoring, const RowPiece& piece, const float* s, float* dp,
                             Element* p, Element* ds, float lse, float delta, const RowScratch& scratch) {
  constexpr int degree =
      of == Of::score ? 6 : exp2_degree;  // ds is rounded; dbias is float, and adds up many
  const Dropout& dropout = scoring.problem.dropout;
  const Vec scale = set(scoring.scale), shift = set(lse), d = set(delta), z = set(dropout.scale);
  const bool dropping = dropout.active();
  struct Gradient {
    Vec p, ds;
  };
  const auto one = [&](std::int64_t c, auto masked) HWY_ATTR {
    constexpr bool simple = plain && !masked.value;
    Vec x = load(s + c), cap_slope = set(1.0f);
    if constexpr (simple) {
      x = hn::MulSub(x, scale, shift);
    } else {
      x = hn::Sub(score<masked.value>(scoring, piece, x, c, scratch.bias, cap_slope), shift);
    }
    // At most 1, but for the rounding of lse: where scores are huge that is more than exponents can hold.
    const Vec probability = exp2<degree>(hn::Min(set(1.0f), x));
    Vec y = load(dp + c), dropped = probability;
    if (dropping) {
      const Vec keep = hn::Mul(kept(scratch.random + (c - piece.live.begin), dropout.threshold), z);
      y = hn::Mul(y, keep);
      dropped = hn::Mul(probability, keep);
    }
    y = hn::Mul(probability, hn::Sub(y, d));
    if constexpr (of == Of::product && !simple) y = hn::Mul(y, cap_slope);
    return Gradient{dropped, y};
  };
  const auto run = [&](std::int64_t c, std::int64_t end, auto masked) HWY_ATTR {
    if constexpr (of == Of::score) {
      for (; c < end; c += lanes) store(one(c, masked).ds, dp + c);
      return;
    }
    for (; c + group_cols <= end; c += group_cols) {
      for (std::int64_t i = 0; i < pair_distance; i += lanes) {
        const Gradient first = one(c + i, masked), second = one(c + i + pair_distance, masked);
        store_pair(first.p, second.p, p + c, i);
        store_pair(first.ds, second.ds, ds + c, i);
      }
    }
    if (c < end) {
      const Gradient last = one(c, masked);
      store_pair(last.p, set(0.0f), p + c, 0);
      store_pair(last.ds, set(0.0f), ds + c, 0);
    }
  };
  over_columns(
      piece, [&](std::int64_t c, std::int64_t end) HWY_ATTR { run(c, end, std::true_type()); },
      [&](std::int64_t c, std::int64_t end) HWY_ATTR { run(c, end, std::false_type()); });
  if constexpr (of == Of::score) {
    zero_rest(piece, dp);
  } else {
    zero_rest(piece, p);
    zero_rest(piece, ds);
  }
}

// p and ds of a tile from s and dp.
template <Of of>
HWY_NOINLINE void gradient_tile(const Scoring& scoring, const Mask& mask, const BackwardScratch& scratch,
                                Range rows, std::int64_t key, Range cols, const float* lse,
                                const float* delta) {
  const Dropout& dropout = scoring.problem.dropout;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::int64_t r = i - rows.begin, at = r * scratch.tile_ld;
    const RowPiece piece(i, key, cols, mask.keys_of_row(i));
    if (scoring.biased) load_bias(scoring, piece, scratch.row.bias);
    if (dropout.active()) {
      dropout_bits(dropout, scoring.head_index(), static_cast<unsigned>(i), key + piece.live.begin,
                   key + piece.live.end, scratch.row.random);
    }
    const auto run = scoring.plain() ? &gradient_row<of, true> : &gradient_row<of, false>;
    run(scoring, piece, scratch.s + at, scratch.dp + at, scratch.p + r * scratch.p_ld,
        scratch.ds + r * scratch.p_ld, lse[r], delta[r], scratch.row);
  }
  if constexpr (of == Of::score) return;
  for (std::int64_t r = rows.size(); r < round_up(rows.size(), depth_unit); ++r) {
    zero_row(scratch.p + r * scratch.p_ld + cols.begin, cols.size());
    zero_row(scratch.ds + r * scratch.p_ld + cols.begin, cols.size());
  }
}

struct KeyBlock {
  Range keys;  // of its sequence
  OperandB k, v;
  Rows k_rows;
};

// A key block in the matmul's form.
HWY_NOINLINE KeyBlock load_keys(const Problem& problem, const BackwardScratch& scratch,
                                const Sequence& sequence, std::int64_t b, std::int64_t kv_head,
                                std::int64_t key) {
  const std::int64_t block_n = scratch.tiling.block_n;
  const Range keys{key, std::min<long long>(key + block_n, sequence.seqlen_k)};
  const Rows k = rows_for_b(problem.k, b, sequence.k_begin + key, kv_head, keys.size(), problem.head_dim,
                            scratch.k, scratch.depth_ld, block_n);
  const Rows v = rows_to_transpose(problem.v, b, sequence.k_begin + key, kv_head, keys.size(),
                                   problem.head_dim_v, scratch.v, scratch.value_ld, block_n);
  return {keys, b_transposed(k.data, k.ld, scratch.depth, block_n, scratch.k_transposed),
          b_transposed(v.data, v.ld, scratch.value_depth, block_n, scratch.v_transposed), k};
}

// q and do of the tile, s = q kᵀ and dp = do vᵀ.
HWY_NOINLINE void score_tile(const Problem& problem, const BackwardScratch& scratch, const Sequence& sequence,
                             std::int64_t b, std::int64_t h, Range tile, const KeyBlock& block, Range cols,
                             Ahead& ahead) {
  const std::int64_t count = tile.size(), padded = round_up(round_up(count, row_unit), depth_unit);
  load_rows(problem.q, b, sequence.q_begin + tile.begin, h, count, problem.head_dim, scratch.q,
            scratch.depth_ld, padded);
  load_rows(problem.dout, b, sequence.q_begin + tile.begin, h, count, problem.head_dim_v, scratch.dout,
            scratch.value_ld, padded);
  multiply_tiles<Into::overwrite>(count, cols.size(), scratch.depth, a_rows(scratch.q, scratch.depth_ld),
                                  b_right(block.k, cols.begin), scratch.s + cols.begin, scratch.tile_ld,
                                  ahead);
  multiply_tiles<Into::overwrite>(count, cols.size(), scratch.value_depth,
                                  a_rows(scratch.dout, scratch.value_ld), b_right(block.v, cols.begin),
                                  scratch.dp + cols.begin, scratch.tile_ld, ahead);
}

HWY_INLINE void store_rows(const View& view, std::int64_t b, std::int64_t s, std::int64_t h,
                           std::int64_t rows, std::int64_t cols, const float* from, std::int64_t ld,
                           float scale) {
  with_type(view.dtype, [&](auto* type) HWY_ATTR {
    auto* to = static_cast<decltype(type)>(view.data) + view.offset(b, s, h);
    for (std::int64_t r = 0; r < rows; ++r) row_from_float(from + r * ld, scale, cols, to + r * view.seq);
  });
}

// --- A block of keys ---------------------------------------------------------------------------------------

// dq of the tile += ds k, when its turn has come: a tile takes its key blocks one after the other, the first
// overwrites, the last converts. keys is what the tile sees of the whole sequence.
HWY_NOINLINE void add_to_dq(const Problem& problem, const BackwardRows& shared,
                            const BackwardScratch& scratch, const Sequence& sequence, std::int64_t b,
                            std::int64_t h, Range tile, Range keys, std::int64_t key, Range cols,
                            OperandB k_rows, std::int32_t& turn_of_tile, Ahead& ahead) {
  const std::int64_t block_n = scratch.tiling.block_n, count = tile.size();
  const auto n_block = static_cast<std::int32_t>(key / block_n);
  const std::atomic_ref<std::int32_t> turn(turn_of_tile);
  float* dq = shared.dq + shared.index(problem, sequence, b, h, tile.begin) * shared.depth_cols;
  const OperandA ds = a_rows(scratch.ds + cols.begin, scratch.p_ld);
  const OperandB k = b_below(k_rows, cols.begin);
  int spins = 0;
  while (turn.load(std::memory_order_acquire) != n_block) relax(spins);
  if (n_block == keys.begin / block_n) {
    multiply_tiles<Into::overwrite>(count, scratch.depth_cols, cols.size(), ds, k, dq, shared.depth_cols,
                                    ahead);
  } else {
    multiply_tiles<Into::add>(count, scratch.depth_cols, cols.size(), ds, k, dq, shared.depth_cols, ahead);
  }
  if (n_block == (keys.end - 1) / block_n) {
    store_rows(problem.dq, b, sequence.q_begin + tile.begin, h, count, problem.head_dim, dq,
               shared.depth_cols, static_cast<float>(problem.softmax_scale));
  }
  turn.store(n_block + 1, std::memory_order_release);
}

HWY_NOINLINE void backward_task(const Problem& problem, const BackwardRows& shared,
                                const BlockTasks& row_tiles, const BackwardScratch& scratch, std::int64_t b,
                                std::int64_t kv_head, std::int64_t key) {
  const Sequence sequence = sequence_or_rest(problem, b);
  const auto [tile_m, block_n] = scratch.tiling;
  const std::int64_t allocated = std::min(block_n, sequence.allocated_k - key);
  const float scale = static_cast<float>(problem.softmax_scale);
  const Mask mask = problem.mask(sequence);
  const Range seen_by = mask.rows_of_any({key, std::min<long long>(key + block_n, sequence.seqlen_k)});
  if (seen_by.empty()) {
    zero_rows(problem.dk, b, sequence.k_begin + key, kv_head, allocated, problem.head_dim);
    zero_rows(problem.dv, b, sequence.k_begin + key, kv_head, allocated, problem.head_dim_v);
    return;
  }
  const KeyBlock block = load_keys(problem, scratch, sequence, b, kv_head, key);
  const OperandB k_rows =
      b_rows(block.k_rows.data, block.k_rows.ld, block_n, scratch.depth_cols, scratch.k_rows);
  zero_row(scratch.dk, block_n * scratch.depth_cols);
  zero_row(scratch.dv, block_n * scratch.value_cols);

  for (std::int64_t h = kv_head * problem.group_size; h < (kv_head + 1) * problem.group_size; ++h) {
    const Scoring scoring(problem, sequence, b, h);
    for (std::int64_t m = seen_by.begin / tile_m; m * tile_m < seen_by.end; ++m) {
      const Range tile{m * tile_m, std::min<long long>((m + 1) * tile_m, sequence.seqlen_q)};
      const Range cols = columns_of(mask.keys_of_any(tile), block.keys);
      if (cols.empty()) continue;
      const std::int64_t count = tile.size(), at = shared.index(problem, sequence, b, h, tile.begin);
      const std::int64_t row_depth = round_up(count, depth_unit);

      const Range next{tile.end, std::min<long long>(tile.end + tile_m, seen_by.end)};
      Ahead ahead(problem.q, problem.dout, b, sequence.q_begin + next.begin, h, next.size(), problem.head_dim,
                  problem.head_dim_v);
      score_tile(problem, scratch, sequence, b, h, tile, block, cols, ahead);
      gradient_tile<Of::product>(scoring, mask, scratch, tile, key, cols, shared.lse + at, shared.delta + at);
      multiply_tiles<Into::add>(
          cols.size(), scratch.value_cols, row_depth,
          a_transposed(scratch.p + cols.begin, scratch.p_ld, row_depth, cols.size(), scratch.p_transposed),
          b_rows(scratch.dout, scratch.value_ld, row_depth, scratch.value_cols, scratch.dout_rows),
          scratch.dv + cols.begin * scratch.value_cols, scratch.value_cols, ahead);
      multiply_tiles<Into::add>(
          cols.size(), scratch.depth_cols, row_depth,
          a_transposed(scratch.ds + cols.begin, scratch.p_ld, row_depth, cols.size(), scratch.ds_transposed),
          b_rows(scratch.q, scratch.depth_ld, row_depth, scratch.depth_cols, scratch.q_rows),
          scratch.dk + cols.begin * scratch.depth_cols, scratch.depth_cols, ahead);

      add_to_dq(problem, shared, scratch, sequence, b, h, tile, mask.keys_of_any(tile), key, cols, k_rows,
                shared.turn[row_tiles.index(b, h, m)], ahead);
    }
  }
  const std::int64_t live = block.keys.size();
  store_rows(problem.dk, b, sequence.k_begin + key, kv_head, live, problem.head_dim, scratch.dk,
             scratch.depth_cols, scale);
  store_rows(problem.dv, b, sequence.k_begin + key, kv_head, live, problem.head_dim_v, scratch.dv,
             scratch.value_cols, 1.0f);
  zero_rows(problem.dk, b, sequence.k_begin + key + live, kv_head, allocated - live, problem.head_dim);
  zero_rows(problem.dv, b, sequence.k_begin + key + live, kv_head, allocated - live, problem.head_dim_v);
}

// --- The bias's gradient -----------------------------------------------------------------------------------

// dbias is the sum of dscore over everything the bias was broadcast along. A task owns a piece of dbias and
// runs through all that adds to it, computing s and dp anew: two more matmuls, but no atomics, no extra
// memory and one fixed order.
struct BiasTasks {
  std::int64_t extent[4];  // pieces along b, h, i, j

  explicit BiasTasks(const Problem& problem) {
    const std::int64_t* own = problem.dbias.extent;
    extent[0] = own[0];
    extent[1] = own[1];
    const auto [tile_m, block_n] = BackwardTiling(problem);
    extent[2] = (own[2] + tile_m - 1) / tile_m;
    extent[3] = (own[3] + block_n - 1) / block_n;
  }
  [[nodiscard]] std::int64_t count() const { return extent[0] * extent[1] * extent[2] * extent[3]; }
};

// Which of [0, all) a piece runs through: itself, or everything if the bias is broadcast there.
HWY_INLINE Range run_through(std::int64_t own, std::int64_t piece, std::int64_t all) {
  return own == 1 ? Range{0, all} : Range{piece, piece + 1};
}

HWY_NOINLINE void add_bias_tile(const BiasView& dbias, const BackwardScratch& scratch, const float* dscore,
                                Range rows, Range cols) {
  for (std::int64_t r = 0; r < rows.size(); ++r) {
    float* to = scratch.dbias + (dbias.extent[2] == 1 ? 0 : r) * scratch.tile_ld;
    const float* from = dscore + r * scratch.tile_ld;
    if (dbias.extent[3] == 1) {
      Vec sum = set(0.0f);
      for (std::int64_t c = cols.begin; c < cols.end; c += lanes) sum = hn::Add(sum, load(from + c));
      to[0] += sum_of(sum);
    } else {
      for (std::int64_t c = cols.begin; c < cols.end; c += lanes)
        store(hn::Add(load(to + c), load(from + c)), to + c);
    }
  }
}

HWY_NOINLINE void bias_task(const Problem& problem, const BackwardRows& shared,
                            const BackwardScratch& scratch, std::int64_t index) {
  const BiasView& dbias = problem.dbias;
  const BiasTasks tasks(problem);
  const auto [tile_m, block_n] = scratch.tiling;
  const std::int64_t j = index % tasks.extent[3], i = index / tasks.extent[3] % tasks.extent[2];
  const std::int64_t head = index / (tasks.extent[3] * tasks.extent[2]) % tasks.extent[1];
  const std::int64_t batch = index / (tasks.extent[3] * tasks.extent[2] * tasks.extent[1]);
  zero_row(scratch.dbias, tile_m * scratch.tile_ld);

  const Range batches = run_through(dbias.extent[0], batch, problem.batch);
  const Range heads = run_through(dbias.extent[1], head, problem.num_heads_q);
  for (std::int64_t b = batches.begin; b < batches.end; ++b) {
    const Sequence sequence = problem.sequence(b);
    const Mask mask = problem.mask(sequence);
    const Range n_blocks = run_through(dbias.extent[3], j, (sequence.seqlen_k + block_n - 1) / block_n);
    const Range m_tiles = run_through(dbias.extent[2], i, (sequence.seqlen_q + tile_m - 1) / tile_m);
    for (std::int64_t n = n_blocks.begin; n < n_blocks.end && n * block_n < sequence.seqlen_k; ++n) {
      for (std::int64_t h = heads.begin; h < heads.end; ++h) {
        const Scoring scoring(problem, sequence, b, h);
        const KeyBlock block = load_keys(problem, scratch, sequence, b, h / problem.group_size, n * block_n);
        for (std::int64_t m = m_tiles.begin; m < m_tiles.end && m * tile_m < sequence.seqlen_q; ++m) {
          const Range tile{m * tile_m, std::min<long long>((m + 1) * tile_m, sequence.seqlen_q)};
          const Range cols = columns_of(mask.keys_of_any(tile), block.keys);
          if (cols.empty()) continue;
          const std::int64_t at = shared.index(problem, sequence, b, h, tile.begin);
          Ahead nothing;
          score_tile(problem, scratch, sequence, b, h, tile, block, cols, nothing);
          gradient_tile<Of::score>(scoring, mask, scratch, tile, n * block_n, cols, shared.lse + at,
                                   shared.delta + at);
          add_bias_tile(dbias, scratch, scratch.dp, tile, cols);
        }
      }
    }
  }

  const std::int64_t rows = dbias.extent[2] == 1 ? 1 : std::min(tile_m, dbias.extent[2] - i * tile_m);
  const std::int64_t cols = dbias.extent[3] == 1 ? 1 : std::min(block_n, dbias.extent[3] - j * block_n);
  with_type(dbias.dtype, [&](auto* type) HWY_ATTR {
    using T = std::remove_pointer_t<decltype(type)>;
    for (std::int64_t r = 0; r < rows; ++r) {
      T* to = static_cast<T*>(dbias.data) + dbias.offset(batch, head, i * tile_m + r, j * block_n);
      const float* from = scratch.dbias + r * scratch.tile_ld;
      for (std::int64_t c = 0; c < cols; ++c) to[c * dbias.col] = from_float<T>(from[c]);
    }
  });
}

// --- All of it ---------------------------------------------------------------------------------------------

struct BackwardLayout {
  std::byte* shared;
  std::byte* scratch;  // one a thread
  std::size_t scratch_bytes, bytes;

  BackwardLayout(const Problem& problem, int threads, void* workspace) {
    Carver rows(nullptr), one(nullptr);
    BackwardRows(rows, problem);
    BackwardScratch(one, problem);
    scratch_bytes = one.used();
    Carver carve(workspace);
    shared = carve.take<std::byte>(static_cast<std::int64_t>(rows.used()));
    scratch = carve.take<std::byte>(static_cast<std::int64_t>(scratch_bytes) * threads);
    bytes = carve.used();
  }
  [[nodiscard]] BackwardScratch thread(const Problem& problem, int slot) const {
    Carver carve(scratch + static_cast<std::size_t>(slot) * scratch_bytes);
    return {carve, problem};
  }
};

HWY_NOINLINE void backward(const Problem& problem, int threads, void* workspace) {
  const BackwardLayout layout(problem, threads, workspace);
  Carver carve(layout.shared);
  const BackwardRows shared(carve, problem);
  const auto [tile_m, block_n] = shared.tiling;
  const BlockTasks row_tiles(problem, problem.num_heads_q, tile_m, shared.first_row_tile,
                             [](const Sequence& sequence) { return sequence.allocated_q; });
  const BlockTasks key_blocks(problem, problem.num_heads_k, block_n, shared.first_key_block,
                              [](const Sequence& sequence) { return sequence.allocated_k; });

  const auto prepare = [&](std::int64_t index, int) {
    const BlockTasks::Task task = row_tiles.task(index);
    const std::int64_t begin = task.block * row_tiles.size;
    const std::int64_t allocated = sequence_or_rest(problem, task.b).allocated_q;
    prepare_rows(problem, shared, index, task.b, task.h,
                 {begin, std::min(begin + row_tiles.size, allocated)});
  };
  parallel_for(row_tiles.count(), threads, prepare);

  const auto keys = [&](std::int64_t index, int slot) {
    const BlockTasks::Task task = key_blocks.task(index);
    [[maybe_unused]] const Session session;
    backward_task(problem, shared, row_tiles, layout.thread(problem, slot), task.b, task.h,
                  task.block * key_blocks.size);
  };
  parallel_for(key_blocks.count(), threads, keys);

  if (problem.dsinks != nullptr) {
    const auto sinks = [&](std::int64_t h, int) { sink_gradient(problem, shared, h); };
    parallel_for(problem.num_heads_q, threads, sinks);
  }
  if (problem.dbias.given()) {
    const auto bias = [&](std::int64_t index, int slot) {
      [[maybe_unused]] const Session session;
      bias_task(problem, shared, layout.thread(problem, slot), index);
    };
    parallel_for(BiasTasks(problem).count(), threads, bias);
  }
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
