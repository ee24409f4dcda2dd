// Validation of decode and merge_states. Of a GPU's lengths, tables and indices only shape and dtype are
// checked.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/validator.h"

namespace tessera {
namespace {

std::string element(const char* name, std::int64_t i) {
  return std::string(name).append("[").append(std::to_string(i)).append("]");
}

class DecodeValidator : public Validator {
 public:
  DecodeValidator(const Decode& call, Pointers pointers)
      : Validator(Direction::decode, call.options, arguments(call), pointers), call_(call) {}

  bool all() {
    return presence() && companions() && foreign_options() && devices() && each_tensor() && scalars() &&
           sizes_of_q(call_.q) && cache() && appended() && rotary() && queries() &&
           shape("o", call_.o, tokens(problem.rows_q, problem.num_heads_q, problem.head_dim_v)) &&
           row_shape("lse", call_.lse) && alibi() && sinks() &&
           views(call_.q, call_.k_cache, call_.v_cache, call_.o, call_.lse) && host_lengths() &&
           aliases(call_.workspace);
  }

 private:
  bool companions();
  bool foreign_options();
  bool cache();
  bool scale(const char* name, const Tensor& tensor, ScaleView& out);
  bool appended();
  bool rotary();
  bool queries();
  bool views(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse);
  bool each_sequence(const char* name, const Tensor& tensor, const std::int32_t*& out);
  bool host_lengths();
  bool length(std::int64_t b);
  bool pages(std::int64_t b, std::int64_t slots);
  bool own_slots();

  [[nodiscard]] bool paged() const { return call_.page_table.given(); }

  const Decode& call_;
};

// What comes only together with something else, or without it.
bool DecodeValidator::companions() {
  const auto only_contiguous = [&](const char* name, const Tensor& tensor) {
    return !tensor.given() || !paged() || fail(name, "given", "none with page_table");
  };
  if (!(together("k_new", call_.k_new, "v_new", call_.v_new) &&
        together("v_new", call_.v_new, "k_new", call_.k_new) &&
        together("rotary_cos", call_.rotary_cos, "rotary_sin", call_.rotary_sin) &&
        together("rotary_sin", call_.rotary_sin, "rotary_cos", call_.rotary_cos) &&
        together("k_new", call_.k_new, "rotary_cos", call_.rotary_cos) &&
        together("k_new", call_.k_new, "cu_seqlens_k", options_.cu_seqlens_k) &&
        only_contiguous("cache_batch_idx", call_.cache_batch_idx) &&
        only_contiguous("leftpad_k", call_.leftpad_k))) {
    return false;
  }
  if (is_packed(options_) && call_.k_new.given() && !options_.cu_seqlens_k.given())
    return fail("cu_seqlens_k", "not given", "with cu_seqlens_q and k_new");
  return true;
}

bool DecodeValidator::foreign_options() {
  const auto none = [&](const char* name, const Tensor& tensor) {
    return !tensor.given() || fail(name, "given", "none in decode");
  };
  if (!(none("bias", options_.bias) && none("seqused_q", options_.seqused_q) &&
        none("seqused_k", options_.seqused_k))) {
    return false;
  }
  if (options_.dropout_p != 0) return fail("dropout_p", number_text(options_.dropout_p), "0 in decode");
  if (options_.alignment != Alignment::bottom_right)
    return fail("alignment", "top_left", "bottom_right in decode");
  constexpr std::int64_t most = 1 << 16;
  if (call_.num_splits < 0 || call_.num_splits > most) {
    return fail("num_splits", std::to_string(call_.num_splits), "0 (automatic) to " + std::to_string(most));
  }
  problem.cache.num_splits = call_.num_splits;
  return true;
}

bool DecodeValidator::each_sequence(const char* name, const Tensor& tensor, const std::int32_t*& out) {
  if (!tensor.given()) return true;
  out = static_cast<const std::int32_t*>(tensor.data);
  return shape(name, tensor, {problem.batch});
}

bool DecodeValidator::cache() {
  const Tensor &k = call_.k_cache, &v = call_.v_cache, &table = call_.page_table;
  const char *blocks = paged() ? "num_pages" : "batch_cache", *slots = paged() ? "page_size" : "seqlen_cache";
  if (!shape("k_cache", k, {blocks, slots, "num_heads_k", problem.head_dim})) return false;
  if (!within("k_cache", k, 1, slots, paged() ? 1 : 0, max_rows)) return false;
  if (!heads_of_k("k_cache", k, 2) || !few_rows("k_cache", k, 1)) return false;
  if (!shape("v_cache", v, {k.shape[0], k.shape[1], problem.num_heads_k, "head_dim_v"})) return false;
  if (!within("v_cache", v, 3, "head_dim_v", 1, max_head_dim)) return false;
  if (dtype_of(v) != dtype_of(k))
    return fail("v_cache.dtype", dtype_text(v.dtype), "k_cache's " + dtype_text(k.dtype));
  problem.head_dim_v = v.shape[3];
  problem.rows_k = k.shape[1];
  Cache& cache = problem.cache;
  if (!(scale("k_scale", call_.k_scale, cache.k_scale) && scale("v_scale", call_.v_scale, cache.v_scale)))
    return false;
  cache.blocks = k.shape[0];
  if (paged()) {
    if (!shape("page_table", table, {problem.batch, "max_pages"})) return false;
    cache.page_table = static_cast<const std::int32_t*>(table.data);
    cache.page_table_row = effective_strides(table)[0];
    cache.page_size = k.shape[1];
    // Lengths are int32: slots beyond are of no use.
    if (__builtin_mul_overflow(cache.page_size, table.shape[1], &problem.rows_k)) problem.rows_k = max_rows;
    problem.rows_k = std::min(problem.rows_k, max_rows);
  } else if (!call_.cache_batch_idx.given() && k.shape[0] < problem.batch) {
    return fail("k_cache", shape_text(k),
                "batch_cache of at least q's " + std::to_string(problem.batch) + ", or cache_batch_idx");
  }
  return each_sequence("cache_seqlens", call_.cache_seqlens, cache.seqlens) &&
         each_sequence("cache_batch_idx", call_.cache_batch_idx, cache.batch_idx) &&
         each_sequence("leftpad_k", call_.leftpad_k, cache.leftpad);
}

// A kernel computes with it, and divides by it.
bool DecodeValidator::scale(const char* name, const Tensor& tensor, ScaleView& out) {
  if (!tensor.given()) return true;
  if (size_of(checked_dtype(call_.k_cache)) != 1)
    return fail(name, "given", "only with a cache of float8_e4m3fn or int8");
  if (!shape(name, tensor, {problem.num_heads_k})) return false;
  out = {static_cast<const float*>(tensor.data), effective_strides(tensor)[0]};
  for (std::int64_t h = 0; problem.on_host() && out.data != nullptr && h < problem.num_heads_k; ++h) {
    if (std::isnormal(out.of(h)) && out.of(h) > 0) continue;
    return fail(element(name, h), number_text(out.of(h)), "a positive normal float32 number");
  }
  return true;
}

bool DecodeValidator::appended() {
  if (!call_.k_new.given()) return true;
  const int rows = problem.packed ? 0 : 1;
  const char* rows_name = problem.packed ? "total_new" : "seqlen_new";
  if (!shape("k_new", call_.k_new, tokens(rows_name, problem.num_heads_k, problem.head_dim))) return false;
  if (!within("k_new", call_.k_new, rows, rows_name, 0, max_rows)) return false;
  Cache& cache = problem.cache;
  cache.rows_new = call_.k_new.shape[rows];
  if (!shape("v_new", call_.v_new, tokens(cache.rows_new, problem.num_heads_k, problem.head_dim_v)))
    return false;
  cache.k_new = token_view(call_.k_new);
  cache.v_new = token_view(call_.v_new);
  return !problem.packed ||
         cumulative("cu_seqlens_k", options_.cu_seqlens_k, "total_new", cache.rows_new, problem.cu_seqlens_k);
}

bool DecodeValidator::rotary() {
  const Tensor &cos = call_.rotary_cos, &sin = call_.rotary_sin;
  if (!cos.given()) return true;
  const std::int64_t most = problem.head_dim / 2;
  if (!within("rotary_cos", cos, 1, "rotary_dim / 2", 1, most)) return false;
  if (!shape("rotary_sin", sin, {cos.shape[0], cos.shape[1]})) return false;
  const auto view = [](const Tensor& tensor) {
    View rows;
    rows.data = tensor.data;
    rows.dtype = checked_dtype(tensor);
    rows.seq = effective_strides(tensor)[0];
    rows.present = true;
    return rows;
  };
  problem.cache.cos = view(cos);
  problem.cache.sin = view(sin);
  problem.cache.positions = cos.shape[0];
  problem.cache.rotary_dim = 2 * cos.shape[1];
  problem.cache.interleaved = call_.rotary_interleaved;
  return true;
}

// The lengths of q, and the bound of those of k.
bool DecodeValidator::queries() {
  if (problem.packed &&
      !cumulative("cu_seqlens_q", options_.cu_seqlens_q, "total_q", problem.rows_q, problem.cu_seqlens_q)) {
    return false;
  }
  if (!longest("max_seqlen_q", "cu_seqlens_q", options_.max_seqlen_q, problem.cu_seqlens_q, problem.rows_q,
               problem.max_seqlen_q)) {
    return false;
  }
  problem.max_seqlen_k = problem.rows_k;
  if (!options_.max_seqlen_k) return true;
  if (*options_.max_seqlen_k < 0)
    return fail("max_seqlen_k", std::to_string(*options_.max_seqlen_k), "at least 0");
  problem.max_seqlen_k = std::min(problem.max_seqlen_k, *options_.max_seqlen_k);
  return true;
}

bool DecodeValidator::views(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                            const Tensor& lse) {
  problem.q = token_view(q);
  problem.o = token_view(o);
  problem.lse = row_view(lse);
  const auto cache_view = [](const Tensor& tensor) {
    const Extents stride = effective_strides(tensor);
    return View{tensor.data, checked_dtype(tensor), stride[0], stride[1], stride[2], true};
  };
  problem.k = cache_view(k);
  problem.v = cache_view(v);
  return true;
}

// --- what the host can read ---

bool DecodeValidator::host_lengths() {
  if (!problem.on_host()) return true;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    if (!length(b)) return false;
  }
  return own_slots();
}

bool DecodeValidator::length(std::int64_t b) {
  const Cache& cache = problem.cache;
  const Sequence sequence = problem.sequence(b);
  const std::int64_t before = cache.seqlens[b], after = before + sequence.seqlen_new;
  const auto fault = [&](const char* name, std::int64_t was, const std::string& expected) {
    return fail(element(name, b), std::to_string(was), expected);
  };
  const auto with_new = [&](std::string text) {
    if (sequence.seqlen_new == 0) return text;
    return text.append(" with the ").append(std::to_string(sequence.seqlen_new)).append(" of k_new");
  };
  if (before < 0 || after > problem.rows_k) {
    const std::int64_t most = problem.rows_k - sequence.seqlen_new;
    return fault("cache_seqlens", before,
                 most < 0 ? with_new("a cache of more slots than " + std::to_string(problem.rows_k))
                          : with_new("0 to " + std::to_string(most)));
  }
  if (cache.leftpad != nullptr && (cache.leftpad[b] < 0 || cache.leftpad[b] > before)) {
    return fault("leftpad_k", cache.leftpad[b],
                 "0 to " + element("cache_seqlens", b) + ", " + std::to_string(before));
  }
  if (sequence.seqlen_k > problem.max_seqlen_k) {
    return fail(
        "max_seqlen_k", std::to_string(problem.max_seqlen_k),
        "at least " + std::to_string(sequence.seqlen_k) + ", the keys of sequence " + std::to_string(b));
  }
  const std::int64_t blocks = call_.k_cache.shape[0];
  if (cache.batch_idx != nullptr && (cache.batch_idx[b] < 0 || cache.batch_idx[b] >= blocks)) {
    return fault("cache_batch_idx", cache.batch_idx[b],
                 "an index of k_cache, 0 to " + std::to_string(blocks - 1));
  }
  if (cache.rotates()) {
    const std::int64_t last_query =
        sequence.seqlen_q == 0 ? 0 : problem.query_position(b, sequence.seqlen_q - 1) + 1;
    const std::int64_t positions = std::max(after, last_query);
    if (positions > call_.rotary_cos.shape[0]) {
      return fail("rotary_cos", shape_text(call_.rotary_cos),
                  "at least " + std::to_string(positions) + " positions, for sequence " + std::to_string(b));
    }
  }
  return !paged() || pages(b, after);
}

// Entries behind the last one that has a key in use are not read.
bool DecodeValidator::pages(std::int64_t b, std::int64_t slots) {
  const Cache& cache = problem.cache;
  const std::int64_t used = (slots + cache.page_size - 1) / cache.page_size, count = call_.k_cache.shape[0];
  const std::int32_t* row = cache.page_table + b * cache.page_table_row;
  for (std::int64_t i = 0; i < used; ++i) {
    if (row[i] >= 0 && row[i] < count) continue;
    return fail(element("page_table", b).append("[").append(std::to_string(i)).append("]"),
                std::to_string(row[i]), "a page of k_cache, 0 to " + std::to_string(count - 1));
  }
  return true;
}

// No two sequences append to one slot. Only shared rows and pages can make them: without either there is
// nothing to look for.
bool DecodeValidator::own_slots() {
  const Cache& cache = problem.cache;
  if (!cache.k_new.given() || (!paged() && cache.batch_idx == nullptr)) return true;
  struct Written {
    std::int64_t place, b;
  };
  std::vector<Written> all;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::int64_t count = problem.sequence(b).seqlen_new;
    for (std::int64_t j = 0; j < count; ++j) {
      const Problem::Slot slot = problem.slot(b, cache.seqlens[b] + j);
      all.push_back({slot.b * call_.k_cache.shape[1] + slot.s, b});
    }
  }
  std::sort(all.begin(), all.end(), [](const Written& x, const Written& y) {
    return x.place != y.place ? x.place < y.place : x.b < y.b;
  });
  const auto same = std::adjacent_find(all.begin(), all.end(),
                                       [](const Written& x, const Written& y) { return x.place == y.place; });
  if (same == all.end()) return true;
  const std::int64_t first = same->b, second = (same + 1)->b;
  const std::string expected = "no slot to append to that sequence " + std::to_string(first) + " appends to";
  if (!paged())
    return fail(element("cache_batch_idx", second), std::to_string(cache.batch_idx[second]), expected);
  return fail(element("page_table", second), "page " + std::to_string(same->place / cache.page_size),
              expected);
}

class MergeValidator : public Validator {
 public:
  MergeValidator(const MergeStates& call, Pointers pointers)
      : Validator(Direction::merge, call.options, arguments(call), pointers), call_(call) {}

  bool all() { return presence() && devices() && each_tensor() && scalars() && sizes() && aliases({}); }

 private:
  bool sizes();

  const MergeStates& call_;
};

bool MergeValidator::sizes() {
  const Tensor& first = call_.o_a;
  problem.packed = first.rank == 3;
  const int rows = problem.packed ? 0 : 1, heads = rows + 1, dim = rows + 2;
  problem.batch = problem.packed ? 1 : first.shape[0];
  if (!within("o_a", first, rows, problem.packed ? "total_q" : "seqlen_q", 0, max_rows)) return false;
  if (!within("o_a", first, heads, "num_heads", 1, max_heads_of_batch)) return false;
  if (!within("o_a", first, dim, "head_dim_v", 1, max_head_dim)) return false;
  if (!few_rows("o_a", first, rows)) return false;
  problem.rows_q = problem.max_seqlen_q = first.shape[rows];
  problem.num_heads_q = problem.num_heads_k = first.shape[heads];
  problem.head_dim = problem.head_dim_v = first.shape[dim];
  if (!(row_shape("lse_a", call_.lse_a) && shape("o_b", call_.o_b, Expected(first)) &&
        row_shape("lse_b", call_.lse_b) && shape("o", call_.o, Expected(first)) &&
        row_shape("lse", call_.lse))) {
    return false;
  }
  problem.o = token_view(call_.o);
  problem.lse = row_view(call_.lse);
  problem.states = {token_view(call_.o_a), row_view(call_.lse_a), token_view(call_.o_b),
                    row_view(call_.lse_b)};
  return true;
}

}  // namespace

Result<Problem> validate(const Decode& call, Pointers pointers) {
  DecodeValidator check(call, pointers);
  if (check.all()) return check.problem;
  return check.status;
}

Result<Problem> validate(const MergeStates& call, Pointers pointers) {
  MergeValidator check(call, pointers);
  if (check.all()) return check.problem;
  return check.status;
}

}  // namespace tessera
