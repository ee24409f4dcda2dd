#include "call.h"

#include <cstdint>

namespace tessera::python {
namespace {

constexpr std::array<const char*, option_count> option_names = {
    "softmax_scale", "causal", "window_left",  "window_right", "causal_alignment", "softcap",
    "dropout_p",     "seed",   "max_seqlen_q", "max_seqlen_k", "deterministic",    "kernel"};

}  // namespace

Options make_options(Reader& read, Items tensors, Items items) {
  // Python's error says neither which option nor what was wanted.
  const auto wrong = [&](int i, const char* expected) {
    raise_wrong(option_names[static_cast<std::size_t>(i)], items[i], expected);
  };
  const auto optional_integer = [&](int i) -> std::optional<std::int64_t> {
    if (items[i] == Py_None) return std::nullopt;
    const long long value = PyLong_AsLongLong(items[i]);
    if (value == -1 && PyErr_Occurred() != nullptr) wrong(i, "None or an integer below 2^63");
    return value;
  };
  const auto real = [&](int i) {
    const double value = PyFloat_AsDouble(items[i]);
    if (value == -1.0 && PyErr_Occurred() != nullptr) wrong(i, "a number");
    return value;
  };
  Options options;
  options.alibi_slopes = read(tensors[at::alibi_slopes]);
  options.bias = read(tensors[at::bias]);
  options.sinks = read(tensors[at::sinks]);
  options.cu_seqlens_q = read(tensors[at::cu_seqlens_q]);
  options.cu_seqlens_k = read(tensors[at::cu_seqlens_k]);
  options.seqused_q = read(tensors[at::seqused_q]);
  options.seqused_k = read(tensors[at::seqused_k]);
  if (items[at::softmax_scale] != Py_None) options.softmax_scale = real(at::softmax_scale);
  options.causal = truth(items[at::causal]);
  options.window_left = optional_integer(at::window_left);
  options.window_right = optional_integer(at::window_right);
  if (truth(items[at::top_left])) options.alignment = Alignment::top_left;
  options.softcap = real(at::softcap);
  options.dropout_p = real(at::dropout_p);
  if (items[at::seed] != Py_None) {
    options.seed = PyLong_AsUnsignedLongLong(items[at::seed]);
    if (PyErr_Occurred() != nullptr) wrong(at::seed, "None or an integer from 0 to 2^64 - 1");
  }
  options.max_seqlen_q = optional_integer(at::max_seqlen_q);
  options.max_seqlen_k = optional_integer(at::max_seqlen_k);
  options.deterministic = truth(items[at::deterministic]);
  if (items[at::kernel] != Py_None && !nb::try_cast(nb::handle(items[at::kernel]), options.kernel))
    wrong(at::kernel, "None or a string");
  return options;
}

void set_place(const Torch& torch, Options& options, DLDevice device) {
  options.stream = torch.stream(device);
  if (device.device_type == kDLCPU) options.num_threads = torch.threads();
}

namespace {

bool is_compact(const Tensor& tensor) {
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.stride[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

}  // namespace

bool has_whole_rows(const Tensor& tensor) {
  return tensor.rank < 1 || tensor.rank > Tensor::max_rank || tensor.stride[tensor.rank - 1] == 1 ||
         tensor.shape[tensor.rank - 1] <= 1;
}

nb::object make_lse(const Torch& torch, nb::handle q, const Tensor& rows) {
  const auto& shape = rows.shape;
  return torch.empty_float32(
      q, rows.rank == 4 ? shape_tuple({shape[0], shape[2], shape[1]}) : shape_tuple({shape[1], shape[0]}));
}
Outputs make_outputs(const Torch& torch, nb::handle q, const Tensor& rows, std::int64_t dim, bool with_lse) {
  const auto& shape = rows.shape;
  const int rank = rows.rank;
  Outputs outputs;
  if (dim == shape[rank - 1] && is_compact(rows)) {
    outputs.out = torch.empty_like(q);
  } else {
    outputs.out = torch.empty(q, rank == 4 ? shape_tuple({shape[0], shape[1], shape[2], dim})
                                           : shape_tuple({shape[0], shape[1], dim}));
  }
  outputs.lse = with_lse ? make_lse(torch, q, rows) : nb::none();
  return outputs;
}

}  // namespace tessera::python
