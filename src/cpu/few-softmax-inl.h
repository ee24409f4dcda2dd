// The softmax of a block of keys in vectors whose lanes are rows, those of one key or of several:
// nothing is summed across the lanes of a row's keys but once a block. A layout says where a vector's rows
// and keys lie, and what the weights p become:
//
//   rows                           of a vector
//   s_ld, p_ld                     `rows` of them are from a vector's rows to the next ones, in s and in p
//   load_rows, store_rows(…, s, c) the vector whose first key is c
//   over_keys(cols, body)          body(c, i) for all vectors of `cols` columns, i from 0 to 3 in turn
//   columns(c)                     which key each lane has
//   of_rows(x), keep_rows(x, to)   the rows' own numbers in all their lanes, and back
//   across_keys(x, combine)        combined with a row's other lanes
//   store_weights(cols, p, weigh)  p, of vectors that weigh(c, 0 or 1) makes: two sums add them up in turn
//   called_with_maxima             whether lines are called for with the maxima, too
//
// Of packs (few-packs-inl.h) a layout has no s_ld, p_ld and store_weights: they are weighed elsewhere, by
//
//   store_vector(x, p, c)          one vector of p
//   cell(r, j)                     where row r's weights of keys j and j + 1 are in it, j even
#pragma once

#include "cpu/few-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

constexpr std::int64_t lane_rows = 16;  // that stream, at most

// What is known of each row: what scores are made of, and which columns are seen.
struct RowLanes {
  alignas(64) float exponent[lane_rows] = {};  // scores to units of log2 e
  alignas(64) float factor[lane_rows] = {};    // q·k to scores
  alignas(64) float slope[lane_rows] = {};
  alignas(64) std::int32_t position[lane_rows] = {};  // where ALiBi's distance is 0
  alignas(64) std::int32_t begin[lane_rows] = {}, end[lane_rows] = {};

  void set(std::int64_t lane, const TaskRows& task, std::int64_t row, std::int64_t key, Range cols) {
    Scoring other = task.first;
    const Scoring& scoring = task.scoring(row, other);
    const RowPiece piece(task.query(row), key, cols, task.keys_of_row(row));
    exponent[lane] = scoring.exponent_scale();
    factor[lane] = scoring.raw() ? 1.0f : scoring.scale;
    slope[lane] = scoring.slope;
    position[lane] = static_cast<std::int32_t>(piece.row + scoring.diagonal - key);
    begin[lane] = static_cast<std::int32_t>(piece.visible.begin);
    end[lane] = static_cast<std::int32_t>(piece.visible.end);
  }
};

// Whether scores are q·k itself, and every row sees every column.
HWY_INLINE bool shows_all(const TaskRows& task, Range rows, std::int64_t key, Range cols) {
  const Range all = task.mask.keys_of_all({task.query(rows.begin), task.query(rows.end - 1) + 1});
  return task.problem.alibi_slopes == nullptr && task.first.raw() && all.begin <= key &&
         all.end >= key + cols.end;
}

template <class Layout>
struct LaneSoftmax {
  // From s to p, of the first `count` rows, of which some may not be there. `of` where not all is shown
  // (shows_all). max and sum move on, alpha is what o must shrink by.
  static HWY_INLINE void run(const Scoring& scoring, const RowLanes* of, std::int64_t count, Range cols,
                             float* s, bfloat16* p, float* max, float* sum, float* alpha, Next& next) {
    const auto part = [&](std::int64_t i, Vec scale) HWY_ATTR {
      weigh_rows(s + i * Layout::s_ld, cols.end, scale, p + i * Layout::p_ld, max + i, sum + i, alpha + i,
                 next);
    };
    for (std::int64_t i = 0; i < count; i += Layout::rows) {
      if (of == nullptr) {
        part(i, set(scoring.scale));
      } else {
        make_scores(scoring, *of, i, s + i * Layout::s_ld, cols.end);
        part(i, Layout::of_rows(of->exponent + i));
      }
    }
  }

  // Scores that are not q·k itself, in place; -inf where a row does not see the key.
  static HWY_NOINLINE void make_scores(const Scoring& scoring, const RowLanes& rows, std::int64_t first,
                                       float* s, std::int64_t cols) {
    const Vec factor = Layout::of_rows(rows.factor + first), slope = Layout::of_rows(rows.slope + first);
    const auto position = Layout::of_rows(rows.position + first);
    const auto begin = Layout::of_rows(rows.begin + first), end = Layout::of_rows(rows.end + first);
    const bool sloped = scoring.problem.alibi_slopes != nullptr;
    Layout::over_keys(cols, [&](std::int64_t c, int /*i*/) HWY_ATTR {
      const auto column = Layout::columns(c);
      Vec x = Layout::load_rows(s, c);
      x = scoring.capped ? hn::Mul(tanh(hn::Mul(x, set(scoring.cap_in))), set(scoring.cap_out))
                         : hn::Mul(x, factor);
      if (sloped) {
        const Vec distance = hn::ConvertTo(FloatTag(), hn::Abs(hn::Sub(position, column)));
        x = hn::NegMulAdd(slope, distance, x);
      }
      const auto hidden = hn::Or(hn::Lt(column, begin), hn::Not(hn::Lt(column, end)));
      Layout::store_rows(hn::IfThenElse(hn::RebindMask(FloatTag(), hidden), set(-infinity), x), s, c);
    });
  }

  // The largest score of each lane.
  static HWY_INLINE Vec largest_of(const float* s, std::int64_t cols, Next& next) {
    Vec most[4] = {set(-infinity), set(-infinity), set(-infinity), set(-infinity)};
    Layout::over_keys(cols, [&](std::int64_t c, int i) HWY_ATTR {
      if constexpr (Layout::called_with_maxima) next.fetch_run<2>();
      most[i] = larger(Layout::load_rows(s, c), most[i]);
    });
    return hn::Max(hn::Max(most[0], most[1]), hn::Max(most[2], most[3]));
  }
  // A score that is NaN is no maximum; its weight is NaN.
  static HWY_INLINE Vec larger(Vec score, Vec most) { return hn::Max(score, most); }

  // How scores become weights.
  struct Weighing {
    Vec scale, shift;

    HWY_INLINE Vec operator()(Vec x) const { return exp2<exp2_degree>(hn::MulSub(x, scale, shift)); }
  };
  // From the largest score of each lane: max moves on, the weights of blocks before must shrink. Of scores
  // too large to be scaled as they are the maximum is subtracted in place.
  static HWY_INLINE Weighing settle(Vec largest, float* s, std::int64_t cols, Vec scale, float* max,
                                    Vec& shrink) {
    largest = Layout::across_keys(largest, [](Vec x, Vec y) HWY_ATTR { return hn::Max(x, y); });
    const Vec before = Layout::of_rows(max);
    largest = hn::Max(largest, before);
    // A row that has seen nothing but -inf keeps p = 2^-inf = 0 instead of NaN.
    const Vec zero = set(0.0f);
    const Vec base = hn::IfThenElse(hn::Eq(largest, set(-infinity)), zero, largest);
    Vec shift = hn::Mul(base, scale), exponent = hn::Sub(hn::Mul(before, scale), shift);
    const auto near = hn::Le(hn::Abs(shift), set(most_rounded));
    if (!hn::AllTrue(FloatTag(), near)) {
      const Vec less = hn::IfThenElse(near, zero, base);
      Layout::over_keys(cols, [&](std::int64_t c, int /*i*/) HWY_ATTR {
        Layout::store_rows(hn::Sub(Layout::load_rows(s, c), less), s, c);
      });
      exponent = hn::IfThenElse(near, exponent, hn::Mul(hn::Sub(before, base), scale));
      shift = hn::IfThenElse(near, shift, zero);
    }
    Layout::keep_rows(largest, max);
    shrink = hn::IfThenElse(hn::Eq(before, largest), set(1.0f), exp2(exponent));
    return {scale, shift};
  }
  // total: of each lane's weights.
  static HWY_INLINE void add_to_sum(Vec total, Vec shrink, float* sum) {
    total = Layout::across_keys(total, [](Vec x, Vec y) HWY_ATTR { return hn::Add(x, y); });
    Layout::keep_rows(hn::MulAdd(shrink, Layout::of_rows(sum), total), sum);
  }

 private:
  // Of one vector's rows. Two lines of `next` are called for with each vector, with the maxima perhaps two
  // more.
  static HWY_INLINE void weigh_rows(float* s, std::int64_t cols, Vec scale, bfloat16* p, float* max,
                                    float* sum, float* alpha, Next& next) {
    Vec shrink;
    const Weighing weigh = settle(largest_of(s, cols, next), s, cols, scale, max, shrink);
    Vec total[2] = {set(0.0f), set(0.0f)};
    Layout::store_weights(cols, p, [&](std::int64_t c, int i) TESSERA_INLINE_LAMBDA {
      next.fetch_run<2>();
      const Vec x = weigh(Layout::load_rows(s, c));
      total[i] = hn::Add(total[i], x);
      return x;
    });
    add_to_sum(hn::Add(total[0], total[1]), shrink, sum);
    Layout::keep_rows(shrink, alpha);
  }
};

// Of a task's thread, for products that work block by block: the rows' maxima and sums, and where a block
// lies.
template <std::int64_t most_lanes>
class BlockState {
 public:
  // A head's rows have `width` lanes.
  BlockState(std::int64_t rows, std::int64_t width) : rows_(rows), width_(width) {}

  void start_rows(std::int64_t h, const float* row_max, const float* row_sum) {
    for (std::int64_t r = 0; r < width_; ++r) {
      max_[h * width_ + r] = r < rows_ ? row_max[r] : 0.0f;
      sum_[h * width_ + r] = r < rows_ ? sum_of(load(row_sum + r * lanes)) : 0.0f;
    }
  }
  void finish_rows(std::int64_t h, float* row_max, float* row_sum) const {
    for (std::int64_t r = 0; r < rows_; ++r) {
      row_max[r] = max_[h * width_ + r];
      zero_row(row_sum + r * lanes, lanes);
      row_sum[r * lanes] = sum_[h * width_ + r];
    }
  }
  // The block's first `keys` keys, for all heads.
  HWY_INLINE void start_block(const void* const* k_rows, const void* const* v_rows, std::int64_t keys,
                              std::int64_t dim, std::int64_t dim_v) {
    k_rows_ = k_rows;
    v_rows_ = v_rows;
    keys_ = keys;
    dim_ = dim;
    dim_v_ = dim_v;
  }

 protected:
  std::int64_t rows_, width_, keys_ = 0, dim_ = 0, dim_v_ = 0;
  const void *const *k_rows_ = nullptr, *const *v_rows_ = nullptr;
  alignas(64) float max_[most_lanes] = {};
  alignas(64) float sum_[most_lanes] = {};

  // From s to p, in the place of few.s, and o scaled by what it makes of the maxima. p takes half the room
  // of s: rows of p that are not there have theirs, too.
  template <class Layout>
  HWY_INLINE void softmax_as(const TaskRows& task, const Few& few, std::int64_t h, Range rows,
                             std::int64_t key, Range cols, std::int64_t count, float* s, Next& next) {
    alignas(64) float alpha[lane_rows];
    RowLanes of;
    const bool plain = shows_all(task, rows, key, cols);
    for (std::int64_t r = 0; r < rows.size() && !plain; ++r) of.set(r, task, rows.begin + r, key, cols);
    LaneSoftmax<Layout>::run(task.first, plain ? nullptr : &of, count, cols, s,
                             reinterpret_cast<bfloat16*>(few.s), max_ + h * width_, sum_ + h * width_, alpha,
                             next);
    for (std::int64_t r = 0; r < rows_; ++r) scale_row(few.o + r * few.o_ld, few.o_ld, alpha[r]);
  }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
