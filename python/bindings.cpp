// tessera._core: the C++ API for Python. Private: python/tessera is what users see.
//
// A tensor argument is one of
//   None: not given
//   a torch.Tensor
//   a tuple (address, shape, strides in elements, dtype code, dtype bits, device type, device index)
//   a DLPack capsule, or a producer of one
//
// Options are two tuples: `tensors` and `options`, in the order of _call.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"
#include "dispatch/dispatch.h"
#include "tessera/tessera.hpp"
#if defined(TESSERA_CUDA)
#include "cuda/driver/driver.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using tessera::Tensor;

[[noreturn]] void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw nb::python_error();
}
void check(const tessera::Status& status) {
  if (status.ok()) return;
  raise(status.code() == tessera::Code::invalid_argument ? PyExc_ValueError
        : status.code() == tessera::Code::unsupported    ? PyExc_NotImplementedError
                                                         : PyExc_RuntimeError,
        status.message());
}

// ---- Python's objects.

nb::object owned(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}
std::int64_t integer(nb::handle object) {
  const long long value = PyLong_AsLongLong(object.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}
bool truth(nb::handle object) {
  const int value = PyObject_IsTrue(object.ptr());
  if (value < 0) throw nb::python_error();
  return value == 1;
}

// A name that is looked up again and again, for the life of the process.
class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
  [[nodiscard]] nb::object of(nb::handle object) const {
    return owned(PyObject_GetAttr(object.ptr(), text_));
  }
  [[nodiscard]] nb::object call(nb::handle object) const {
    PyObject* arguments[] = {object.ptr()};
    return owned(PyObject_VectorcallMethod(text_, arguments, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
  [[nodiscard]] PyObject* ptr() const { return text_; }

 private:
  PyObject* text_;
};
struct Names {
  Name data_ptr{"data_ptr"}, shape{"shape"}, stride{"stride"}, dtype{"dtype"}, device{"device"},
      is_cuda{"is_cuda"}, is_cpu{"is_cpu"}, get_device{"get_device"}, requires_grad{"requires_grad"},
      forward_level{"_current_level"}, dlpack{"__dlpack__"};
};
const Names& names() {
  static const Names all;
  return all;
}

// ---- PyTorch, where the program has imported it: never by ourselves.

// The table of functions in torch.Tensor.__dlpack_c_exchange_api__ (torch 2.10 and later): what a tensor is,
// without a capsule and without a dozen attributes of Python.
struct Exchange {
  std::uint32_t major, minor;
  const Exchange* older;
  void *allocate, *from_object, *to_object;  // not used: their tensors are strangers to torch's allocator
  int (*describe)(void* object, DLTensor* out);
  int (*current_stream)(DLDeviceType device, std::int32_t index, void** out);
};

class Torch {
 public:
  // Null: not imported, or only half so far.
  static const Torch* loaded() {
    static const Torch* torch = nullptr;
    if (torch != nullptr) return torch;
    const nb::object name = owned(PyUnicode_FromString("torch"));
    const nb::object module = nb::steal(PyImport_GetModule(name.ptr()));
    if (!module.is_valid()) {
      PyErr_Clear();
      return nullptr;
    }
    if (nb::hasattr(module, "compile") && nb::hasattr(module, "nn")) torch = new Torch(module);
    return torch;
  }

  // Of exactly these types: what a subclass means is for torch's dispatcher to say.
  [[nodiscard]] bool is_plain(nb::handle object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    return type == tensor_.ptr() || type == parameter_.ptr();
  }
  [[nodiscard]] bool is_tensor(nb::handle object) const {
    if (is_plain(object)) return true;
    const int found = PyObject_IsInstance(object.ptr(), tensor_.ptr());
    if (found < 0) throw nb::python_error();
    return found == 1;
  }

  // Whether a call with these tensors is no more than its arithmetic: no gradient is wanted, forwards or
  // backwards, nothing is cast, and nobody looks on.
  [[nodiscard]] bool is_simple(std::initializer_list<PyObject*> differentiable) const {
    if (any_autocast_.is_none() || truth(any_autocast_())) return false;
    if (!watchers_.is_none() && integer(watchers_()) != 0) return false;
    if (!tracing_.is_none() && !tracing_().is_none()) return false;
    if (integer(names().forward_level.of(forward_ad_)) >= 0) return false;
    if (!truth(is_grad_enabled_())) return true;
    return std::none_of(differentiable.begin(), differentiable.end(), [](PyObject* object) {
      return object != Py_None && truth(names().requires_grad.of(object));
    });
  }

  [[nodiscard]] Tensor read(nb::handle object) const {
    if (exchange_ != nullptr && is_plain(object)) {
      DLTensor tensor;
      if (exchange_->describe(object.ptr(), &tensor) == 0) return Tensor(tensor);
      PyErr_Clear();  // the attributes tell the same, in words of ours
    }
    return read_attributes(object);
  }

  // The stream on which the program works.
  [[nodiscard]] void* stream(DLDevice device) const {
    if (device.device_type != kDLCUDA) return nullptr;
    if (exchange_ != nullptr) {
      void* stream = nullptr;
      if (exchange_->current_stream(device.device_type, device.device_id, &stream) != 0)
        throw nb::python_error();
      return stream;
    }
    return reinterpret_cast<void*>(integer(raw_stream_(device.device_id)));
  }
  // As many threads as torch takes, unless Tessera was told otherwise.
  [[nodiscard]] int threads() const {
    return std::getenv("TESSERA_NUM_THREADS") != nullptr ? 0 : static_cast<int>(integer(get_num_threads_()));
  }

  // Compact, and of like's dtype and device.
  [[nodiscard]] nb::object empty(nb::handle like, nb::handle shape) const {
    return empty_(shape, "dtype"_a = names().dtype.of(like), "device"_a = names().device.of(like));
  }
  [[nodiscard]] nb::object empty_like(nb::handle like) const { return empty_like_(like); }
  [[nodiscard]] nb::object empty_float32(nb::handle like, nb::handle shape) const {
    return empty_(shape, "dtype"_a = float32_, "device"_a = names().device.of(like));
  }
  [[nodiscard]] nb::object empty_bytes(nb::handle like, std::size_t size) const {
    return empty_(size, "dtype"_a = uint8_, "device"_a = names().device.of(like));
  }

 private:
  explicit Torch(const nb::object& torch)
      : tensor_(torch.attr("Tensor")),
        parameter_(torch.attr("nn").attr("Parameter")),
        is_grad_enabled_(torch.attr("is_grad_enabled")),
        any_autocast_(nb::getattr(torch.attr("_C"), "_is_any_autocast_enabled", nb::none())),
        watchers_(nb::getattr(torch.attr("_C"), "_len_torch_dispatch_stack", nb::none())),
        tracing_(nb::getattr(torch.attr("_C"), "_get_tracing_state", nb::none())),
        forward_ad_(torch.attr("autograd").attr("forward_ad")),
        raw_stream_(nb::getattr(torch.attr("_C"), "_cuda_getCurrentRawStream", nb::none())),
        get_num_threads_(torch.attr("get_num_threads")),
        empty_(torch.attr("empty")),
        empty_like_(torch.attr("empty_like")),
        float32_(torch.attr("float32")),
        uint8_(torch.attr("uint8")) {
    const auto add = [&](const char* name, int code, int bits) {
      types_.emplace_back(torch.attr(name),
                          DLDataType{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1});
    };
    add("bfloat16", kDLBfloat, 16);
    add("float16", kDLFloat, 16);
    add("float32", kDLFloat, 32);
    add("int32", kDLInt, 32);
    add("float64", kDLFloat, 64);
    add("int64", kDLInt, 64);
    add("int16", kDLInt, 16);
    add("int8", kDLInt, 8);
    add("uint8", kDLUInt, 8);

    const nb::object capsule = nb::getattr(tensor_, "__dlpack_c_exchange_api__", nb::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return;
    const auto* found =
        static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (found != nullptr && found->major > 1) found = found->older;
    if (found != nullptr && found->major == 1 && found->describe != nullptr &&
        found->current_stream != nullptr)
      exchange_ = found;
  }

  [[nodiscard]] Tensor read_attributes(nb::handle object) const;

  nb::object tensor_, parameter_, is_grad_enabled_, any_autocast_, watchers_, tracing_, forward_ad_,
      raw_stream_, get_num_threads_, empty_, empty_like_, float32_, uint8_;
  std::vector<std::pair<nb::object, DLDataType>> types_;
  const Exchange* exchange_ = nullptr;
};

// ---- Tensors.

void set_extents(Tensor& tensor, nb::handle shape, nb::handle stride) {
  const Py_ssize_t rank = PyTuple_Size(shape.ptr());
  if (rank < 0) throw nb::python_error();
  tensor.rank = rank == 0 ? -1 : static_cast<int>(rank);  // a scalar is given, and wrong everywhere
  for (Py_ssize_t i = 0; i < rank && i < Tensor::max_rank; ++i) {
    tensor.shape[i] = integer(PyTuple_GetItem(shape.ptr(), i));
    tensor.stride[i] = integer(PyTuple_GetItem(stride.ptr(), i));
  }
}

Tensor Torch::read_attributes(nb::handle object) const {
  const Names& n = names();
  Tensor tensor;
  set_extents(tensor, n.shape.of(object), n.stride.call(object));
  const nb::object dtype = n.dtype.of(object);
  const auto known = std::find_if(types_.begin(), types_.end(),
                                  [&](const auto& entry) { return entry.first.ptr() == dtype.ptr(); });
  tensor.dtype = known == types_.end() ? DLDataType{kDLOpaqueHandle, 0, 1} : known->second;
  tensor.data = reinterpret_cast<void*>(integer(n.data_ptr.call(object)));
  if (truth(n.is_cuda.of(object))) {
    tensor.device = {kDLCUDA, static_cast<int>(integer(n.get_device.call(object)))};
  } else if (!truth(n.is_cpu.of(object))) {
    raise(PyExc_ValueError, "a tensor lies on " + nb::cast<std::string>(nb::str(n.device.of(object))) +
                                ", expected cpu or cuda");
  }
  return tensor;
}

Tensor from_tuple(nb::handle object) {
  const nb::tuple fields = nb::borrow<nb::tuple>(object);
  if (nb::len(fields) != 7) raise(PyExc_TypeError, "a tensor as a tuple has 7 fields");
  Tensor tensor;
  tensor.data = reinterpret_cast<void*>(integer(fields[0]));
  set_extents(tensor, fields[1], fields[2]);
  tensor.dtype = {static_cast<std::uint8_t>(integer(fields[3])),
                  static_cast<std::uint8_t>(integer(fields[4])), 1};
  tensor.device = {static_cast<DLDeviceType>(integer(fields[5])), static_cast<int>(integer(fields[6]))};
  return tensor;
}

// Reads the tensors of one call, and keeps alive what they were read from.
class Reader {
 public:
  Tensor operator()(nb::handle object) {
    if (object.is_none()) return {};
    if (PyTuple_Check(object.ptr())) return from_tuple(object);
    const Torch* torch = Torch::loaded();
    if (torch != nullptr && torch->is_tensor(object)) return torch->read(object);
    nb::object capsule = nb::borrow(object);
    if (PyCapsule_CheckExact(object.ptr()) == 0) {
      if (PyObject_HasAttr(object.ptr(), names().dlpack.ptr()) == 0)
        raise(PyExc_TypeError,
              nb::cast<std::string>(nb::str(object.type())) + " is no tensor: it has no __dlpack__");
      capsule = names().dlpack.call(object);
    }
    const auto* managed =
        static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (managed == nullptr) throw nb::python_error();
    kept_.push_back(std::move(capsule));
    return Tensor(managed->dl_tensor);
  }

 private:
  std::vector<nb::object> kept_;
};

// ---- Calls.

// A tuple's items, or a call's arguments.
using Items = PyObject* const*;
constexpr Py_ssize_t tensor_count = 7, option_count = 12, grad_count = 5;

template <Py_ssize_t count>
std::array<PyObject*, count> items_of(nb::handle tuple, const char* name) {
  if (PyTuple_Check(tuple.ptr()) == 0 || PyTuple_Size(tuple.ptr()) != count)
    raise(PyExc_TypeError, std::string(name) + ": expected a tuple of " + std::to_string(count));
  std::array<PyObject*, count> items;
  for (Py_ssize_t i = 0; i < count; ++i) items[static_cast<std::size_t>(i)] = PyTuple_GetItem(tuple.ptr(), i);
  return items;
}

// Where an option stands in its tuple: _call.py has the same order.
enum TensorAt { alibi_slopes, bias, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k };
enum OptionAt {
  softmax_scale,
  causal,
  window_left,
  window_right,
  top_left,
  softcap,
  dropout_p,
  seed,
  max_seqlen_q,
  max_seqlen_k,
  deterministic,
  kernel
};
constexpr std::array<const char*, option_count> option_names = {
    "softmax_scale", "causal", "window_left",  "window_right", "causal_alignment", "softcap",
    "dropout_p",     "seed",   "max_seqlen_q", "max_seqlen_k", "deterministic",    "kernel"};

tessera::Options make_options(Reader& read, Items tensors, Items items) {
  // Python's error says neither which option nor what was wanted.
  const auto wrong = [&](int i, const char* expected) {
    PyObject* type = PyErr_ExceptionMatches(PyExc_TypeError) != 0 ? PyExc_TypeError : PyExc_ValueError;
    PyErr_Clear();
    raise(type, std::string(option_names[static_cast<std::size_t>(i)]) + ": " +
                    nb::cast<std::string>(nb::repr(nb::handle(items[i]))) + ", expected " + expected);
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
  tessera::Options options;
  options.alibi_slopes = read(tensors[alibi_slopes]);
  options.bias = read(tensors[bias]);
  options.sinks = read(tensors[sinks]);
  options.cu_seqlens_q = read(tensors[cu_seqlens_q]);
  options.cu_seqlens_k = read(tensors[cu_seqlens_k]);
  options.seqused_q = read(tensors[seqused_q]);
  options.seqused_k = read(tensors[seqused_k]);
  if (items[softmax_scale] != Py_None) options.softmax_scale = real(softmax_scale);
  options.causal = truth(items[causal]);
  options.window_left = optional_integer(window_left);
  options.window_right = optional_integer(window_right);
  if (truth(items[top_left])) options.alignment = tessera::Alignment::top_left;
  options.softcap = real(softcap);
  options.dropout_p = real(dropout_p);
  if (items[seed] != Py_None) {
    options.seed = PyLong_AsUnsignedLongLong(items[seed]);
    if (PyErr_Occurred() != nullptr) wrong(seed, "None or an integer from 0 to 2^64 - 1");
  }
  options.max_seqlen_q = optional_integer(max_seqlen_q);
  options.max_seqlen_k = optional_integer(max_seqlen_k);
  options.deterministic = truth(items[deterministic]);
  if (items[kernel] != Py_None && !nb::try_cast(nb::handle(items[kernel]), options.kernel))
    wrong(kernel, "None or a string");
  return options;
}

// Memory for a call on the CPU. A thread keeps what small calls need: making it anew would take longer than
// they do.
class HostMemory {
 public:
  explicit HostMemory(std::size_t bytes) {
    thread_local std::unique_ptr<std::byte[]> kept;
    if (bytes > kept_bytes) {
      own_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    } else if (kept == nullptr) {
      kept = std::make_unique_for_overwrite<std::byte[]>(kept_bytes);
    }
    data = own_ != nullptr ? own_.get() : kept.get();
  }
  std::byte* data;

 private:
  static constexpr std::size_t kept_bytes = std::size_t{1} << 20;
  std::unique_ptr<std::byte[]> own_;
};

// Runs the call. allocate(bytes) makes its workspace on a GPU: an object whose memory the reader finds.
template <class Call, class Allocate>
void run(Reader& read, const Call& call, const Allocate& allocate) {
  const tessera::Result<tessera::Problem> problem = tessera::validate(call);
  check(problem.status());
  const tessera::Result<tessera::Choice> choice =
      tessera::choose(problem.value(), tessera::forced_kernel(call.options));
  check(choice.status());
  tessera::Workspace workspace{nullptr, choice.value().plan.workspace};
  std::optional<HostMemory> host;
  nb::object device;
  if (workspace.bytes != 0 && problem.value().on_host()) {
    workspace.data = host.emplace(workspace.bytes).data;
  } else if (workspace.bytes != 0) {
    device = allocate(workspace.bytes);
    workspace.data = read(device).data;
  }
  tessera::Status status;
  {
    const nb::gil_scoped_release released;
    status = tessera::run(problem.value(), choice.value(), workspace);
  }
  check(status);
}

template <class Call>
Call make_call(Reader& read, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
               nb::handle tensors, nb::handle options) {
  Call call;
  call.q = read(q);
  call.k = read(k);
  call.v = read(v);
  call.o = read(o);
  call.lse = read(lse);
  call.options = make_options(read, items_of<tensor_count>(tensors, "tensors").data(),
                              items_of<option_count>(options, "options").data());
  return call;
}
// grads: dq, dk, dv, dbias, dsinks
void set_grads(Reader& read, tessera::Backward& call, nb::handle dout, nb::handle dlse, nb::handle grads) {
  const auto items = items_of<grad_count>(grads, "grads");
  call.dout = read(dout);
  call.dlse = read(dlse);
  call.dq = read(items[0]);
  call.dk = read(items[1]);
  call.dv = read(items[2]);
  call.dbias = read(items[3]);
  call.dsinks = read(items[4]);
}

template <class Call>
nb::tuple explanation_of(const Call& call) {
  const tessera::Result<tessera::Explanation> result = tessera::explain(call);
  check(result.status());
  return nb::make_tuple(result.value().to_json(), result.value().to_string());
}

// ---- Calls with torch's tensors, whose outputs are made here.

bool is_compact(const Tensor& tensor) {
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.stride[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}
bool has_whole_rows(const Tensor& tensor) {
  return tensor.stride[tensor.rank - 1] == 1 || tensor.shape[tensor.rank - 1] <= 1;
}
nb::object shape_tuple(std::initializer_list<std::int64_t> extents) {
  nb::object tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(extents.size())));
  Py_ssize_t i = 0;
  for (const std::int64_t extent : extents) PyTuple_SetItem(tuple.ptr(), i++, PyLong_FromLongLong(extent));
  return tuple;
}

void set_place(const Torch& torch, tessera::Options& options, DLDevice device) {
  options.stream = torch.stream(device);
  if (device.device_type == kDLCPU) options.num_threads = torch.threads();
}

struct Outputs {
  nb::object out, lse;
};
// None: not for rows or ranks such as these.
std::optional<Outputs> torch_forward(const Torch& torch, nb::handle q, nb::handle k, nb::handle v,
                                     Items tensors, Items options, bool with_lse) {
  Reader read;
  tessera::Forward call;
  call.q = read(q);
  call.k = read(k);
  call.v = read(v);
  const int rank = call.q.rank;
  const auto& shape = call.q.shape;
  if ((rank != 3 && rank != 4) || call.k.rank != rank || call.v.rank != rank || !has_whole_rows(call.q) ||
      !has_whole_rows(call.k) || !has_whole_rows(call.v)) {
    return std::nullopt;
  }
  Outputs outputs;
  const std::int64_t dim = call.v.shape[rank - 1];
  if (dim == shape[rank - 1] && is_compact(call.q)) {
    outputs.out = torch.empty_like(q);
  } else {
    outputs.out = torch.empty(q, rank == 4 ? shape_tuple({shape[0], shape[1], shape[2], dim})
                                           : shape_tuple({shape[0], shape[1], dim}));
  }
  call.o = read(outputs.out);
  outputs.lse = nb::none();
  if (with_lse) {
    outputs.lse = torch.empty_float32(
        q, rank == 4 ? shape_tuple({shape[0], shape[2], shape[1]}) : shape_tuple({shape[1], shape[0]}));
    call.lse = read(outputs.lse);
  }
  call.options = make_options(read, tensors, options);
  set_place(torch, call.options, call.q.device);
  run(read, call, [&](std::size_t bytes) { return torch.empty_bytes(q, bytes); });
  return outputs;
}

// attention() where that is no more than a forward of torch's tensors; NotImplemented elsewhere. Arguments:
// q, k, v, the tensors, the options, return_lse. A plain C function: a tiny call takes a few microseconds.
PyObject* simple_attention(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  try {
    if (count != 3 + tensor_count + option_count + 1)
      raise(PyExc_TypeError, "simple_attention: 23 arguments");
    const Items tensors = arguments + 3, options = tensors + tensor_count;
    const nb::handle q = arguments[0], k = arguments[1], v = arguments[2];
    const bool with_lse = truth(arguments[count - 1]);
    const Torch* torch = Torch::loaded();
    bool simple = torch != nullptr && torch->is_plain(q) && torch->is_plain(k) && torch->is_plain(v) &&
                  std::all_of(tensors, tensors + tensor_count,
                              [&](PyObject* x) { return x == Py_None || torch->is_plain(x); }) &&
                  torch->is_simple({q.ptr(), k.ptr(), v.ptr(), tensors[bias], tensors[sinks]});
    if (simple && options[seed] == Py_None) {
      simple = PyFloat_AsDouble(options[dropout_p]) == 0.0;
      PyErr_Clear();  // no number: said where options are read
    }
    if (simple) {
      if (std::optional<Outputs> done = torch_forward(*torch, q, k, v, tensors, options, with_lse)) {
        if (!with_lse) return done->out.release().ptr();
        return nb::make_tuple(done->out, done->lse).release().ptr();
      }
    }
    return Py_NewRef(Py_NotImplemented);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}
PyMethodDef simple_attention_method = {
    "simple_attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&simple_attention)),
    METH_FASTCALL, nullptr};

}  // namespace

NB_MODULE(_core, module) {
  module.def("version", [] { return tessera::version(); });
  module.def("last_kernel", [] { return tessera::last_kernel(); });
  module.def("kernels", [] {
    nb::list all;
    for (const tessera::KernelInfo& info : tessera::kernels())
      all.append(nb::make_tuple(info.name, info.description, info.device, info.available, info.why_not));
    return all;
  });
  // The dtype and the device of a tensor argument.
  module.def("kind", [](nb::handle x) {
    Reader read;
    const Tensor tensor = read(x);
    return nb::make_tuple(static_cast<int>(tensor.dtype.code), static_cast<int>(tensor.dtype.bits),
                          static_cast<int>(tensor.device.device_type), tensor.device.device_id);
  });
  module.attr("simple_attention") = owned(PyCFunction_New(&simple_attention_method, nullptr));
  // torch's tensors, with rows that are whole: the output, and lse or None.
  module.def(
      "torch_forward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle tensors, nb::handle options, bool with_lse) {
        const Torch* torch = Torch::loaded();
        if (torch == nullptr) raise(PyExc_RuntimeError, "torch is not imported");
        const auto done = torch_forward(*torch, q, k, v, items_of<tensor_count>(tensors, "tensors").data(),
                                        items_of<option_count>(options, "options").data(), with_lse);
        if (!done) raise(PyExc_ValueError, "q, k, v: expected 3 or 4 dimensions each, the last contiguous");
        return nb::make_tuple(done->out, done->lse);
      },
      "q"_a, "k"_a, "v"_a, "tensors"_a, "options"_a, "with_lse"_a);
  module.def(
      "torch_backward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle dout,
         nb::handle dlse, nb::handle grads, nb::handle tensors, nb::handle options) {
        const Torch* torch = Torch::loaded();
        if (torch == nullptr) raise(PyExc_RuntimeError, "torch is not imported");
        Reader read;
        auto call = make_call<tessera::Backward>(read, q, k, v, o, lse, tensors, options);
        set_grads(read, call, dout, dlse, grads);
        set_place(*torch, call.options, call.q.device);
        run(read, call, [&](std::size_t bytes) { return torch->empty_bytes(q, bytes); });
      },
      "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "dout"_a, "dlse"_a.none(), "grads"_a, "tensors"_a, "options"_a);
  // Any tensors, on a stream by its address.
  module.def(
      "forward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle tensors,
         nb::handle options, std::uintptr_t stream) {
        Reader read;
        auto call = make_call<tessera::Forward>(read, q, k, v, o, lse, tensors, options);
        call.options.stream = reinterpret_cast<void*>(stream);
        run(read, call, [](std::size_t bytes) -> nb::object {
          raise(PyExc_RuntimeError,
                "forward: " + std::to_string(bytes) + " bytes of workspace, expected none");
        });
      },
      "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a.none(), "tensors"_a, "options"_a, "stream"_a);
#if defined(TESSERA_CUDA)
  // Until all that was asked of a GPU's default stream is done.
  module.def("wait", [](int device) {
    tessera::Status status;
    {
      const nb::gil_scoped_release released;
      const tessera::Result<tessera::cuda::Context> context = tessera::cuda::Context::enter(device);
      status = context.ok() ? tessera::cuda::synchronize(nullptr) : context.status();
    }
    check(status);
  });
#endif
  module.def(
      "explain_forward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle tensors,
         nb::handle options) {
        Reader read;
        return explanation_of(make_call<tessera::Forward>(read, q, k, v, o, lse, tensors, options));
      },
      "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a.none(), "tensors"_a, "options"_a);
  module.def(
      "explain_backward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle dout,
         nb::handle dlse, nb::handle grads, nb::handle tensors, nb::handle options) {
        Reader read;
        auto call = make_call<tessera::Backward>(read, q, k, v, o, lse, tensors, options);
        set_grads(read, call, dout, dlse, grads);
        return explanation_of(call);
      },
      "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "dout"_a, "dlse"_a.none(), "grads"_a, "tensors"_a, "options"_a);
}
