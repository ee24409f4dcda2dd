#include "reference/decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "reference/numbers.h"

namespace tessera::reference {
namespace {

using Index = std::int64_t;

float load(const View& view, Index index) { return reference::load(view.data, view.dtype, index); }

std::vector<double> read_row(const View& view, Index b, Index s, Index h, Index width) {
  std::vector<double> row(width);
  for (Index c = 0; c < width; ++c) row[c] = load(view, b * view.batch + s * view.seq + h * view.head + c);
  return row;
}

// Pair i of the first rotary_dim elements turns by the angle of (position, i).
void rotate(const Cache& cache, Index position, std::vector<double>& row) {
  for (Index i = 0; i < cache.rotary_dim / 2; ++i) {
    const Index first = cache.interleaved ? 2 * i : i;
    const Index second = cache.interleaved ? 2 * i + 1 : i + cache.rotary_dim / 2;
    const double cos = load(cache.cos, position * cache.cos.seq + i);
    const double sin = load(cache.sin, position * cache.sin.seq + i);
    const double x = row[first], y = row[second];
    row[first] = x * cos - y * sin;
    row[second] = x * sin + y * cos;
  }
}

// A compact float tensor (batch, rows, heads, width), or packed: the batches one behind the other.
struct Dense {
  Index rows, heads, width;
  std::vector<float> data;

  Dense(Index batch, Index row_count, Index head_count, Index columns)
      : rows(row_count), heads(head_count), width(columns), data(batch * row_count * head_count * columns) {}
  float* at(Index b, Index s, Index h) { return data.data() + ((b * rows + s) * heads + h) * width; }
  [[nodiscard]] View view(bool packed) {
    View view;
    view.data = data.data();
    view.batch = packed ? 0 : rows * heads * width;
    view.seq = heads * width;
    view.head = width;
    view.present = true;
    return view;
  }
};

class Decoder {
 public:
  Decoder(const Problem& problem, Appended appended)
      : problem_(problem),
        appended_(appended),
        most_keys_(longest()),
        k_(problem.batch, most_keys_, problem.num_heads_k, problem.head_dim),
        v_(problem.batch, most_keys_, problem.num_heads_k, problem.head_dim_v),
        q_(instances(), problem.rows_q, problem.num_heads_q, problem.head_dim),
        rounded_q_(q_) {}

  Decoded run() {
    Decoded result;
    const Cache& cache = problem_.cache;
    if (cache.k_new.given()) {
      const Index rows = instances() * cache.rows_new * problem_.num_heads_k;
      result.k_new.assign(rows * problem_.head_dim, 0.0);
      result.v_new.assign(rows * problem_.head_dim_v, 0.0);
    }
    for (Index b = 0; b < problem_.batch; ++b) {
      for (Index i = 0; i < new_keys(b); ++i) append(b, i, result);
    }
    for (Index b = 0; b < problem_.batch; ++b) {
      const Index begin = cache.leftpad == nullptr ? 0 : cache.leftpad[b];
      const Index end = cache.seqlens[b] + new_keys(b);
      cu_k_.push_back(static_cast<std::int32_t>(b * most_keys_));
      lengths_.push_back(static_cast<std::int32_t>(end - begin));
      for (Index s = begin; s < end; ++s) gather(b, s, s - begin, result);
      queries(b);
    }
    cu_k_.push_back(static_cast<std::int32_t>(problem_.batch * most_keys_));

    Problem forward = dense_problem(q_);
    result.outputs = reference::forward(forward);
    result.plain_outputs = plain_forward(dense_problem(rounded_q_));
    Dense dout(instances(), problem_.rows_q, problem_.num_heads_q, problem_.head_dim_v);
    forward.direction = Direction::backward;
    forward.dout = dout.view(problem_.packed);
    result.deviations = reference::deviations(forward);
    return result;
  }

 private:
  [[nodiscard]] Index instances() const { return problem_.packed ? 1 : problem_.batch; }
  [[nodiscard]] Index new_begin(Index b) const { return problem_.packed ? problem_.cu_seqlens_k[b] : 0; }
  [[nodiscard]] Index new_keys(Index b) const {
    if (!problem_.cache.k_new.given()) return 0;
    return problem_.packed ? problem_.cu_seqlens_k[b + 1] - problem_.cu_seqlens_k[b]
                           : problem_.cache.rows_new;
  }
  [[nodiscard]] Index longest() const {
    Index most = 0;
    for (Index b = 0; b < problem_.batch; ++b) most = std::max(most, problem_.cache.seqlens[b] + new_keys(b));
    return most;
  }

  // Where slot s of sequence b lies: a row of a block of the cache.
  using Place = std::pair<Index, Index>;
  [[nodiscard]] Place place_of(Index b, Index s) const {
    const Cache& cache = problem_.cache;
    if (cache.page_table != nullptr)
      return {cache.page_table[b * cache.page_table_row + s / cache.page_size], s % cache.page_size};
    return {cache.batch_idx != nullptr ? cache.batch_idx[b] : b, s};
  }

  // Slot s of sequence b becomes its key j: what the cache holds there, or what the call appends, for this
  // sequence or another.
  void gather(Index b, Index s, Index j, const Decoded& result) {
    const Cache& cache = problem_.cache;
    const Place place = place_of(b, s);
    const auto added = new_rows_.find(place);
    const bool from_call = appended_ == Appended::not_yet && added != new_rows_.end();
    const auto row_of = [&](const View& view, const std::vector<double>& numbers, Index h, Index width) {
      if (!from_call) return read_row(view, place.first, place.second, h, width);
      const auto first = numbers.begin() + (added->second * problem_.num_heads_k + h) * width;
      return std::vector<double>(first, first + width);
    };
    for (Index h = 0; h < problem_.num_heads_k; ++h) {
      put(row_of(problem_.k, result.k_new, h, problem_.head_dim), k_.at(b, j, h), cache.k_scale.of(h));
      put(row_of(problem_.v, result.v_new, h, problem_.head_dim_v), v_.at(b, j, h), cache.v_scale.of(h));
    }
  }

  // The numbers that are stored for the row: divided by the scale in float32, rounded to the cache's dtype.
  [[nodiscard]] std::vector<double> stored(std::vector<double> row, float scale) const {
    for (double& x : row) x = round_to(problem_.k.dtype, static_cast<float>(x) / scale);
    return row;
  }

  void append(Index b, Index i, Decoded& result) {
    const Cache& cache = problem_.cache;
    const Index row = (problem_.packed ? 0 : b * cache.rows_new) + new_begin(b) + i;
    new_rows_[place_of(b, cache.seqlens[b] + i)] = row;
    for (Index h = 0; h < problem_.num_heads_k; ++h) {
      const float k_scale = cache.k_scale.of(h), v_scale = cache.v_scale.of(h);
      std::vector<double> k = read_row(cache.k_new, b, new_begin(b) + i, h, problem_.head_dim);
      rotate(cache, cache.seqlens[b] + i, k);
      k = stored(k, k_scale);
      const std::vector<double> v =
          stored(read_row(cache.v_new, b, new_begin(b) + i, h, problem_.head_dim_v), v_scale);
      const Index at = row * problem_.num_heads_k + h;
      std::copy(k.begin(), k.end(), result.k_new.begin() + at * problem_.head_dim);
      std::copy(v.begin(), v.end(), result.v_new.begin() + at * problem_.head_dim_v);
    }
  }

  // Under a causal mask or a window query i stands behind the cache's keys as the new keys do; else all of
  // them stand where the first does.
  void queries(Index b) {
    const Index begin = problem_.packed ? problem_.cu_seqlens_q[b] : 0;
    const Index count = problem_.packed ? problem_.cu_seqlens_q[b + 1] - begin : problem_.rows_q;
    const bool ordered = problem_.window_left < Mask::unbounded || problem_.window_right < Mask::unbounded;
    for (Index i = 0; i < count; ++i) {
      for (Index h = 0; h < problem_.num_heads_q; ++h) {
        std::vector<double> q = read_row(problem_.q, b, begin + i, h, problem_.head_dim);
        rotate(problem_.cache, problem_.cache.seqlens[b] + (ordered ? i : 0), q);
        const Index instance = problem_.packed ? 0 : b;
        put(q, q_.at(instance, begin + i, h));
        for (double& x : q) x = round_to(problem_.q.dtype, static_cast<float>(x));
        put(q, rounded_q_.at(instance, begin + i, h));
      }
    }
  }

  static void put(const std::vector<double>& row, float* to, float scale = 1.0f) {
    std::transform(row.begin(), row.end(), to, [=](double x) { return static_cast<float>(x * scale); });
  }

  [[nodiscard]] Problem dense_problem(Dense& q) {
    Problem forward = problem_;
    forward.direction = Direction::forward;
    forward.cache = {};
    forward.q = q.view(problem_.packed);
    forward.k = k_.view(problem_.packed);
    forward.v = v_.view(problem_.packed);
    forward.rows_k = problem_.packed ? problem_.batch * most_keys_ : most_keys_;
    forward.max_seqlen_k = most_keys_;
    forward.cu_seqlens_k = problem_.packed ? cu_k_.data() : nullptr;
    forward.seqused_k = lengths_.data();
    return forward;
  }

  const Problem& problem_;
  Appended appended_;
  Index most_keys_;
  Dense k_, v_, q_, rounded_q_;
  std::map<Place, Index> new_rows_;  // of k_new, by where it is appended
  std::vector<std::int32_t> cu_k_, lengths_;
};

}  // namespace

Decoded decode(const Problem& problem, Appended appended) { return Decoder(problem, appended).run(); }

Outputs merge_states(const Problem& problem) {
  constexpr double none = -std::numeric_limits<double>::infinity();
  const Index instances = problem.packed ? 1 : problem.batch;
  const auto& [o_a, lse_a, o_b, lse_b] = problem.states;
  Outputs outputs;
  outputs.o.assign(instances * problem.rows_q * problem.num_heads_q * problem.head_dim_v, 0.0);
  outputs.lse.assign(instances * problem.rows_q * problem.num_heads_q, none);
  for (Index b = 0; b < instances; ++b) {
    for (Index s = 0; s < problem.rows_q; ++s) {
      for (Index h = 0; h < problem.num_heads_q; ++h) {
        const double x = load(lse_a, lse_a.offset(b, s, h)), y = load(lse_b, lse_b.offset(b, s, h));
        if (x == none && y == none) continue;
        const double most = std::max(x, y), lse = most + std::log(std::exp(x - most) + std::exp(y - most));
        outputs.lse[(b * problem.num_heads_q + h) * problem.rows_q + s] = lse;
        double* o =
            outputs.o.data() + ((b * problem.rows_q + s) * problem.num_heads_q + h) * problem.head_dim_v;
        const auto add = [&](const View& view, double weight) {
          if (weight == 0) return;
          const std::vector<double> row = read_row(view, b, s, h, problem.head_dim_v);
          for (Index c = 0; c < problem.head_dim_v; ++c) o[c] += weight * row[c];
        };
        add(o_a, std::exp(x - lse));
        add(o_b, std::exp(y - lse));
      }
    }
  }
  return outputs;
}

}  // namespace tessera::reference
