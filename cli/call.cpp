#include "cli/call.h"

#include <algorithm>
#include <numeric>

namespace tessera::cli {
namespace {

// Sizes with every default filled in.
struct Extents {
  explicit Extents(const CallFlags& flags)
      : packed(!flags.options.lengths_q.empty()),
        batch(packed ? static_cast<std::int64_t>(flags.options.lengths_q.size()) : flags.shape.batch),
        seqlen_q(flags.shape.seqlen_q.value_or(flags.shape.seqlen)),
        seqlen_k(flags.shape.seqlen_k.value_or(flags.shape.seqlen)),
        heads_q(flags.shape.heads),
        heads_k(flags.shape.heads_k.value_or(flags.shape.heads)),
        head_dim(flags.shape.head_dim),
        head_dim_v(flags.shape.head_dim_v.value_or(flags.shape.head_dim)) {
    if (!packed) return;
    seqlen_q = *std::max_element(flags.options.lengths_q.begin(), flags.options.lengths_q.end());
    seqlen_k = *std::max_element(flags.options.lengths_k.begin(), flags.options.lengths_k.end());
  }
  bool packed;
  std::int64_t batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v;
};

std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

template <class Arguments>
Memory workspace_for(Arguments& call) {
  const std::size_t bytes = workspace_size(call).or_throw();
  Memory memory = allocate(bytes);
  call.workspace = {memory.get(), bytes};
  return memory;
}

// The same tensor description over memory of its own.
Tensor like(Store& store, const Tensor& tensor, DType dtype, bool random) {
  const auto& s = tensor.shape;
  const auto make = [&](std::initializer_list<std::int64_t> shape) {
    return random ? store.normal(dtype, shape) : store.zeros(dtype, shape);
  };
  switch (tensor.rank) {
    case 1:
      return make({s[0]});
    case 3:
      return make({s[0], s[1], s[2]});
    default:
      return make({s[0], s[1], s[2], s[3]});
  }
}

}  // namespace

Call::Call(const CallFlags& flags, Store::Kind kind) : store_(kind) {
  check(flags);
  make_tensors(flags);
  make_options(flags);
  make_backward();
}

void Call::make_tensors(const CallFlags& flags) {
  const Extents e(flags);
  const DType dtype = flags.shape.dtype;
  if (e.packed) {
    const std::int64_t total_q = cumulative(flags.options.lengths_q).back();
    const std::int64_t total_k = cumulative(flags.options.lengths_k).back();
    forward_.q = store_.normal(dtype, {total_q, e.heads_q, e.head_dim});
    forward_.k = store_.normal(dtype, {total_k, e.heads_k, e.head_dim});
    forward_.v = store_.normal(dtype, {total_k, e.heads_k, e.head_dim_v});
    forward_.o = store_.zeros(dtype, {total_q, e.heads_q, e.head_dim_v});
    forward_.lse = store_.zeros(DType::float32, {e.heads_q, total_q});
    return;
  }
  forward_.q = store_.normal(dtype, {e.batch, e.seqlen_q, e.heads_q, e.head_dim});
  forward_.k = store_.normal(dtype, {e.batch, e.seqlen_k, e.heads_k, e.head_dim});
  forward_.v = store_.normal(dtype, {e.batch, e.seqlen_k, e.heads_k, e.head_dim_v});
  forward_.o = store_.zeros(dtype, {e.batch, e.seqlen_q, e.heads_q, e.head_dim_v});
  forward_.lse = store_.zeros(DType::float32, {e.batch, e.heads_q, e.seqlen_q});
}

void Call::make_options(const CallFlags& flags) {
  const Extents e(flags);
  const OptionFlags& from = flags.options;
  Options& to = forward_.options;
  to.softmax_scale = from.softmax_scale;
  to.causal = from.causal;
  to.window_left = from.window_left;
  to.window_right = from.window_right;
  to.alignment = from.top_left ? Alignment::top_left : Alignment::bottom_right;
  to.softcap = from.softcap;
  if (from.alibi) to.alibi_slopes = store_.normal(DType::float32, {e.heads_q});
  if (from.bias) to.bias = store_.normal(DType::float32, {1, e.heads_q, e.seqlen_q, e.seqlen_k});
  if (from.sinks) to.sinks = store_.normal(DType::float32, {e.heads_q});
  to.dropout_p = from.dropout;
  to.seed = from.seed;
  if (e.packed) {
    to.cu_seqlens_q = store_.integers(cumulative(from.lengths_q));
    to.cu_seqlens_k = store_.integers(cumulative(from.lengths_k));
  }
  if (!from.seqused_q.empty()) to.seqused_q = store_.integers(from.seqused_q);
  if (!from.seqused_k.empty()) to.seqused_k = store_.integers(from.seqused_k);
  to.deterministic = from.deterministic;
  to.kernel = from.kernel;
  to.num_threads = from.threads;
}

void Call::make_backward() {
  const Forward& f = forward_;
  const auto dtype_of = [](const Tensor& t) {
    if (t.dtype.code == kDLBfloat) return DType::bfloat16;
    return t.dtype.bits == 16 ? DType::float16 : DType::float32;
  };
  const auto gradient = [&](const Tensor& t) { return like(store_, t, dtype_of(t), false); };
  backward_.q = f.q;
  backward_.k = f.k;
  backward_.v = f.v;
  backward_.o = f.o;
  backward_.lse = f.lse;
  backward_.dout = like(store_, f.o, dtype_of(f.o), true);
  backward_.dq = gradient(f.q);
  backward_.dk = gradient(f.k);
  backward_.dv = gradient(f.v);
  if (f.options.bias.given()) backward_.dbias = gradient(f.options.bias);
  if (f.options.sinks.given()) backward_.dsinks = gradient(f.options.sinks);
  backward_.options = f.options;
}

void Call::reserve(Direction direction) {
  if (direction == Direction::forward) {
    forward_workspace_ = workspace_for(forward_);
  } else {
    backward_workspace_ = workspace_for(backward_);
  }
}

void Call::forward() {
  const bool reserved = forward_workspace_ != nullptr;
  if (!reserved) reserve(Direction::forward);
  tessera::forward(forward_).or_throw();
  if (!reserved) forward_workspace_.reset();
}

void Call::backward() {
  const bool reserved = backward_workspace_ != nullptr;
  if (!reserved) reserve(Direction::backward);
  tessera::backward(backward_).or_throw();
  if (!reserved) backward_workspace_.reset();
}

double nominal_flops(const CallFlags& flags, Direction direction) {
  const Extents e(flags);
  const double dense = 2.0 * static_cast<double>(e.batch * e.heads_q) * static_cast<double>(e.seqlen_q) *
                       static_cast<double>(e.seqlen_k) * static_cast<double>(e.head_dim + e.head_dim_v);
  const double forward = flags.options.causal ? dense / 2 : dense;
  return direction == Direction::forward ? forward : 2.5 * forward;
}

}  // namespace tessera::cli
