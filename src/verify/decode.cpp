#include "verify/decode.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <random>

#include "core/half.h"
#include "reference/decode.h"
#include "verify/mirror.h"

namespace tessera::verify {
namespace {

using Index = std::int64_t;

Tensor shape_of(std::initializer_list<Index> sizes) { return {nullptr, DType::float32, sizes}; }

Buffer floats(DType dtype, std::initializer_list<Index> sizes, std::mt19937_64& random, double magnitude) {
  Buffer buffer(Buffer::Role::input, dtype, shape_of(sizes), 0);
  std::normal_distribution<double> normal(0.0, magnitude);
  for (Index i = 0; i < buffer.size(); ++i) buffer.set(i, normal(random));
  buffer.freeze();
  return buffer;
}

Buffer ints(const std::vector<std::int32_t>& values) {
  if (values.empty()) return {};
  Buffer buffer(Buffer::Role::input, DType::int32, shape_of({static_cast<Index>(values.size())}), 0);
  for (Index i = 0; i < buffer.size(); ++i) buffer.set(i, values[i]);
  buffer.freeze();
  return buffer;
}

std::vector<std::int32_t> sums_of(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> sums = {0};
  for (const std::int32_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

Index total(const std::vector<std::int32_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), Index{0});
}

Index new_keys(const DecodeCase& c, Index b) {
  return c.lengths_q.empty() ? c.seqlen_new : c.lengths_new.empty() ? 0 : c.lengths_new[b];
}

// (blocks, slots, heads, width).
Buffer place_cache(const DecodeCase& c, Index blocks, Index slots, Index width) {
  Tensor view = shape_of({blocks, slots, c.num_heads_k, width});
  if (c.head_major) {
    view.stride[1] = width;
    view.stride[2] = slots * width;
  }
  return {Buffer::Role::output, c.cache_dtype.value_or(c.dtype), view, 0};
}

// Of few bits, so that a number times its scale is a float.
double scale_of(const DecodeCase& c, Index head, double more) {
  if (c.cache_scale == 0) return 1;
  return to_float(from_float<bfloat16>(
      static_cast<float>(c.cache_scale * more * (1.0 + 0.3 * static_cast<double>(head % 7)))));
}
Buffer scales(const DecodeCase& c, double more) {
  if (c.cache_scale == 0) return {};
  Buffer buffer(Buffer::Role::input, DType::float32, shape_of({c.num_heads_k}), 0);
  for (Index h = 0; h < c.num_heads_k; ++h) buffer.set(h, scale_of(c, h, more));
  buffer.freeze();
  return buffer;
}
constexpr double k_more = 1, v_more = 1.625;  // v's scales differ from k's

// Everything that decode() must leave alone.
struct Inputs {
  explicit Inputs(DecodeTensors& t)
      : list{{"q", &t.q},
             {"k_scale", &t.k_scale},
             {"v_scale", &t.v_scale},
             {"cache_seqlens", &t.cache_seqlens},
             {"page_table", &t.page_table},
             {"cache_batch_idx", &t.cache_batch_idx},
             {"leftpad_k", &t.leftpad_k},
             {"k_new", &t.k_new},
             {"v_new", &t.v_new},
             {"rotary_cos", &t.rotary_cos},
             {"rotary_sin", &t.rotary_sin},
             {"alibi_slopes", &t.alibi_slopes},
             {"sinks", &t.sinks}} {}
  std::vector<Tensors::Named> list;
};

// How far apart two roundings of one rotated number may be, as they are stored.
double step_of(const DecodeCase& c, double exact) {
  const double most = std::max(1.0, c.magnitude) * std::max(1.0, std::abs(exact));
  switch (c.cache_dtype.value_or(c.dtype)) {
    case DType::bfloat16:
      return 0x1p-7 * most;
    case DType::float16:
      return 0x1p-10 * most;
    case DType::float8_e4m3fn:
      return std::max(0x1p-9, 0x1p-3 * std::abs(exact));
    case DType::int8:
      return 1;
    default:
      return 0x1p-21 * most;
  }
}

// The cache must be as it was but for the rows that were appended; those may be rounded another way if they
// were rotated.
void compare_cache(const char* name, const DecodeTensors& tensors, const Buffer& cache,
                   const AlignedBytes& before, const std::vector<double>& appended, Index width, bool rotated,
                   Comparison& comparison) {
  const DecodeCase& c = tensors.settings;
  const Index heads = c.num_heads_k, size = size_of(cache.dtype());
  const Index first = static_cast<const std::byte*>(cache.tensor().data) - cache.bytes().data();
  AlignedBytes expected = before;  // and of the appended rows what is there
  Index row = 0;
  for (Index b = 0; b < tensors.batch(); ++b) {
    for (Index j = 0; j < new_keys(c, b); ++j, ++row) {
      for (Index i = 0; i < heads * width; ++i) {
        const Index at = tensors.row_of(b, c.cache_seqlens[b] + j) * heads * width + i;
        const double actual = cache.get(at), exact = appended[row * heads * width + i];
        if (!(std::abs(actual - exact) <= (rotated ? step_of(c, exact) : 0.0))) {
          return comparison.fail(std::string(name) + " of sequence " + std::to_string(b) + ", new key " +
                                 std::to_string(j) + " is " + std::to_string(actual) + ", expected " +
                                 std::to_string(exact));
        }
        const Index byte = first + cache.position(at) * size;
        std::copy_n(cache.bytes().begin() + byte, size, expected.begin() + byte);
      }
    }
  }
  if (cache.bytes() != expected)
    comparison.fail(std::string(name) + ": memory beside the appended rows was changed");
}

}  // namespace

DecodeCase random_decode_case(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::initializer_list<std::int64_t> list) {
    return list.begin()[random() % list.size()];
  };
  const auto often = [&](unsigned of_ten) { return random() % 10 < of_ten; };
  DecodeCase c;
  c.seed = seed;
  c.num_heads_k = pick({1, 2, 3});
  c.num_heads_q = c.num_heads_k * pick({1, 2, 4, 5, 8, 17});
  c.head_dim = pick({1, 7, 40, 64, 80, 128, 192, 256});
  c.head_dim_v = often(7) ? c.head_dim : pick({1, 5, 64, 128, 256});
  c.dtype = static_cast<DType>(pick({0, 1, 2}));
  c.o_dtype = often(7) ? c.dtype : DType::float32;
  c.cache_seqlens.clear();
  const std::int64_t batch = pick({1, 2, 5});
  const std::int64_t most = pick({3, 70, 300, 1700});
  for (std::int64_t b = 0; b < batch; ++b)
    c.cache_seqlens.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(most + 1)));
  c.seqlen_q = pick({1, 1, 1, 2, 3, 16, 33});
  c.seqlen_new = often(5) ? 0 : often(7) ? c.seqlen_q : pick({1, 2, 40});
  if (often(2)) {
    for (std::int64_t b = 0; b < batch; ++b) {
      c.lengths_q.push_back(static_cast<std::int32_t>(pick({0, 1, 1, 7, 30})));
      if (c.seqlen_new > 0) c.lengths_new.push_back(often(8) ? c.lengths_q.back() : 1);
    }
  }
  c.page_size = pick({0, 0, 1, 2, 3, 16, 19, 64, 256});
  c.head_major = often(3);
  if (c.page_size == 0 && often(3)) {
    for (const std::int32_t length : c.cache_seqlens)
      c.leftpad.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(length + 1)));
  }
  if (c.page_size == 0 && often(3)) {
    for (std::int64_t b = 0; b < batch; ++b)
      c.batch_idx.push_back(static_cast<std::int32_t>(2 * (batch - 1 - b)));
  }
  const bool appends = c.lengths_q.empty() ? c.seqlen_new > 0 : !c.lengths_new.empty();
  if (appends && c.head_dim > 1 && often(5)) {
    c.rotary_dim = often(5) ? c.head_dim / 2 * 2 : 2 + static_cast<std::int64_t>(random() % 3) * 2;
    if (c.rotary_dim > c.head_dim) c.rotary_dim = 2;
    c.interleaved = often(5);
  }
  c.causal = often(5);
  if (often(3)) c.window_left = pick({0, 1, 63, 200});
  if (often(2)) c.window_right = pick({0, 5, 100});
  if (often(2)) c.softcap = 20;
  c.alibi = often(2);
  c.sinks = often(3);
  c.lse = !often(2);
  if (often(2)) c.magnitude = 3;
  c.num_splits = pick({0, 0, 0, 1, 2, 5, 100});
  c.threads = static_cast<int>(pick({1, 2, 3}));
  return c;
}

DecodeTensors::DecodeTensors(const DecodeCase& c) : settings(c) {
  std::mt19937_64 random(c.seed);
  const bool packed = !c.lengths_q.empty();
  Index longest = 0, last_position = 1;
  for (Index b = 0; b < batch(); ++b) {
    longest = std::max(longest, c.cache_seqlens[b] + new_keys(c, b));
    last_position = std::max<Index>(
        last_position,
        c.cache_seqlens[b] + std::max<Index>(new_keys(c, b), packed ? c.lengths_q[b] : c.seqlen_q));
  }
  Index blocks = 0, slots = longest + c.room;
  if (c.page_size > 0) {
    slots = c.page_size;
    const Index columns = (longest + c.page_size - 1) / c.page_size + c.room;
    std::vector<Index> used;
    for (Index b = 0; b < batch(); ++b)
      used.push_back((c.cache_seqlens[b] + new_keys(c, b) + c.room + c.page_size - 1) / c.page_size);
    blocks = std::accumulate(used.begin(), used.end(), Index{0}) + 3;
    std::vector<Index> pages(blocks);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    page_table = Buffer(Buffer::Role::input, DType::int32, shape_of({batch(), columns}), 0);
    Index next = 0;
    for (Index b = 0; b < batch(); ++b) {
      for (Index i = 0; i < columns; ++i)
        page_table.set(b * columns + i, i < used[b] ? static_cast<double>(pages[next++]) : -7.0);
    }
    page_table.freeze();
  } else {
    blocks = batch();
    for (const std::int32_t i : c.batch_idx) blocks = std::max<Index>(blocks, i + 1);
    blocks += 1;
  }
  cache_batch_idx = ints(c.batch_idx);
  leftpad_k = ints(c.leftpad);
  cache_seqlens = ints(c.cache_seqlens);

  k_scale = scales(c, k_more);
  v_scale = scales(c, v_more);
  k_cache = place_cache(c, blocks, slots, c.head_dim);
  v_cache = place_cache(c, blocks, slots, c.head_dim_v);
  std::normal_distribution<double> normal(0.0, 1.0);
  for (Index b = 0; b < batch(); ++b) {
    for (Index s = c.leftpad.empty() ? 0 : c.leftpad[b]; s < c.cache_seqlens[b]; ++s) {
      const Index row = row_of(b, s) * c.num_heads_k;
      for (Index i = 0; i < c.num_heads_k * c.head_dim; ++i)
        k_cache.set(row * c.head_dim + i, normal(random) * c.magnitude / scale_of(c, i / c.head_dim, k_more));
      for (Index i = 0; i < c.num_heads_k * c.head_dim_v; ++i)
        v_cache.set(row * c.head_dim_v + i, normal(random) / scale_of(c, i / c.head_dim_v, v_more));
    }
  }

  const auto tokens = [&](const std::vector<std::int32_t>& lengths, Index rows, Index heads, Index width,
                          double magnitude) {
    return packed ? floats(c.dtype, {total(lengths), heads, width}, random, magnitude)
                  : floats(c.dtype, {batch(), rows, heads, width}, random, magnitude);
  };
  q = tokens(c.lengths_q, c.seqlen_q, c.num_heads_q, c.head_dim, c.magnitude);
  if (c.seqlen_new > 0 || !c.lengths_new.empty()) {
    k_new = tokens(c.lengths_new, c.seqlen_new, c.num_heads_k, c.head_dim, c.magnitude);
    v_new = tokens(c.lengths_new, c.seqlen_new, c.num_heads_k, c.head_dim_v, 1.0);
  }
  if (c.rotary_dim > 0) {
    const Index half = c.rotary_dim / 2;
    // The last position in use ends the table, so that AddressSanitizer sees every read past it.
    for (Buffer* table : {&rotary_cos, &rotary_sin}) {
      *table = Buffer(Buffer::Role::input, c.seed % 2 == 0 ? c.dtype : DType::float32,
                      shape_of({last_position, half}), 0);
      for (Index i = 0; i < table->size(); ++i) {
        const Index position = i / half;
        const double angle = static_cast<double>(position) *
                             std::pow(10000.0, -static_cast<double>(i % half) / static_cast<double>(half));
        table->set(i, table == &rotary_cos ? std::cos(angle) : std::sin(angle));
      }
      table->freeze();
    }
  }
  if (packed) {
    cu_seqlens_q = ints(sums_of(c.lengths_q));
    if (!c.lengths_new.empty()) cu_seqlens_k = ints(sums_of(c.lengths_new));
  }
  if (c.alibi) alibi_slopes = floats(DType::float32, {batch(), c.num_heads_q}, random, 0.1);
  if (c.alibi) alibi_slopes.set(0, 0.0);  // a head without, among others with
  if (c.alibi) alibi_slopes.freeze();
  if (c.sinks) sinks = floats(DType::float32, {c.num_heads_q}, random, 1.0);

  const Index rows = packed ? total(c.lengths_q) : c.seqlen_q;
  o = Buffer(Buffer::Role::output, c.o_dtype,
             packed ? shape_of({rows, c.num_heads_q, c.head_dim_v})
                    : shape_of({batch(), rows, c.num_heads_q, c.head_dim_v}),
             0);
  if (c.lse) {
    lse = Buffer(Buffer::Role::output, DType::float32,
                 packed ? shape_of({c.num_heads_q, rows}) : shape_of({batch(), c.num_heads_q, rows}), 0);
  }
}

void DecodeTensors::set_lengths() {
  for (Index b = 0; b < batch(); ++b) cache_seqlens.set(b, settings.cache_seqlens[b]);
  cache_seqlens.freeze();
}

Index DecodeTensors::row_of(Index b, Index s) const {
  const Index slots = k_cache.tensor().shape[1];
  if (settings.page_size > 0) {
    const Index columns = page_table.tensor().shape[1];
    return static_cast<Index>(page_table.get(b * columns + s / slots)) * slots + s % slots;
  }
  return (settings.batch_idx.empty() ? b : settings.batch_idx[b]) * slots + s;
}

Decode DecodeTensors::call() const {
  const DecodeCase& c = settings;
  Decode call;
  call.q = q.tensor();
  call.k_cache = k_cache.tensor();
  call.v_cache = v_cache.tensor();
  call.k_scale = k_scale.tensor();
  call.v_scale = v_scale.tensor();
  call.cache_seqlens = cache_seqlens.tensor();
  call.page_table = page_table.tensor();
  call.cache_batch_idx = cache_batch_idx.tensor();
  call.leftpad_k = leftpad_k.tensor();
  call.k_new = k_new.tensor();
  call.v_new = v_new.tensor();
  call.rotary_cos = rotary_cos.tensor();
  call.rotary_sin = rotary_sin.tensor();
  call.rotary_interleaved = c.interleaved;
  call.o = o.tensor();
  call.lse = lse.tensor();
  call.num_splits = c.num_splits;
  call.options.causal = c.causal;
  call.options.window_left = c.window_left;
  call.options.window_right = c.window_right;
  call.options.softcap = c.softcap;
  call.options.alibi_slopes = alibi_slopes.tensor();
  call.options.sinks = sinks.tensor();
  call.options.cu_seqlens_q = cu_seqlens_q.tensor();
  call.options.cu_seqlens_k = cu_seqlens_k.tensor();
  call.options.kernel = c.kernel;
  call.options.num_threads = c.threads;
  return call;
}

Status run(const DecodeTensors& tensors) {
  Decode call = tensors.call();
  if (on_gpu(call.options.kernel)) return run_mirrored(call, decode);
  const Result<std::size_t> bytes = workspace_size(call);
  if (!bytes.ok()) return bytes.status();
  Scratch scratch(bytes.value());
  call.workspace = scratch.workspace();
  Status status = decode(call);
  if (status.ok() && !scratch.guards_intact())
    return {Code::internal, "memory around the workspace was overwritten"};
  return status;
}

std::string judge(DecodeTensors& tensors) {
  return judge(tensors, [&] { return run(tensors); });
}

std::string judge(DecodeTensors& tensors, const std::function<Status()>& run_it) {
  const DecodeCase& c = tensors.settings;
  const Result<Problem> problem = validate(tensors.call());
  if (!problem.ok()) return "the call is not valid: " + problem.status().message();
  reference::Decoded expected = reference::decode(problem.value());
  const AlignedBytes k_before = tensors.k_cache.bytes(), v_before = tensors.v_cache.bytes();
  tensors.o.poison();
  if (c.lse) tensors.lse.poison();
  if (const Status status = run_it(); !status.ok()) return "decode failed: " + status.message();
  if (!c.kernel.empty() && last_kernel() != c.kernel) return "decode was run by " + last_kernel();

  std::vector<Score> scores;
  std::vector<std::string> failures;
  Comparison comparison(scores, failures);
  compare_cache("k_cache", tensors, tensors.k_cache, k_before, expected.k_new, c.head_dim, c.rotary_dim > 0,
                comparison);
  compare_cache("v_cache", tensors, tensors.v_cache, v_before, expected.v_new, c.head_dim_v, false,
                comparison);
  // What is rotated and then rounded to 8 bits may, once in a million, be the other neighbour, a sixteenth
  // away.
  if (c.cache_dtype && c.rotary_dim > 0)
    expected = reference::decode(problem.value(), reference::Appended::there);
  comparison.tensor("o", tensors.o, expected.outputs.o, expected.plain_outputs.o, expected.deviations.o);
  // What is rotated is rounded once more: k_new for the cache, q for a kernel whose products are 16-bit ones.
  double lse_deviation = expected.deviations.lse;
  for (std::size_t i = 0; c.rotary_dim > 0 && i < expected.outputs.lse.size(); ++i) {
    const double error = std::abs(expected.plain_outputs.lse[i] - expected.outputs.lse[i]);
    if (std::isfinite(error)) lse_deviation = std::max(lse_deviation, error / 2);
  }
  if (c.lse) comparison.lse(tensors.lse, expected.outputs.lse, expected.plain_outputs.lse, lse_deviation);
  for (const auto& [name, buffer] : Inputs(tensors).list) {
    if (buffer->given() && !buffer->unchanged())
      comparison.fail(std::string(name) + ": an input was changed");
  }
  if (!tensors.o.guards_intact() || (c.lse && !tensors.lse.guards_intact()))
    comparison.fail("memory around o or lse was overwritten");
  std::string text;
  for (const std::string& failure : failures) text += failure + "\n";
  return text;
}

std::string judge(const DecodeCase& c) {
  DecodeTensors tensors(c);
  return judge(tensors);
}

}  // namespace tessera::verify
