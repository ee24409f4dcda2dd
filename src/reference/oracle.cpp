#include "reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "reference/numbers.h"

namespace tessera::reference {
namespace {

using Index = std::int64_t;

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

// What the loops below compute in. round() is applied to the operands of matmuls (with the input dtype) and
// to results (with the dtype of the tensor that takes them).
struct Exact {
  using Real = double;
  static Real round(DType, Real x) { return x; }
};
struct Plain {
  using Real = float;
  static Real round(DType dtype, Real x) { return round_to(dtype, x); }
};

template <class Real>
struct Matrix {
  Index rows = 0, cols = 0;
  std::vector<Real> data;

  Matrix(Index row_count, Index col_count) : rows(row_count), cols(col_count), data(row_count * col_count) {}
  Real* row(Index i) { return data.data() + i * cols; }
  const Real* row(Index i) const { return data.data() + i * cols; }
};

// y += a * x. Every matmul is written as these, so that sums run in the order of the index and compilers may
// still vectorise.
template <class Real>
void add_scaled(Real* y, Real a, const Real* x, Index count) {
  for (Index c = 0; c < count; ++c) y[c] += a * x[c];
}

// y[j] = sum over c of x[c] * columns(c, j): a row vector times a matrix.
template <class Real>
void multiply(std::vector<Real>& y, const Real* x, const Matrix<Real>& columns) {
  y.assign(columns.cols, Real(0));
  for (Index c = 0; c < columns.rows; ++c) add_scaled(y.data(), x[c], columns.row(c), columns.cols);
}

template <class Real>
Matrix<Real> transpose(const Matrix<Real>& a) {
  Matrix<Real> t(a.cols, a.rows);
  for (Index i = 0; i < a.rows; ++i) {
    for (Index j = 0; j < a.cols; ++j) t.row(j)[i] = a.row(i)[j];
  }
  return t;
}

// docs/semantics.md, Mask, read afresh: query i stands at key i + shift, and sees `left` keys behind it and
// `right` ahead.
bool sees(const Problem& problem, const Sequence& sequence, Index i, Index j) {
  const bool bottom_right = problem.alignment == Alignment::bottom_right;
  const Index ahead = j - (i + (bottom_right ? sequence.seqlen_k - sequence.seqlen_q : 0));
  return ahead <= problem.window_right && -ahead <= problem.window_left;
}

// Positions of row s (from the start of the tensor, as in View), head h in the dense arrays of Outputs and
// Gradients.
Index dense_row(const Problem& problem, Index rows, Index heads, Index b, Index s, Index h) {
  return ((problem.packed ? 0 : b * rows) + s) * heads + h;
}
Index dense_lse(const Problem& problem, Index b, Index s, Index h) {
  return ((problem.packed ? 0 : b * problem.num_heads_q) + h) * problem.rows_q + s;
}

template <class Precision>
class Loops {
 public:
  using Real = typename Precision::Real;

  explicit Loops(const Problem& problem)
      : problem_(problem),
        scale_(static_cast<Real>(problem.softmax_scale)),
        softcap_(static_cast<Real>(problem.softcap)),
        keep_scale_(problem.dropout.threshold == 0
                        ? Real(0)
                        : Real(65536) / static_cast<Real>(problem.dropout.threshold)) {}

  Outputs forward() const {
    const Index instances = problem_.packed ? 1 : problem_.batch;
    Outputs outputs;
    outputs.o.assign(instances * problem_.rows_q * problem_.num_heads_q * problem_.head_dim_v, 0.0);
    outputs.lse.assign(instances * problem_.rows_q * problem_.num_heads_q, minus_infinity);
    for (Index b = 0; b < problem_.batch; ++b) {
      for (Index h = 0; h < problem_.num_heads_q; ++h) forward_head(Head(problem_, b, h), outputs);
    }
    return outputs;
  }

  Gradients backward() const {
    const Index instances = problem_.packed ? 1 : problem_.batch;
    Gradients gradients;
    gradients.dq.assign(instances * problem_.rows_q * problem_.num_heads_q * problem_.head_dim, 0.0);
    gradients.dk.assign(instances * problem_.rows_k * problem_.num_heads_k * problem_.head_dim, 0.0);
    gradients.dv.assign(instances * problem_.rows_k * problem_.num_heads_k * problem_.head_dim_v, 0.0);
    std::vector<Real> dbias(bias_size());
    std::vector<Real> dsinks(problem_.sinks != nullptr ? problem_.num_heads_q : 0);
    for (Index b = 0; b < problem_.batch; ++b) {
      for (Index h_k = 0; h_k < problem_.num_heads_k; ++h_k) backward_group(b, h_k, gradients, dbias, dsinks);
    }
    for (const Real x : dbias) gradients.dbias.push_back(Precision::round(problem_.bias.dtype, x));
    for (const Real x : dsinks) gradients.dsinks.push_back(Precision::round(problem_.sinks_dtype, x));
    return gradients;
  }

  // First-order propagation of independent rounding errors through the loops above: variances, element by
  // element.
  Deviations deviations() const {
    Deviations worst;
    std::vector<double> dbias(bias_size()), dsinks(problem_.num_heads_q);
    for (Index b = 0; b < problem_.batch; ++b) {
      const Sequence sequence = problem_.sequence(b);
      for (Index h_k = 0; h_k < problem_.num_heads_k; ++h_k) {
        Matrix<double> dk(sequence.seqlen_k, problem_.head_dim), dv(sequence.seqlen_k, problem_.head_dim_v);
        for (Index h = h_k * problem_.group_size; h < (h_k + 1) * problem_.group_size; ++h) {
          const Head head(problem_, b, h);
          const Matrix<Real> dout =
              read(problem_.dout, b, sequence.q_begin, sequence.seqlen_q, h, problem_.head_dim_v);
          for (Index i = 0; i < sequence.seqlen_q; ++i) {
            deviation_row(head, i, dout.row(i), worst, dk, dv, dbias, dsinks);
          }
        }
        raise(worst.dk, dk.data);
        raise(worst.dv, dv.data);
      }
    }
    raise(worst.dbias, dbias);
    raise(worst.dsinks, dsinks);
    return worst;
  }

 private:
  // The inputs of one query head; padding is not read. k and v come transposed: (head_dim, seqlen_k).
  struct Head {
    Index b, h;
    Sequence sequence;
    Matrix<Real> q, k, v, k_t, v_t;

    Head(const Problem& problem, Index batch_index, Index head)
        : b(batch_index),
          h(head),
          sequence(problem.sequence(b)),
          q(read(problem.q, b, sequence.q_begin, sequence.seqlen_q, h, problem.head_dim)),
          k(read(problem.k, b, sequence.k_begin, sequence.seqlen_k, h / problem.group_size,
                 problem.head_dim)),
          v(read(problem.v, b, sequence.k_begin, sequence.seqlen_k, h / problem.group_size,
                 problem.head_dim_v)),
          k_t(transpose(k)),
          v_t(transpose(v)) {}
  };

  // One row after softmax.
  struct Row {
    std::vector<Real> p;        // 0 where the key is not seen
    std::vector<Real> slope;    // d(score) / d(scaled q·k): softcap's derivative
    std::vector<Real> dropped;  // p after dropout
    Real sink_p = 0;
    Real lse = 0;
  };

  static Matrix<Real> read(const View& view, Index b, Index begin, Index rows, Index h, Index width) {
    Matrix<Real> matrix(rows, width);
    for (Index i = 0; i < rows; ++i) {
      const Index offset = view.offset(b, begin + i, h);
      for (Index c = 0; c < width; ++c)
        matrix.row(i)[c] = static_cast<Real>(load(view.data, view.dtype, offset + c));
    }
    return matrix;
  }

  static Real exp_minus(Real x, Real max) { return x == Real(minus_infinity) ? Real(0) : std::exp(x - max); }

  Row row(const Head& head, Index i) const {
    Row row;
    score(head, i, row);
    softmax(head, row);
    drop(head, i, row);
    return row;
  }

  // Fills p with the scores, -inf where the mask hides the key.
  void score(const Head& head, Index i, Row& row) const {
    const Sequence& sequence = head.sequence;
    multiply(row.p, head.q.row(i), head.k_t);
    row.slope.assign(row.p.size(), Real(1));
    const auto alibi_slope = static_cast<Real>(problem_.alibi_slope(head.b, head.h));
    for (Index j = 0; j < sequence.seqlen_k; ++j) {
      Real& s = row.p[j];
      if (!sees(problem_, sequence, i, j)) {
        s = Real(minus_infinity);
        continue;
      }
      s *= scale_;
      if (softcap_ > 0) {
        const Real t = std::tanh(s / softcap_);
        s = softcap_ * t;
        row.slope[j] = 1 - t * t;
      }
      s -= alibi_slope * static_cast<Real>(std::abs(i + sequence.seqlen_k - sequence.seqlen_q - j));
      if (problem_.bias.given()) {
        s += static_cast<Real>(
            load(problem_.bias.data, problem_.bias.dtype, problem_.bias.offset(head.b, head.h, i, j)));
      }
    }
  }

  // Scores to probabilities. Where no key and no sink has weight, all are 0 and lse is -inf.
  void softmax(const Head& head, Row& row) const {
    const Real sink =
        problem_.sinks != nullptr ? static_cast<Real>(problem_.sink(head.h)) : Real(minus_infinity);
    Real max = sink;
    for (const Real s : row.p) max = std::max(max, s);
    row.sink_p = exp_minus(sink, max);
    Real sum = row.sink_p;
    for (Real& s : row.p) {
      s = exp_minus(s, max);
      sum += s;
    }
    row.lse = sum == 0 ? Real(minus_infinity) : max + std::log(sum);
    if (sum == 0) return;
    for (Real& p : row.p) p /= sum;
    row.sink_p /= sum;
  }

  void drop(const Head& head, Index i, Row& row) const {
    row.dropped = row.p;
    if (!problem_.dropout.active()) return;
    for (Index j = 0; j < head.sequence.seqlen_k; ++j) row.dropped[j] *= keep_factor(head, i, j);
  }

  Real keep_factor(const Head& head, Index i, Index j) const {
    if (!problem_.dropout.active()) return 1;
    const auto head_index = static_cast<unsigned>(head.b * problem_.num_heads_q + head.h);
    const bool kept = problem_.dropout.keeps(head_index, static_cast<unsigned>(i), static_cast<unsigned>(j));
    return kept ? keep_scale_ : Real(0);
  }

  std::vector<Real> output(const Head& head, const Row& row) const {
    std::vector<Real> o(problem_.head_dim_v);
    for (Index j = 0; j < head.sequence.seqlen_k; ++j) {
      if (row.dropped[j] == 0) continue;
      add_scaled(o.data(), Precision::round(problem_.dtype, row.dropped[j]), head.v.row(j),
                 problem_.head_dim_v);
    }
    for (Real& x : o) x = Precision::round(problem_.o.dtype, x);
    return o;
  }

  void forward_head(const Head& head, Outputs& outputs) const {
    for (Index i = 0; i < head.sequence.seqlen_q; ++i) {
      const Index s = head.sequence.q_begin + i;
      const Row p = row(head, i);
      const std::vector<Real> o = output(head, p);
      const Index at = dense_row(problem_, problem_.rows_q, problem_.num_heads_q, head.b, s, head.h);
      std::copy(o.begin(), o.end(), outputs.o.begin() + at * problem_.head_dim_v);
      outputs.lse[dense_lse(problem_, head.b, s, head.h)] = p.lse;
    }
  }

  // dk and dv of one key head sum over the query heads of its group.
  void backward_group(Index b, Index h_k, Gradients& gradients, std::vector<Real>& dbias,
                      std::vector<Real>& dsinks) const {
    const Sequence sequence = problem_.sequence(b);
    Matrix<Real> dk(sequence.seqlen_k, problem_.head_dim), dv(sequence.seqlen_k, problem_.head_dim_v);
    for (Index h = h_k * problem_.group_size; h < (h_k + 1) * problem_.group_size; ++h) {
      const Head head(problem_, b, h);
      Matrix<Real> dq(sequence.seqlen_q, problem_.head_dim);
      const Matrix<Real> dout =
          read(problem_.dout, b, sequence.q_begin, sequence.seqlen_q, h, problem_.head_dim_v);
      for (Index i = 0; i < sequence.seqlen_q; ++i) {
        backward_row(head, i, dout.row(i), dq.row(i), dk, dv, dbias, dsinks);
      }
      store(dq, scale_, problem_.dq.dtype, b, sequence.q_begin, h, problem_.rows_q, problem_.num_heads_q,
            gradients.dq);
    }
    store(dk, scale_, problem_.dk.dtype, b, sequence.k_begin, h_k, problem_.rows_k, problem_.num_heads_k,
          gradients.dk);
    store(dv, Real(1), problem_.dv.dtype, b, sequence.k_begin, h_k, problem_.rows_k, problem_.num_heads_k,
          gradients.dv);
  }

  // What the gradients of a row are made from.
  struct RowBackward {
    std::vector<Real> o, dout, dp;  // dout as an operand; dp before dropout
    Real delta = 0;
  };

  RowBackward row_backward(const Head& head, Index i, const Row& p, const Real* dout) const {
    RowBackward r;
    // delta is made from o as the caller holds it: rounded to o's dtype in the plain version.
    r.o = output(head, p);
    if (problem_.dlse.given()) r.delta = -read_dlse(head, i);
    for (Index c = 0; c < problem_.head_dim_v; ++c) r.delta += dout[c] * r.o[c];
    r.dout.assign(dout, dout + problem_.head_dim_v);
    for (Real& x : r.dout) x = Precision::round(problem_.dtype, x);
    multiply(r.dp, r.dout.data(), head.v_t);
    return r;
  }

  void backward_row(const Head& head, Index i, const Real* dout, Real* dq, Matrix<Real>& dk, Matrix<Real>& dv,
                    std::vector<Real>& dbias, std::vector<Real>& dsinks) const {
    const Row p = row(head, i);
    const RowBackward r = row_backward(head, i, p, dout);
    if (problem_.sinks != nullptr) dsinks[head.h] -= p.sink_p * r.delta;
    for (Index j = 0; j < head.sequence.seqlen_k; ++j) {
      if (p.p[j] == 0) continue;
      const Real ds = p.p[j] * (r.dp[j] * keep_factor(head, i, j) - r.delta);
      if (problem_.bias.given()) dbias[dbias_index(head, i, j)] += ds;
      const Real ds_operand = Precision::round(problem_.dtype, ds * p.slope[j]);
      add_scaled(dq, ds_operand, head.k.row(j), problem_.head_dim);
      add_scaled(dk.row(j), ds_operand, head.q.row(i), problem_.head_dim);
      add_scaled(dv.row(j), Precision::round(problem_.dtype, p.dropped[j]), r.dout.data(),
                 problem_.head_dim_v);
    }
  }

  // worst becomes the largest root of the variances, if that is larger.
  static void raise(double& worst, const std::vector<double>& variances) {
    for (const double x : variances) worst = std::max(worst, std::sqrt(x));
  }
  static double squared(double x) { return x * x; }
  static double norm(const Real* x, Index count) {
    double sum = 0;
    for (Index c = 0; c < count; ++c) sum += squared(x[c]);
    return std::sqrt(sum);
  }

  // A rounding of x to dtype has the deviation rounding(dtype) * |x|, a dot product accumulated in float
  // single * |a| * |b|.
  void deviation_row(const Head& head, Index i, const Real* dout, Deviations& worst, Matrix<double>& dk,
                     Matrix<double>& dv, std::vector<double>& dbias, std::vector<double>& dsinks) const {
    const Index dim = problem_.head_dim, dim_v = problem_.head_dim_v;
    const double single = rounding(DType::float32), operand = rounding(problem_.dtype);
    const double dout_operand = problem_.dout.dtype == problem_.dtype ? 0.0 : operand;
    const Row p = row(head, i);
    const RowBackward r = row_backward(head, i, p, dout);
    if (p.lse == Real(minus_infinity)) return;
    const double q_norm = norm(head.q.row(i), dim), dout_norm = norm(dout, dim_v);

    double lse = 0;
    std::vector<double> o(dim_v);
    double delta = squared(single * dout_norm * norm(r.o.data(), dim_v));
    for (Index c = 0; c < dim_v; ++c) delta += squared(rounding(problem_.o.dtype) * dout[c] * r.o[c]);
    // The error of a score, and with it the relative one of its probability.
    std::vector<double> score(head.sequence.seqlen_k);
    for (Index j = 0; j < head.sequence.seqlen_k; ++j) {
      const double product = scale_ * q_norm * norm(head.k.row(j), dim) * p.slope[j];
      score[j] = squared(single * (product + 2 * std::abs(p.lse) + 1));
      lse += squared(p.p[j]) * score[j];
      const double p_error = squared(p.dropped[j]) * (score[j] + squared(operand));
      for (Index c = 0; c < dim_v; ++c) {
        o[c] += p_error * squared(head.v.row(j)[c]);
        dv.row(j)[c] += p_error * squared(dout[c]) + squared(dout_operand * p.dropped[j] * dout[c]);
      }
      delta += p_error * squared(r.dp[j]);
    }
    worst.lse = std::max(worst.lse, std::sqrt(lse));
    raise(worst.o, o);
    if (problem_.sinks != nullptr) {
      const double lse_error = squared(single * (2 * std::abs(p.lse) + 1));
      dsinks[head.h] += squared(p.sink_p) * (delta + lse_error * squared(r.delta));
    }

    // delta's error is one for the whole row: what sums over keys sums p first, and squares then.
    std::vector<double> dq(dim), p_times_k(dim);
    double p_sum = 0;
    const bool keys_share_bias = problem_.bias.extent[3] == 1;
    for (Index j = 0; j < head.sequence.seqlen_k; ++j) {
      if (p.p[j] == 0) continue;
      const double keep = keep_factor(head, i, j), v_norm = norm(head.v.row(j), dim_v), slope = p.slope[j];
      const double ds = p.p[j] * (r.dp[j] * keep - r.delta);
      const double dp = squared(single * dout_norm * v_norm) +
                        squared(dout_operand * dout_norm * v_norm) / static_cast<double>(dim_v);
      const double own = squared(p.p[j] * keep) * dp + score[j] * squared(ds),
                   shared = squared(p.p[j]) * delta;
      if (problem_.bias.given()) dbias[dbias_index(head, i, j)] += own + (keys_share_bias ? 0.0 : shared);
      p_sum += p.p[j];
      const double term = squared(scale_ * slope) * (own + squared(operand * ds));
      for (Index c = 0; c < dim; ++c) {
        dq[c] += term * squared(head.k.row(j)[c]);
        p_times_k[c] += scale_ * slope * p.p[j] * head.k.row(j)[c];
        dk.row(j)[c] += (term + squared(scale_ * slope) * shared) * squared(head.q.row(i)[c]);
      }
    }
    if (problem_.bias.given() && keys_share_bias) dbias[dbias_index(head, i, 0)] += delta * squared(p_sum);
    for (Index c = 0; c < dim; ++c) dq[c] += delta * squared(p_times_k[c]);
    raise(worst.dq, dq);
  }

  Index bias_size() const {
    const Index* extent = problem_.bias.extent;
    return problem_.bias.given() ? extent[0] * extent[1] * extent[2] * extent[3] : 0;
  }

  Real read_dlse(const Head& head, Index i) const {
    const Index offset = problem_.dlse.offset(head.b, head.sequence.q_begin + i, head.h);
    return static_cast<Real>(load(problem_.dlse.data, problem_.dlse.dtype, offset));
  }

  Index dbias_index(const Head& head, Index i, Index j) const {
    const Index* extent = problem_.bias.extent;
    const Index at[4] = {head.b, head.h, i, j};
    Index index = 0;
    for (int d = 0; d < 4; ++d) index = index * extent[d] + (extent[d] == 1 ? 0 : at[d]);
    return index;
  }

  void store(const Matrix<Real>& gradient, Real factor, DType dtype, Index b, Index begin, Index h,
             Index rows, Index heads, std::vector<double>& out) const {
    for (Index i = 0; i < gradient.rows; ++i) {
      const Index at = dense_row(problem_, rows, heads, b, begin + i, h) * gradient.cols;
      for (Index c = 0; c < gradient.cols; ++c) {
        out[at + c] = Precision::round(dtype, factor * gradient.row(i)[c]);
      }
    }
  }

  const Problem& problem_;
  Real scale_, softcap_, keep_scale_;
};

}  // namespace

// Uniform within half a unit in the last place, over mantissas from 1 to 2: the unit roundoff by the root
// of 6.
double rounding(DType dtype) {
  const double unit = dtype == DType::float16 ? 0x1p-11 : dtype == DType::bfloat16 ? 0x1p-8 : 0x1p-24;
  return unit / std::sqrt(6.0);
}

Outputs forward(const Problem& problem) { return Loops<Exact>(problem).forward(); }
Gradients backward(const Problem& problem) { return Loops<Exact>(problem).backward(); }
Outputs plain_forward(const Problem& problem) { return Loops<Plain>(problem).forward(); }
Gradients plain_backward(const Problem& problem) { return Loops<Plain>(problem).backward(); }
Deviations deviations(const Problem& problem) { return Loops<Exact>(problem).deviations(); }

}  // namespace tessera::reference
