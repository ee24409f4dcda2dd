// From q·k to scores, row by row: scale, softcap, ALiBi, bias and mask in the order of docs/semantics.md. All
// scores are in units of log2 e, so that a probability is a plain power of two.
#pragma once

#include "core/mask.h"
#include "cpu/engine-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

// The score's constants for one (batch, head), and where it finds what depends on the element.
struct Scoring {
  const Problem& problem;
  std::int64_t b, h;
  float scale;  // q·k to units of log2 e
  bool capped;  // cap_out * tanh(cap_in * q·k), cap_out in units of log2 e
  float cap_in, cap_out;
  float slope;            // ALiBi, in units of log2 e
  std::int64_t diagonal;  // seqlen_k - seqlen_q: where ALiBi's distance is 0
  bool biased;

  Scoring(const Problem& p, const Sequence& sequence, std::int64_t batch_index, std::int64_t head)
      : problem(p),
        b(batch_index),
        h(head),
        scale(static_cast<float>(factor(p, head) * 1.4426950408889634)),
        capped(p.softcap > 0.0),
        cap_in(capped ? static_cast<float>(factor(p, head) / p.softcap) : 0.0f),
        cap_out(static_cast<float>(p.softcap * 1.4426950408889634)),
        slope(canonical(p.alibi_slope(batch_index, head) * log2e)),
        diagonal(sequence.seqlen_k - sequence.seqlen_q),
        biased(p.bias.given()) {}

  // From q·k to the score: of an 8-bit cache, as it is loaded, with its head's scale.
  [[nodiscard]] static double factor(const Problem& p, std::int64_t head) {
    return p.softmax_scale * p.cache.k_scale.of(head / p.group_size) * unit_of(p.k.dtype);
  }
  [[nodiscard]] bool plain() const { return !capped && slope == 0.0f && !biased; }
  // Whether q·k itself orders the keys of a row: its scaling can then wait for the exponent. (A sink is given
  // in units of scores.)
  [[nodiscard]] bool raw() const { return plain() && scale > 0.0f && problem.sinks == nullptr; }
  // From the units in which score_row leaves a row to those of log2 e.
  [[nodiscard]] float exponent_scale() const { return raw() ? scale : 1.0f; }
  [[nodiscard]] unsigned head_index() const { return static_cast<unsigned>(b * problem.num_heads_q + h); }
};

// The columns of a block of keys that are seen, in whole panels and whole vectors; empty if none is.
HWY_INLINE Range columns_of(Range seen, Range block) {
  if (seen.end <= block.begin || seen.begin >= block.end) return {};
  return {std::max(seen.begin - block.begin, 0LL) / col_align * col_align,
          round_up(std::min(seen.end, block.end) - block.begin, col_unit)};
}

// Columns that are handled together: a pair of vectors, or of halves of a cell.
constexpr std::int64_t group_cols = 2 * pair_distance;
static_assert(col_align % group_cols == 0);

// A piece of one row: columns cols of a tile whose column 0 is key `key`, and those of them that the row
// sees.
struct RowPiece {
  std::int64_t row;  // query index in its sequence
  std::int64_t key;
  Range cols, visible;
  Range live;  // visible in whole groups: what is computed. Elsewhere p and ds are 0.

  RowPiece(std::int64_t row_, std::int64_t key_, Range cols_, Range visible_keys)
      : row(row_),
        key(key_),
        cols(cols_),
        visible{std::max<long long>(visible_keys.begin - key_, cols_.begin),
                std::min<long long>(visible_keys.end - key_, cols_.end)},
        live{cols_.begin, cols_.begin} {
    if (visible.empty()) return;
    live = {visible.begin / group_cols * group_cols,
            std::min<long long>(round_up(visible.end, group_cols), cols_.end)};
  }
};

// inner(begin, end) for the columns that the row sees whole groups of, edge(begin, end) for each other group,
// in ascending order.
template <class Edge, class Inner>
HWY_INLINE void over_columns(const RowPiece& piece, const Edge& edge, const Inner& inner) {
  std::int64_t begin = piece.live.begin, end = piece.live.end;
  if (begin < piece.visible.begin) {
    const std::int64_t first_end = std::min(begin + group_cols, end);
    edge(begin, first_end);
    begin = first_end;
  }
  const bool cut = begin < end && piece.visible.end < end;
  const std::int64_t last = cut ? (end - 1) / group_cols * group_cols : end;
  if (begin < last) inner(begin, last);
  if (cut) edge(last, end);
}

// Zeros in the columns of p or ds that the row does not see: when all else of the row is done, since they may
// lie where scores did.
template <class T>
HWY_INLINE void zero_rest(const RowPiece& piece, T* to) {
  zero_row(to + piece.cols.begin, piece.live.begin - piece.cols.begin);
  zero_row(to + piece.live.end, piece.cols.end - piece.live.end);
}

// In units of log2 e. A finite bias stays finite: the lowest float is a customary mask.
HWY_INLINE Vec bias_score(Vec x) {
  const Vec lowest = set(std::numeric_limits<float>::lowest()),
            highest = set(std::numeric_limits<float>::max());
  const Vec score =
      hn::IfThenElse(hn::IsInf(x), x, hn::Min(highest, hn::Max(lowest, hn::Mul(x, set(log2e)))));
  return hn::IfThenElse(hn::IsNaN(x), set(not_a_number), score);
}
HWY_INLINE float bias_score(float x) { return hn::GetLane(bias_score(set(x))); }

// Bias of the piece's visible columns, in units of log2 e, zeros in the others of its groups: columns out of
// sight may lie outside the tensor.
HWY_INLINE void load_bias(const Scoring& scoring, const RowPiece& piece, float* to) {
  const BiasView& bias = scoring.problem.bias;
  if (piece.live.empty()) return;
  std::fill(to + piece.live.begin, to + piece.live.end, 0.0f);
  with_type(bias.dtype, [&](auto* type) HWY_ATTR {
    const auto* from =
        static_cast<decltype(type)>(bias.data) + bias.offset(scoring.b, scoring.h, piece.row, piece.key);
    if (bias.col == 1) {
      std::int64_t c = piece.visible.begin;
      for (; c + lanes <= piece.visible.end; c += lanes) store(bias_score(load_as_float(from + c)), to + c);
      for (; c < piece.visible.end; ++c) to[c] = bias_score(to_float(from[c]));
    } else {
      for (std::int64_t c = piece.visible.begin; c < piece.visible.end; ++c)
        to[c] = bias_score(to_float(from[c * bias.col]));
    }
  });
}

// Scratch of one row, as long as a tile is wide (and a little more, for whole vectors).
struct RowScratch {
  float* bias;
  std::uint16_t* random;
};

// -inf in the columns that the row does not see.
HWY_INLINE Vec hide(const RowPiece& piece, Vec x, std::int64_t c) {
  const auto column = hn::Iota(IntTag(), static_cast<std::int32_t>(c));
  const auto begin = hn::Set(IntTag(), static_cast<std::int32_t>(piece.visible.begin));
  const auto end = hn::Set(IntTag(), static_cast<std::int32_t>(piece.visible.end));
  const auto hidden = hn::Or(hn::Lt(column, begin), hn::Not(hn::Lt(column, end)));
  return hn::IfThenElse(hn::RebindMask(FloatTag(), hidden), set(-infinity), x);
}

// One vector of scores from q·k. With a softcap, cap_slope receives its derivative, else it is left alone.
template <bool masked>
HWY_INLINE Vec score(const Scoring& scoring, const RowPiece& piece, Vec x, std::int64_t c, const float* bias,
                     Vec& cap_slope) {
  if (scoring.capped) {
    const Vec t = tanh(hn::Mul(x, set(scoring.cap_in)));
    cap_slope = hn::NegMulAdd(t, t, set(1.0f));
    x = hn::Mul(t, set(scoring.cap_out));
  } else {
    x = hn::Mul(x, set(scoring.scale));
  }
  if (scoring.slope != 0.0f) {
    const auto ahead = static_cast<std::int32_t>(piece.row + scoring.diagonal - piece.key - c);
    const auto distance = hn::Abs(hn::Sub(hn::Set(IntTag(), ahead), hn::Iota(IntTag(), 0)));
    x = hn::NegMulAdd(set(scoring.slope), hn::ConvertTo(FloatTag(), distance), x);
  }
  if (scoring.biased) x = hn::Add(x, load(bias + c));
  return masked ? hide(piece, x, c) : x;
}

// Turns q·k into scores, in place, and returns the largest. raw leaves out the scale.
template <bool raw>
HWY_INLINE float score_row(const Scoring& scoring, const RowPiece& piece, float* x, const float* bias) {
  Vec largest[4] = {set(-infinity), set(-infinity), set(-infinity), set(-infinity)};
  const auto step = [&](std::int64_t c, Vec& max) HWY_ATTR {
    Vec y = load(x + c);
    if constexpr (!raw) {
      Vec unused;
      y = score<false>(scoring, piece, y, c, bias, unused);
      store(y, x + c);
    }
    max = hn::Max(max, y);
  };
  const auto edge = [&](std::int64_t c, std::int64_t end) HWY_ATTR {
    for (; c < end; c += lanes) {
      Vec y = load(x + c), unused;
      y = raw ? hide(piece, y, c) : score<true>(scoring, piece, y, c, bias, unused);
      store(y, x + c);
      largest[0] = hn::Max(largest[0], y);
    }
  };
  const auto inner = [&](std::int64_t c, std::int64_t end) HWY_ATTR {
    for (; c + 4 * lanes <= end; c += 4 * lanes) {
      step(c, largest[0]);
      step(c + lanes, largest[1]);
      step(c + 2 * lanes, largest[2]);
      step(c + 3 * lanes, largest[3]);
    }
    for (; c < end; c += lanes) step(c, largest[0]);
  };
  over_columns(piece, edge, inner);
  return max_of(hn::Max(hn::Max(largest[0], largest[1]), hn::Max(largest[2], largest[3])));
}

HWY_INLINE float score_row(const Scoring& scoring, const RowPiece& piece, float* x,
                           const RowScratch& scratch) {
  if (scoring.biased) load_bias(scoring, piece, scratch.bias);
  return scoring.raw() ? score_row<true>(scoring, piece, x, scratch.bias)
                       : score_row<false>(scoring, piece, x, scratch.bias);
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
