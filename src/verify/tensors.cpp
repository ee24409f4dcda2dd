#include "verify/tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <span>

#include "core/half.h"
#include "core/layout.h"

namespace tessera::verify {
namespace {

using Index = std::int64_t;

// ---- Random numbers: a hash of (seed, stream, position), so that data does not depend on the order of
// filling, nor on the standard library.

enum class Stream : std::uint64_t {
  q,
  k,
  v,
  dout,
  dlse,
  bias,
  hidden_rows,
  hidden,
  sinks,
  alibi,
  lengths_q,
  lengths_k,
  seqused_q,
  seqused_k
};

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}
std::uint64_t draw(std::uint64_t seed, Stream stream, Index position) {
  return mix(mix(mix(seed) ^ static_cast<std::uint64_t>(stream)) ^ static_cast<std::uint64_t>(position));
}
double uniform(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

double normal(std::uint64_t seed, Stream stream, Index position) {
  const std::uint64_t bits = draw(seed, stream, position);
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(bits)));
  return radius * std::cos(2.0 * std::numbers::pi * uniform(mix(bits)));
}

// ---- Memory.

// NaN in every dtype of 16 and 32 bits: 0x7FE5 in each 16 bits. In float8_e4m3fn every other element is NaN,
// in int8 they are 127 and -27.
std::byte pattern_byte(std::size_t at) { return at % 2 == 0 ? std::byte{0xE5} : std::byte{0x7F}; }
constexpr std::size_t guard_bytes = 256;  // keeps the alignment of what follows

Tensor compact(std::span<const Index> shape) {
  Tensor view;
  view.rank = static_cast<int>(shape.size());
  Index stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    view.shape[d] = shape[d];
    view.stride[d] = stride;
    stride *= shape[d];
  }
  return view;
}

// Elements from the first to the last of the view; strides of size-1 dimensions mean nothing.
Index span_of(const Tensor& view) {
  Index last = 0;
  for (int d = 0; d < view.rank; ++d) {
    if (view.shape[d] == 0) return 0;
    if (view.shape[d] > 1) last += (view.shape[d] - 1) * view.stride[d];
  }
  return last + 1;
}

void scramble_unit_strides(Tensor& view) {
  for (int d = 0; d < view.rank; ++d) {
    if (view.shape[d] == 1) view.stride[d] = 987654321987 + d;
  }
}

// Makes the stride of dimension d, and with it those of the dimensions outside it, larger than compact.
void stretch(Tensor& view, int d, Index stride) {
  for (; d >= 0; --d) {
    view.stride[d] = stride;
    stride *= view.shape[d];
  }
}

// The shape of q, k, v, o or a gradient: ([batch,] rows, heads, width).
Buffer place_tokens(Buffer::Role role, DType dtype, Layout layout, std::span<const Index> shape) {
  Tensor view = compact(shape);
  const int seq = view.rank - 3, head = view.rank - 2;
  const Index rows = view.shape[seq], width = view.shape[head + 1], row_size = view.shape[head] * width;
  switch (layout) {
    case Layout::dense:
      return {role, dtype, view, 0};
    case Layout::bhsd:
      view.stride[seq] = width;
      view.stride[head] = rows * width;
      return {role, dtype, view, 0};
    case Layout::qkv:
      stretch(view, seq, 3 * row_size);
      return {role, dtype, view, row_size};
    case Layout::expanded:
      view.stride[seq == 1 ? 0 : head] = 0;
      return {role, dtype, view, 0};
    case Layout::garbage:
      scramble_unit_strides(view);
      return {role, dtype, view, 0};
    case Layout::misaligned:
      stretch(view, seq, row_size + 1);
      return {role, dtype, view, 1};
  }
  return {};
}

// ([batch,] heads, rows).
Buffer place_lse(Buffer::Role role, Layout layout, std::span<const Index> shape) {
  Tensor view = compact(shape);
  const int head = view.rank - 2, row = view.rank - 1;
  if (layout == Layout::bhsd) {
    view.stride[head] = 1;
    view.stride[row] = view.shape[head];
  }
  if (layout == Layout::qkv) stretch(view, row, 3);
  if (layout == Layout::misaligned) stretch(view, head, view.shape[row] + 1);
  if (layout == Layout::garbage) scramble_unit_strides(view);
  return {role, DType::float32, view, layout == Layout::misaligned ? 1 : 0};
}

// (batch, heads, seqlen_q, seqlen_k), each of them or 1.
Buffer place_bias(Buffer::Role role, DType dtype, Layout layout, std::span<const Index> shape) {
  Tensor view = compact(shape);
  if (layout == Layout::bhsd) {
    view.stride[2] = 1;
    view.stride[3] = view.shape[2];
  }
  if (layout == Layout::expanded) view.stride[1] = 0;
  if (layout == Layout::qkv) stretch(view, 2, 3 * view.shape[3]);
  if (layout == Layout::misaligned) stretch(view, 2, view.shape[3] + 1);
  if (layout == Layout::garbage) scramble_unit_strides(view);
  return {role, dtype, view, layout == Layout::misaligned ? 1 : 0};
}

// ---- Lengths and data.

using Lengths = std::vector<Index>;

Lengths draw_lengths(const Case& c, Stream stream, Index max) {
  Lengths lengths(c.batch);
  const auto full = c.batch == 0 ? 0 : static_cast<Index>(c.seed % static_cast<std::uint64_t>(c.batch));
  for (Index b = 0; b < c.batch; ++b) {
    const std::uint64_t bits = draw(c.seed, stream, b);
    const std::uint64_t kind = bits >> 60;
    const auto some = static_cast<Index>((bits & 0xFFFFFFFFu) % static_cast<std::uint64_t>(max + 1));
    lengths[b] = kind < 2 ? 0 : kind < 4 ? max : some;
  }
  if (c.batch > 0) lengths[full] = max;
  if (c.batch > 1) lengths[(full + 1) % c.batch] = 0;
  return lengths;
}

Lengths shorten(const Case& c, Stream stream, Lengths lengths) {
  for (Index b = 0; b < c.batch; ++b) {
    const std::uint64_t bits = draw(c.seed, stream, b);
    if (bits >> 62 == 0) continue;
    const std::uint64_t choices = static_cast<std::uint64_t>(lengths[b]) + 1;
    lengths[b] = static_cast<Index>((bits & 0xFFFFFFFFu) % choices);
  }
  return lengths;
}

// Where the sequences of q (or of k) lie and how much of each is real.
struct Side {
  Lengths allocated, used, begin;
  Index rows = 0;  // extent of the sequence dimension
  Index max = 0;
};

Side make_side(const Case& c, Index seqlen, Stream lengths, Stream used, bool shortened) {
  Side side;
  side.allocated = c.packed ? draw_lengths(c, lengths, seqlen) : Lengths(c.batch, seqlen);
  side.used = shortened ? shorten(c, used, side.allocated) : side.allocated;
  side.begin.assign(c.batch, 0);
  side.rows = c.packed ? c.tail : seqlen;
  side.max = c.packed ? 0 : seqlen;
  if (!c.packed) return side;
  Index total = 0;
  for (Index b = 0; b < c.batch; ++b) {
    side.begin[b] = total;
    total += side.allocated[b];
    side.max = std::max(side.max, side.allocated[b]);
  }
  side.rows += total;
  return side;
}

Buffer ints(const Lengths& values) {
  const Index shape[] = {static_cast<Index>(values.size())};
  Buffer buffer(Buffer::Role::input, DType::int32, compact(shape), 0);
  for (Index i = 0; i < shape[0]; ++i) buffer.set(i, static_cast<double>(values[i]));
  return buffer;
}

Buffer cumulative(const Lengths& lengths) {
  Lengths sums{0};
  for (const Index length : lengths) sums.push_back(sums.back() + length);
  return ints(sums);
}

void fill_with_nan(Buffer& buffer) {
  for (Index i = 0; i < buffer.size(); ++i) buffer.set(i, std::numeric_limits<double>::quiet_NaN());
}

// Rows of real sequences get random numbers, the others NaN. Padding first: where memory is shared
// (expanded), a row that is real somewhere is real.
void fill_rows(const Case& c, const Side& side, Index heads, Index width, Stream stream, double magnitude,
               double mean, Buffer& buffer) {
  fill_with_nan(buffer);
  for (Index b = 0; b < c.batch; ++b) {
    const Index first = (c.packed ? side.begin[b] : b * side.rows) * heads * width;
    const Index count = side.used[b] * heads * width;
    for (Index i = first; i < first + count; ++i) {
      buffer.set(i, mean + magnitude * normal(c.seed, stream, buffer.position(i)));
    }
  }
}

void fill_dlse(const Case& c, const Side& side, Buffer& dlse) {
  fill_with_nan(dlse);
  for (Index b = 0; b < c.batch; ++b) {
    for (Index h = 0; h < c.num_heads_q; ++h) {
      const Index first = ((c.packed ? 0 : b * c.num_heads_q) + h) * side.rows + side.begin[b];
      for (Index i = first; i < first + side.used[b]; ++i) dlse.set(i, normal(c.seed, Stream::dlse, i));
    }
  }
}

double lowest(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return -65504.0;
    case DType::bfloat16:
      return to_float(bfloat16{0xFF7F});
    default:
      return std::numeric_limits<float>::lowest();
  }
}

double bias_value(const Case& c, Index row_position, Index position, Index j) {
  const double value = normal(c.seed, Stream::bias, position);
  const bool hidden = draw(c.seed, Stream::hidden, position) % 8 == 0;
  switch (c.bias_fill) {
    case BiasFill::normal:
      return value;
    case BiasFill::deep:
      return value - 120.0;
    case BiasFill::hidden: {
      const bool row_hidden = draw(c.seed, Stream::hidden_rows, row_position) % 8 == 0;
      return hidden || row_hidden ? -std::numeric_limits<double>::infinity() : value;
    }
    // Never a whole row: its lse, lowest + log(seqlen_k), has no float32 that backward could start from.
    case BiasFill::lowest:
      return hidden && j > 0 ? lowest(c.bias_dtype) : value;
  }
  return value;
}

// NaN where no real (query, key) of any batch entry reads.
void fill_bias(const Case& c, const Side& q, const Side& k, Buffer& bias) {
  fill_with_nan(bias);
  const auto& extent = bias.tensor().shape;
  const auto index_of = [&](Index b, Index h, Index i, Index j) {
    const Index at[] = {b, h, i, j};
    Index index = 0;
    for (int d = 0; d < 4; ++d) index = index * extent[d] + (extent[d] == 1 ? 0 : at[d]);
    return index;
  };
  for (Index b = 0; b < c.batch; ++b) {
    for (Index h = 0; h < extent[1]; ++h) {
      for (Index i = 0; i < std::min(q.used[b], extent[2] == 1 ? 1 : q.used[b]); ++i) {
        for (Index j = 0; j < std::min(k.used[b], extent[3] == 1 ? 1 : k.used[b]); ++j) {
          const Index index = index_of(b, h, i, j);
          bias.set(index, bias_value(c, bias.position(index_of(b, h, i, 0)), bias.position(index), j));
        }
      }
    }
  }
}

std::array<Index, 4> bias_shape(const Case& c, const Side& q, const Side& k) {
  std::array<Index, 4> shape = {c.batch, c.num_heads_q, q.max, k.max};
  for (int d = 0; d < 4; ++d) shape[d] = c.bias[d] == '1' ? 1 : shape[d];
  return shape;
}

}  // namespace

Buffer::Buffer(Role role, DType dtype, const Tensor& view, Index lead) : view_(view), dtype_(dtype) {
  const auto width = static_cast<std::size_t>(size_of(dtype));
  begin_ = guard_bytes + static_cast<std::size_t>(lead) * width;
  bytes_.resize(begin_ + static_cast<std::size_t>(span_of(view)) * width +
                (role == Role::output ? guard_bytes : 0));
  view_.dtype = dlpack_type(dtype);
  view_.data = bytes_.data() + begin_;
  poison();
}

Index Buffer::size() const {
  Index count = view_.rank == 0 ? 0 : 1;
  for (int d = 0; d < view_.rank; ++d) count *= view_.shape[d];
  return count;
}

Index Buffer::position(Index index) const {
  Index at = 0;
  for (int d = view_.rank - 1; d >= 0; --d) {
    if (view_.shape[d] > 1) at += index % view_.shape[d] * view_.stride[d];
    index /= view_.shape[d];
  }
  return at;
}

std::byte* Buffer::element(Index index) {
  return bytes_.data() + begin_ + static_cast<std::size_t>(position(index) * size_of(dtype_));
}
const std::byte* Buffer::element(Index index) const {
  return bytes_.data() + begin_ + static_cast<std::size_t>(position(index) * size_of(dtype_));
}

double Buffer::get(Index index) const {
  const std::byte* at = element(index);
  const auto read = [&](auto value) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  switch (dtype_) {
    case DType::float16:
      return to_float(read(float16{}));
    case DType::bfloat16:
      return to_float(read(bfloat16{}));
    case DType::int32:
      return read(std::int32_t{});
    case DType::float8_e4m3fn:
      return to_float(read(float8_e4m3fn{}));
    case DType::int8:
      return read(std::int8_t{});
    default:
      return read(0.0f);
  }
}

void Buffer::set(Index index, double value) {
  std::byte* at = element(index);
  const auto write = [&](auto x) { std::memcpy(at, &x, sizeof(x)); };
  switch (dtype_) {
    case DType::float16:
      return write(from_float<float16>(static_cast<float>(value)));
    case DType::bfloat16:
      return write(from_float<bfloat16>(static_cast<float>(value)));
    case DType::int32:
      return write(static_cast<std::int32_t>(value));
    case DType::float8_e4m3fn:
      return write(from_float<float8_e4m3fn>(static_cast<float>(value)));
    case DType::int8:
      return write(from_float<std::int8_t>(static_cast<float>(value)));
    default:
      return write(static_cast<float>(value));
  }
}

bool Buffer::unwritten(Index index) const {
  const std::byte* at = element(index);
  for (std::size_t i = 0; i < static_cast<std::size_t>(size_of(dtype_)); ++i) {
    if (at[i] != pattern_byte(i)) return false;
  }
  return true;
}

void Buffer::poison() {
  for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = pattern_byte(i);
}

bool Buffer::guards_intact() const {
  std::vector<bool> owned(bytes_.size());
  for (Index i = 0; i < size(); ++i) {
    const auto at = static_cast<std::size_t>(element(i) - bytes_.data());
    for (std::size_t w = 0; w < static_cast<std::size_t>(size_of(dtype_)); ++w) owned[at + w] = true;
  }
  for (std::size_t i = 0; i < bytes_.size(); ++i) {
    if (!owned[i] && bytes_[i] != pattern_byte(i)) return false;
  }
  return true;
}

Scratch::Scratch(std::size_t bytes) : bytes_(bytes + 2 * guard_bytes, std::byte{0xFF}), size_(bytes) {}

Workspace Scratch::workspace() { return {bytes_.data() + guard_bytes, size_}; }

bool Scratch::guards_intact() const {
  const auto untouched = [](std::byte b) { return b == std::byte{0xFF}; };
  return std::all_of(bytes_.begin(), bytes_.begin() + guard_bytes, untouched) &&
         std::all_of(bytes_.end() - guard_bytes, bytes_.end(), untouched);
}

Tensors::Tensors(const Case& c) : settings(c) {
  using enum Buffer::Role;
  const Side side_q = make_side(c, c.seqlen_q, Stream::lengths_q, Stream::seqused_q, c.seqused_q);
  const Side side_k = make_side(c, c.seqlen_k, Stream::lengths_k, Stream::seqused_k, c.seqused_k);
  const auto rows = [&](Buffer::Role role, DType dtype, Layout layout, const Side& side, Index heads,
                        Index width) {
    const Index shape[] = {c.batch, side.rows, heads, width};
    return place_tokens(role, dtype, layout, std::span(shape).subspan(c.packed ? 1 : 0));
  };
  const auto lse_like = [&](Buffer::Role role) {
    const Index dense[] = {c.batch, c.num_heads_q, side_q.rows};
    return place_lse(role, c.lse_layout, std::span(dense).subspan(c.packed ? 1 : 0));
  };

  q = rows(input, c.dtype, c.q_layout, side_q, c.num_heads_q, c.head_dim);
  k = rows(input, c.dtype, c.k_layout, side_k, c.num_heads_k, c.head_dim);
  v = rows(input, c.dtype, c.v_layout, side_k, c.num_heads_k, c.head_dim_v);
  dout = rows(input, c.o_dtype, c.dout_layout, side_q, c.num_heads_q, c.head_dim_v);
  fill_rows(c, side_q, c.num_heads_q, c.head_dim, Stream::q, c.magnitude, 0.0, q);
  fill_rows(c, side_k, c.num_heads_k, c.head_dim, Stream::k, 1.0, c.mean, k);
  fill_rows(c, side_k, c.num_heads_k, c.head_dim_v, Stream::v, 1.0, c.mean, v);
  fill_rows(c, side_q, c.num_heads_q, c.head_dim_v, Stream::dout, 1.0, 0.0, dout);
  if (c.dlse) {
    dlse = lse_like(input);
    fill_dlse(c, side_q, dlse);
  }

  o = rows(output, c.o_dtype, c.o_layout, side_q, c.num_heads_q, c.head_dim_v);
  lse = lse_like(output);
  dq = rows(output, c.grad_dtype, c.dq_layout, side_q, c.num_heads_q, c.head_dim);
  dk = rows(output, c.grad_dtype, c.dk_layout, side_k, c.num_heads_k, c.head_dim);
  dv = rows(output, c.grad_dtype, c.dv_layout, side_k, c.num_heads_k, c.head_dim_v);

  const Index head_shape[] = {c.batch, c.num_heads_q};
  if (!c.bias.empty()) {
    const auto shape = bias_shape(c, side_q, side_k);
    bias = place_bias(input, c.bias_dtype, c.bias_layout, shape);
    fill_bias(c, side_q, side_k, bias);
    if (c.dbias) dbias = place_bias(output, c.bias_dtype, c.dbias_layout, shape);
  }
  if (c.sinks) {
    sinks = Buffer(input, c.sinks_dtype, compact(std::span(head_shape).subspan(1)), 0);
    for (Index h = 0; h < c.num_heads_q; ++h) sinks.set(h, normal(c.seed, Stream::sinks, h));
    if (c.dsinks) dsinks = Buffer(output, c.sinks_dtype, compact(std::span(head_shape).subspan(1)), 0);
  }
  if (c.alibi != 0) {
    alibi_slopes =
        Buffer(input, DType::float32, compact(std::span(head_shape).subspan(c.alibi == 2 ? 0 : 1)), 0);
    for (Index i = 0; i < alibi_slopes.size(); ++i) {
      alibi_slopes.set(i, 0.5 * uniform(draw(c.seed, Stream::alibi, i)));
    }
  }
  if (c.packed) {
    cu_seqlens_q = cumulative(side_q.allocated);
    cu_seqlens_k = cumulative(side_k.allocated);
  }
  if (c.seqused_q) seqused_q = ints(side_q.used);
  if (c.seqused_k) seqused_k = ints(side_k.used);
  for (const Named& named : inputs()) named.buffer->freeze();
}

namespace {

Options options_of(const Tensors& tensors) {
  const Case& c = tensors.settings;
  Options options;
  options.softmax_scale = c.softmax_scale;
  options.causal = c.causal;
  options.window_left = c.window_left;
  options.window_right = c.window_right;
  options.alignment = c.alignment;
  options.softcap = c.softcap;
  options.alibi_slopes = tensors.alibi_slopes.tensor();
  options.bias = tensors.bias.tensor();
  options.sinks = tensors.sinks.tensor();
  options.dropout_p = c.dropout_p;
  options.seed = c.seed;
  options.offset = c.offset;
  options.cu_seqlens_q = tensors.cu_seqlens_q.tensor();
  options.cu_seqlens_k = tensors.cu_seqlens_k.tensor();
  options.seqused_q = tensors.seqused_q.tensor();
  options.seqused_k = tensors.seqused_k.tensor();
  options.deterministic = c.deterministic;
  options.kernel = c.kernel;
  options.num_threads = c.threads;
  return options;
}

}  // namespace

Forward Tensors::forward_call() const {
  Forward call;
  call.q = q.tensor();
  call.k = k.tensor();
  call.v = v.tensor();
  call.o = o.tensor();
  if (settings.lse) call.lse = lse.tensor();
  call.options = options_of(*this);
  return call;
}

Backward Tensors::backward_call() const {
  Backward call;
  call.q = q.tensor();
  call.k = k.tensor();
  call.v = v.tensor();
  call.o = o.tensor();
  call.lse = lse.tensor();
  call.dout = dout.tensor();
  call.dlse = dlse.tensor();
  call.dq = dq.tensor();
  call.dk = dk.tensor();
  call.dv = dv.tensor();
  call.dbias = dbias.tensor();
  call.dsinks = dsinks.tensor();
  call.options = options_of(*this);
  return call;
}

std::vector<Tensors::Named> Tensors::outputs(Direction direction) {
  std::vector<Named> all;
  if (direction == Direction::forward) {
    all = {{"o", &o}};
    if (settings.lse) all.push_back({"lse", &lse});
  } else {
    all = {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dbias", &dbias}, {"dsinks", &dsinks}};
  }
  std::erase_if(all, [](const Named& named) { return !named.buffer->given(); });
  return all;
}

std::vector<Tensors::Named> Tensors::inputs() {
  std::vector<Named> all = {{"q", &q},
                            {"k", &k},
                            {"v", &v},
                            {"dout", &dout},
                            {"dlse", &dlse},
                            {"bias", &bias},
                            {"sinks", &sinks},
                            {"alibi_slopes", &alibi_slopes},
                            {"cu_seqlens_q", &cu_seqlens_q},
                            {"cu_seqlens_k", &cu_seqlens_k},
                            {"seqused_q", &seqused_q},
                            {"seqused_k", &seqused_k}};
  std::erase_if(all, [](const Named& named) { return !named.buffer->given(); });
  return all;
}

}  // namespace tessera::verify
