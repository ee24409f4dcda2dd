// Validation of forward and backward, and what the other calls share with them (core/validator.h).
//
// The tensors of a call stand in one table (core/arguments.h), and what holds for every tensor of its kind is
// checked along it: presence, device, dtype, rank, strides, pointer. Only then do the checks that relate
// arguments to each other run, and those that read cu_seqlens and seqused. Of a GPU's tensors nothing is
// read.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/threads.h"
#include "core/validator.h"

namespace tessera {

std::string number_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

namespace {

std::string extents_text(const Expected& list) {
  std::string text = "(";
  for (const Extent& extent : list) {
    if (&extent != list.begin()) text += ", ";
    text += extent.free != nullptr ? extent.free : std::to_string(extent.size);
  }
  return text + ")";
}

}  // namespace

// --- every tensor by itself ---

bool Validator::presence() {
  for (const Argument& argument : table_) {
    if (argument.need == Need::required && !argument.tensor->given()) {
      status = Status(Code::invalid_argument, std::string(argument.name) + ": not given");
      return false;
    }
  }
  if (!together("cu_seqlens_q", options_.cu_seqlens_q, "cu_seqlens_k", options_.cu_seqlens_k)) return false;
  // Decode's keys are those of the cache, which are not packed: only k_new may be.
  return problem.direction == Direction::decode ||
         together("cu_seqlens_k", options_.cu_seqlens_k, "cu_seqlens_q", options_.cu_seqlens_q);
}

bool Validator::together(const char* name, const Tensor& one, const char* other_name, const Tensor& other) {
  return one.given() || !other.given() || fail(name, "not given", std::string("with ") + other_name);
}

bool Validator::devices() {
  problem.device = table_.begin()->tensor->device;
  for (const Argument& argument : table_) {
    if (argument.tensor->given() && !same_device(argument.tensor->device, problem.device)) {
      return fail(argument.name + std::string(".device"), device_text(argument.tensor->device),
                  std::string(table_.begin()->name).append("'s ").append(device_text(problem.device)));
    }
  }
  const DLDevice device = std::exchange(problem.device, normal_device(problem.device));
  if (problem.on_host() || problem.device.device_type == kDLCUDA) return true;
  return fail(table_.begin()->name + std::string(".device"), device_text(device), "cpu or cuda");
}

bool Validator::each_tensor() {
  return std::all_of(table_.begin(), table_.end(), [&](const Argument& argument) {
    return !argument.tensor->given() ||
           (dtype(argument) && rank(argument) && layout(argument) && pointer(argument));
  });
}

bool Validator::dtype(const Argument& argument) {
  const std::optional<DType> found = dtype_of(*argument.tensor);
  const auto fault = [&](const std::string& expected) {
    return fail(argument.name + std::string(".dtype"), dtype_text(argument.tensor->dtype), expected);
  };
  const auto of_q = [&] { return std::string("q's ") + name_of(q_dtype_); };
  switch (argument.types) {
    case Types::floating:  // q stands first in the table
      q_dtype_ = problem.dtype = found.value_or(DType::float32);
      return (found && is_floating(*found)) || fault("float32, float16 or bfloat16");
    case Types::any_floating:
      return (found && is_floating(*found)) || fault("float32, float16 or bfloat16");
    case Types::as_q:
      return found == q_dtype_ || fault(of_q());
    case Types::cached:
      return found == q_dtype_ || found == DType::float8_e4m3fn || found == DType::int8 ||
             fault(of_q() + ", float8_e4m3fn or int8");
    case Types::as_q_or_float32:
      return found == q_dtype_ || found == DType::float32 ||
             fault(q_dtype_ == DType::float32 ? "float32" : of_q() + " or float32");
    case Types::float32:
      return found == DType::float32 || fault("float32");
    case Types::int32:
      return found == DType::int32 || fault("int32");
  }
  return false;
}

bool Validator::rank(const Argument& argument) {
  const int found = argument.tensor->rank;
  if (argument.min_rank <= found && found <= argument.max_rank) return true;
  std::string expected = std::to_string(argument.min_rank);
  if (argument.min_rank < argument.max_rank) expected += " to " + std::to_string(argument.max_rank);
  const bool rows = argument.min_rank == 2 && argument.types == Types::float32;  // lse and dlse
  if (is_packed(options_) && (rows || argument.min_rank == 3)) expected += " with cu_seqlens_q";
  return fail(argument.name, "rank " + std::to_string(std::max(found, 0)), expected);
}

bool Validator::layout(const Argument& argument) {
  const Tensor& tensor = *argument.tensor;
  const auto negative = [](std::int64_t n) { return n < 0; };
  if (std::any_of(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, negative)) {
    return fail(argument.name, shape_text(tensor), "sizes of at least 0");
  }
  const Extents stride = effective_strides(tensor);
  if (std::any_of(stride.begin(), stride.end(), negative)) {
    return fail(argument.name, stride_text(tensor), "strides of at least 0");
  }
  const int last = tensor.rank - 1;
  const bool stride_matters = has_elements(tensor) && tensor.shape[last] > 1;
  if (argument.last == Last::contiguous && stride_matters && stride[last] != 1) {
    return fail(argument.name, stride_text(tensor), "a last stride of 1");
  }
  if (!bytes_spanned(tensor)) {
    return fail(argument.name, shape_text(tensor) + " with " + stride_text(tensor), "less than 2^63 bytes");
  }
  if (argument.role == Role::output && !nests(tensor)) {
    return fail(argument.name, shape_text(tensor) + " with " + stride_text(tensor),
                "an output whose elements do not overlap");
  }
  return true;
}

bool Validator::pointer(const Argument& argument) {
  const Tensor& tensor = *argument.tensor;
  if (!has_elements(tensor)) return true;
  const auto name = [&] { return argument.name + std::string(".data"); };
  if (tensor.data == nullptr) {
    const bool read_here = argument.types == Types::int32 && problem.on_host();
    return (pointers_ == Pointers::optional && !read_here) || fail(name(), "null", "an address");
  }
  const std::uintptr_t size = tensor.dtype.bits / 8u;
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(tensor.data) % size;
  if (past == 0) return true;
  const std::string multiple = "a multiple of " + std::to_string(size);
  return fail(name(), "an address " + std::to_string(past) + " past " + multiple, multiple);
}

// --- options that are numbers ---

bool Validator::scalars() {
  // Kernels compute with floats: what is no finite float, or rounds to 0, is as bad as an infinity.
  constexpr double largest = std::numeric_limits<float>::max(), smallest = std::numeric_limits<float>::min();
  const double scale = options_.softmax_scale.value_or(0);
  if (!(std::fabs(scale) <= largest))
    return fail("softmax_scale", number_text(scale), "a finite float32 number");
  if (scale != 0 && std::fabs(scale) < smallest)
    return fail("softmax_scale", number_text(scale), "0 or a normal float32 number");
  const double softcap = options_.softcap;
  if (softcap != 0 && !(softcap >= smallest && softcap <= largest)) {
    return fail("softcap", number_text(softcap), "0 (off) or a positive finite float32 number");
  }
  // What kernels make of it are floats too: the factor of q·k inside the tanh, and its product, which may
  // count as 0 below 1e-38. Up to here that is less than 1e-7 of a score.
  if (softcap > 1e30) return fail("softcap", number_text(softcap), "0 (off), or at most 1e+30");
  if (softcap != 0 && std::fabs(scale) / softcap > largest) {
    return fail("softcap", number_text(softcap),
                "0 (off), or softmax_scale / softcap a finite float32 number");
  }
  const double p = options_.dropout_p;
  if (!(p >= 0 && p <= 1)) return fail("dropout_p", number_text(p), "a number from 0 to 1");
  if (options_.offset > Philox::max_offset) {
    return fail("offset", std::to_string(options_.offset), "a number below 2^36");
  }
  if (options_.num_threads < 0 || options_.num_threads > max_threads) {
    return fail("num_threads", std::to_string(options_.num_threads), "0 to " + std::to_string(max_threads));
  }
  problem.softmax_scale = scale;  // sizes() has the default
  problem.softcap = softcap;
  problem.dropout = Dropout::make(p, options_.seed, options_.offset);
  problem.alignment = options_.alignment;
  problem.deterministic = options_.deterministic;
  problem.stream = options_.stream;
  if (!threads()) return false;
  if (!window("window_left", options_.window_left, problem.window_left)) return false;
  if (!window("window_right", options_.window_right, problem.window_right)) return false;
  if (options_.causal) problem.window_right = 0;
  return true;
}

bool Validator::threads() {
  problem.num_threads = options_.num_threads;
  if (problem.num_threads > 0) return true;
  const Result<int> found = default_threads();
  if (found.ok()) {
    problem.num_threads = found.value();
  } else {
    status = found.status();
  }
  return found.ok();
}

bool Validator::window(const char* name, const std::optional<std::int64_t>& given, std::int64_t& out) {
  if (!given) return true;
  out = std::min<std::int64_t>(*given, Mask::unbounded);
  return *given >= 0 || fail(name, std::to_string(*given), "at least 0, or none for no bound");
}

// --- q, k and v against each other ---

bool Validator::shape(const char* name, const Tensor& tensor, const Expected& expected) {
  bool same = static_cast<std::size_t>(tensor.rank) == expected.size();
  for (std::size_t i = 0; same && i < expected.size(); ++i) {
    const Extent& extent = expected.begin()[i];
    same = extent.free != nullptr || extent.size == tensor.shape[i];
  }
  return same || fail(name, shape_text(tensor), extents_text(expected));
}

bool Validator::row_shape(const char* name, const Tensor& tensor) {
  if (!tensor.given()) return true;
  if (problem.packed) return shape(name, tensor, {problem.num_heads_q, problem.rows_q});
  return shape(name, tensor, {problem.batch, problem.num_heads_q, problem.rows_q});
}

bool Validator::within(const char* name, const Tensor& tensor, int axis, const char* axis_name,
                       std::int64_t low, std::int64_t high) {
  if (low <= tensor.shape[axis] && tensor.shape[axis] <= high) return true;
  return fail(name, shape_text(tensor),
              axis_name + (" from " + std::to_string(low) + " to " + std::to_string(high)));
}

bool Validator::few_rows(const char* name, const Tensor& tensor, int rows_axis) {
  const double all = static_cast<double>(rows_axis == 0 ? 1 : tensor.shape[0]) *
                     static_cast<double>(tensor.shape[rows_axis]) *
                     static_cast<double>(tensor.shape[rows_axis + 1]);
  return all <= static_cast<double>(max_rows_of_heads) ||
         fail(name, shape_text(tensor), "at most 2^46 rows in all heads");
}

bool Validator::sizes_of_q(const Tensor& q) {
  const bool packed = problem.packed = is_packed(options_);
  const int rows = packed ? 0 : 1, heads = rows + 1, dim = rows + 2;
  const Tensor& cu = options_.cu_seqlens_q;
  if (packed && cu.shape[0] < 1) return fail("cu_seqlens_q", shape_text(cu), "(batch + 1)");
  problem.batch = packed ? cu.shape[0] - 1 : q.shape[0];
  if (!within("q", q, rows, packed ? "total_q" : "seqlen_q", 0, max_rows)) return false;
  if (!within("q", q, heads, "num_heads_q", 1, max_heads_of_batch)) return false;
  if (!within("q", q, dim, "head_dim", 1, max_head_dim)) return false;
  problem.rows_q = q.shape[rows];
  problem.num_heads_q = q.shape[heads];
  problem.head_dim = q.shape[dim];
  if (problem.batch > max_heads_of_batch / problem.num_heads_q) {
    return fail("q", shape_text(q), "batch (" + std::to_string(problem.batch) + ") * num_heads_q below 2^32");
  }
  if (!few_rows("q", q, rows)) return false;
  if (!options_.softmax_scale) problem.softmax_scale = 1.0 / std::sqrt(static_cast<double>(problem.head_dim));
  return true;
}

bool Validator::sizes(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!sizes_of_q(q)) return false;
  const int rows = problem.packed ? 0 : 1, heads = rows + 1, dim = rows + 2;
  const char* rows_k = problem.packed ? "total_k" : "seqlen_k";
  if (!shape("k", k, tokens(rows_k, "num_heads_k", problem.head_dim))) return false;
  if (!within("k", k, rows, rows_k, 0, max_rows)) return false;
  problem.rows_k = k.shape[rows];
  if (!heads_of_k("k", k, heads) || !few_rows("k", k, rows)) return false;

  if (!shape("v", v, tokens(problem.rows_k, problem.num_heads_k, "head_dim_v"))) return false;
  problem.head_dim_v = v.shape[dim];
  return within("v", v, dim, "head_dim_v", 1, max_head_dim);
}

bool Validator::heads_of_k(const char* name, const Tensor& k, int axis) {
  problem.num_heads_k = k.shape[axis];
  if (problem.num_heads_k < 1 || problem.num_heads_q % problem.num_heads_k != 0) {
    return fail(name, shape_text(k), "num_heads to divide q's " + std::to_string(problem.num_heads_q));
  }
  problem.group_size = problem.num_heads_q / problem.num_heads_k;
  return true;
}

// --- the lengths: here the host reads memory, if it is its own ---

bool Validator::sequences() {
  if (problem.packed &&
      !(cumulative("cu_seqlens_q", options_.cu_seqlens_q, "total_q", problem.rows_q, problem.cu_seqlens_q) &&
        cumulative("cu_seqlens_k", options_.cu_seqlens_k, "total_k", problem.rows_k, problem.cu_seqlens_k))) {
    return false;
  }
  return longest("max_seqlen_q", "cu_seqlens_q", options_.max_seqlen_q, problem.cu_seqlens_q, problem.rows_q,
                 problem.max_seqlen_q) &&
         longest("max_seqlen_k", "cu_seqlens_k", options_.max_seqlen_k, problem.cu_seqlens_k, problem.rows_k,
                 problem.max_seqlen_k) &&
         used("seqused_q", options_.seqused_q, true, problem.seqused_q) &&
         used("seqused_k", options_.seqused_k, false, problem.seqused_k);
}

bool Validator::cumulative(const char* name, const Tensor& tensor, const char* total_name, std::int64_t total,
                           const std::int32_t*& out) {
  if (!shape(name, tensor, {problem.batch + 1})) return false;
  out = static_cast<const std::int32_t*>(tensor.data);
  if (!problem.on_host()) return true;
  const auto element = [&](std::int64_t i) {
    std::string text = name;
    return text.append("[").append(std::to_string(i)).append("]");
  };
  if (out[0] != 0) return fail(element(0), std::to_string(out[0]), "0");
  for (std::int64_t b = 1; b <= problem.batch; ++b) {
    if (out[b] < out[b - 1]) {
      return fail(element(b), std::to_string(out[b]),
                  "at least " + element(b - 1) + ", " + std::to_string(out[b - 1]));
    }
  }
  if (out[problem.batch] <= total) return true;
  return fail(element(problem.batch), std::to_string(out[problem.batch]),
              std::string("at most ") + total_name + ", " + std::to_string(total));
}

bool Validator::longest(const char* name, const char* cu_name, const std::optional<std::int64_t>& given,
                        const std::int32_t* cu, std::int64_t rows, std::int64_t& out) {
  out = rows;
  if (!problem.packed && given)
    return fail(name, std::to_string(*given), std::string("only with ") + cu_name);
  if (!problem.packed) return true;
  std::int64_t found = 0;
  for (std::int64_t b = 0; problem.on_host() && b < problem.batch; ++b)
    found = std::max<std::int64_t>(found, cu[b + 1] - cu[b]);
  if (!given) {
    if (problem.on_host()) out = found;
    return true;
  }
  out = *given;
  if (*given < found || *given < 0) {
    const char* of = problem.on_host() ? ", the longest sequence" : "";
    return fail(name, std::to_string(*given), "at least " + std::to_string(found) + of);
  }
  return *given <= max_rows || fail(name, std::to_string(*given), "at most " + std::to_string(max_rows));
}

bool Validator::used(const char* name, const Tensor& tensor, bool of_q, const std::int32_t*& out) {
  if (!tensor.given()) return true;
  if (!shape(name, tensor, {problem.batch})) return false;
  const auto* lengths = static_cast<const std::int32_t*>(tensor.data);
  for (std::int64_t b = 0; problem.on_host() && b < problem.batch; ++b) {
    const Sequence sequence = problem.sequence(b);
    const std::int64_t allocated = of_q ? sequence.allocated_q : sequence.allocated_k;
    if (lengths[b] < 0 || lengths[b] > allocated) {
      return fail(name + ("[" + std::to_string(b) + "]"), std::to_string(lengths[b]),
                  "0 to " + std::to_string(allocated));
    }
  }
  out = lengths;
  return true;
}

// --- options that are tensors ---

bool Validator::alibi() {
  const Tensor& slopes = options_.alibi_slopes;
  if (!slopes.given()) return true;
  const bool each_batch = slopes.rank == 2;
  if (each_batch && !shape("alibi_slopes", slopes, {problem.batch, problem.num_heads_q})) return false;
  if (!each_batch && !shape("alibi_slopes", slopes, {problem.num_heads_q})) return false;
  const Extents stride = effective_strides(slopes);
  problem.alibi_slopes = static_cast<const float*>(slopes.data);
  problem.alibi_batch = each_batch ? stride[0] : 0;
  problem.alibi_head = each_batch ? stride[1] : stride[0];
  return true;
}

static BiasView bias_view(const Tensor& tensor) {
  const Extents stride = effective_strides(tensor);
  const int missing = Tensor::max_rank - tensor.rank;  // leading dimensions, broadcast
  const auto at = [&](int axis) { return axis < missing ? 0 : stride[axis - missing]; };
  BiasView view{tensor.data, checked_dtype(tensor), at(0), at(1), at(2), at(3), {1, 1, 1, 1}, true};
  for (int axis = missing; axis < Tensor::max_rank; ++axis) view.extent[axis] = tensor.shape[axis - missing];
  return view;
}

bool Validator::bias() {
  const Tensor& tensor = options_.bias;
  if (!tensor.given()) return true;
  const Extents full = {problem.batch, problem.num_heads_q, problem.max_seqlen_q, problem.max_seqlen_k};
  const int missing = Tensor::max_rank - tensor.rank;
  for (int axis = missing; axis < Tensor::max_rank; ++axis) {
    const std::int64_t size = tensor.shape[axis - missing];
    if (size == 1 || size == full[axis]) continue;
    return fail("bias", shape_text(tensor), "a broadcast of " + list_text(full));
  }
  problem.bias = bias_view(tensor);
  return true;
}

bool Validator::sinks() {
  const Tensor& tensor = options_.sinks;
  if (!tensor.given()) return true;
  problem.sinks = tensor.data;
  problem.sinks_dtype = checked_dtype(tensor);
  problem.sinks_stride = effective_strides(tensor)[0];
  return shape("sinks", tensor, {problem.num_heads_q});
}

// --- the normal form ---

View Validator::token_view(const Tensor& tensor) const {
  const Extents stride = effective_strides(tensor);
  View view;
  view.data = tensor.data;
  view.dtype = checked_dtype(tensor);
  view.batch = problem.packed ? 0 : stride[0];
  view.seq = problem.packed ? stride[0] : stride[1];
  view.head = problem.packed ? stride[1] : stride[2];
  view.present = true;
  return view;
}

// lse and dlse, whose heads stand before the rows.
View Validator::row_view(const Tensor& tensor) const {
  if (!tensor.given()) return {};
  const Extents stride = effective_strides(tensor);
  View view;
  view.data = tensor.data;
  view.batch = problem.packed ? 0 : stride[0];
  view.head = problem.packed ? stride[0] : stride[1];
  view.seq = problem.packed ? stride[1] : stride[2];
  view.present = true;
  return view;
}

bool Validator::views(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse) {
  problem.q = token_view(q);
  problem.k = token_view(k);
  problem.v = token_view(v);
  problem.o = token_view(o);
  problem.lse = row_view(lse);
  return true;
}

bool Validator::gradients(const Backward& call) {
  const Expected like_q = tokens(problem.rows_q, problem.num_heads_q, problem.head_dim);
  const Expected like_k = tokens(problem.rows_k, problem.num_heads_k, problem.head_dim);
  const Expected like_v = tokens(problem.rows_k, problem.num_heads_k, problem.head_dim_v);
  const Expected like_o = tokens(problem.rows_q, problem.num_heads_q, problem.head_dim_v);
  if (!(shape("dout", call.dout, like_o) && row_shape("dlse", call.dlse) && shape("dq", call.dq, like_q) &&
        shape("dk", call.dk, like_k) && shape("dv", call.dv, like_v))) {
    return false;
  }
  problem.dout = token_view(call.dout);
  problem.dlse = row_view(call.dlse);
  problem.dq = token_view(call.dq);
  problem.dk = token_view(call.dk);
  problem.dv = token_view(call.dv);

  // dbias and dsinks repeat the shape and dtype of what they are the gradients of.
  const auto mirrors = [&](const char* name, const Tensor& gradient, const char* of_name, const Tensor& of) {
    if (!gradient.given()) return true;
    if (!of.given()) return fail(name, "given", std::string("only with ") + of_name);
    if (!shape(name, gradient, Expected(of))) return false;
    if (dtype_of(gradient) == dtype_of(of)) return true;
    return fail(std::string(name) + ".dtype", dtype_text(gradient.dtype),
                std::string(of_name) + "'s " + dtype_text(of.dtype));
  };
  if (!mirrors("dbias", call.dbias, "bias", options_.bias)) return false;
  if (!mirrors("dsinks", call.dsinks, "sinks", options_.sinks)) return false;
  if (call.dbias.given()) problem.dbias = bias_view(call.dbias);
  if (call.dsinks.given()) {
    problem.dsinks = call.dsinks.data;
    problem.dsinks_stride = effective_strides(call.dsinks)[0];
  }
  return true;
}

// Whether an output is that input itself, where it may be: merge_states works element by element.
static bool in_place(Direction direction, const Tensor& output, const Tensor& input) {
  return direction == Direction::merge && output.data == input.data && output.rank == input.rank &&
         dtype_of(output) == dtype_of(input) && output.shape == input.shape &&
         effective_strides(output) == effective_strides(input);
}

bool Validator::aliases(const Workspace& workspace) {
  struct Memory {
    const Argument* argument;
    Footprint of;
  };
  std::array<Memory, Arguments::capacity> all{};
  std::size_t count = 0;
  for (const Argument& argument : table_) {
    if (argument.tensor->given() && argument.tensor->data != nullptr)
      all[count++] = {&argument, Footprint(*argument.tensor)};
  }
  const std::span<const Memory> memories(all.data(), count);

  const bool looked_at = pointers_ == Pointers::required && workspace.data != nullptr;
  const Footprint scratch(workspace.data, looked_at ? workspace.bytes : 0);
  if (const std::uintptr_t past = scratch.begin % 256; looked_at && !problem.on_host() && past != 0) {
    return fail("workspace", "an address " + std::to_string(past) + " past a multiple of 256",
                "a multiple of 256, as GPU memory is allocated");
  }
  for (const Memory& mine : memories) {
    if (overlap(scratch, mine.of)) {
      return fail("workspace", std::string("shares memory with ") + mine.argument->name, "memory of its own");
    }
    if (mine.argument->role != Role::output) continue;
    for (const Memory& other : memories) {
      if (&other != &mine && overlap(mine.of, other.of) &&
          !in_place(problem.direction, *mine.argument->tensor, *other.argument->tensor)) {
        return fail(mine.argument->name, std::string("shares memory with ") + other.argument->name,
                    "memory of its own");
      }
    }
  }
  return true;
}

Result<Problem> validate(const Forward& call, Pointers pointers) {
  Validator check(Direction::forward, call.options, arguments(call), pointers);
  if (check.common(call.q, call.k, call.v, call.o, call.lse) && check.aliases(call.workspace))
    return check.problem;
  return check.status;
}

Result<Problem> validate(const Backward& call, Pointers pointers) {
  Validator check(Direction::backward, call.options, arguments(call), pointers);
  if (check.common(call.q, call.k, call.v, call.o, call.lse) && check.gradients(call) &&
      check.aliases(call.workspace)) {
    return check.problem;
  }
  return check.status;
}

}  // namespace tessera
