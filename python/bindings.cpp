// tessera._core: the C++ API for Python. Private: python/tessera is what users see.
//
// A tensor argument is one of
//   None: not given
//   a torch.Tensor, or what has its methods: read without a DLPack capsule, which would cost more than the
//   call a tuple (address, shape, strides in elements, dtype code, dtype bits, device type, device index) a
//   producer of DLPack capsules
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using tessera::Tensor;

[[noreturn]] void raise_status(const tessera::Status& status) {
  PyObject* type = status.code() == tessera::Code::invalid_argument ? PyExc_ValueError
                   : status.code() == tessera::Code::unsupported    ? PyExc_NotImplementedError
                                                                    : PyExc_RuntimeError;
  PyErr_SetString(type, status.message().c_str());
  throw nb::python_error();
}
void check(const tessera::Status& status) {
  if (!status.ok()) raise_status(status);
}

// ---- Names that are looked up at every call.

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }
struct Names {
  PyObject *data_ptr = interned("data_ptr"), *shape = interned("shape"), *stride = interned("stride"),
           *dtype = interned("dtype"), *is_cuda = interned("is_cuda"), *is_cpu = interned("is_cpu"),
           *get_device = interned("get_device"), *device = interned("device"),
           *dlpack = interned("__dlpack__");
};
const Names& names() {
  static const Names all;  // for the life of the process
  return all;
}

nb::object get(nb::handle object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!value.is_valid()) throw nb::python_error();
  return value;
}
nb::object call_method(nb::handle object, PyObject* name) {
  PyObject* arguments[] = {object.ptr()};
  nb::object value =
      nb::steal(PyObject_VectorcallMethod(name, arguments, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  if (!value.is_valid()) throw nb::python_error();
  return value;
}
std::int64_t integer(nb::handle object) {
  const long long value = PyLong_AsLongLong(object.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

// ---- Tensors.

// torch's dtypes by identity; made once, when the first tensor comes.
struct TorchTypes {
  std::vector<std::pair<PyObject*, DLDataType>> known;

  TorchTypes() {
    const nb::module_ torch = nb::module_::import_("torch");
    const auto add = [&](const char* name, int code, int bits) {
      nb::object type = nb::getattr(torch, name, nb::none());
      if (!type.is_none())
        known.emplace_back(type.release().ptr(),
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
  }
};
DLDataType torch_type(nb::handle dtype) {
  static const TorchTypes types;
  for (const auto& [type, code] : types.known) {
    if (type == dtype.ptr()) return code;
  }
  return {kDLOpaqueHandle, 0, 1};
}

void set_extents(Tensor& tensor, nb::handle shape, nb::handle stride) {
  const Py_ssize_t rank = PyTuple_Size(shape.ptr());
  if (rank < 0) throw nb::python_error();
  tensor.rank = static_cast<int>(rank);
  for (Py_ssize_t i = 0; i < rank && i < Tensor::max_rank; ++i) {
    tensor.shape[i] = integer(PyTuple_GetItem(shape.ptr(), i));
    tensor.stride[i] = integer(PyTuple_GetItem(stride.ptr(), i));
  }
}

Tensor from_torch(nb::handle object) {
  const Names& n = names();
  Tensor tensor;
  const nb::object shape = get(object, n.shape), stride = call_method(object, n.stride);
  set_extents(tensor, shape, stride);
  if (tensor.rank == 0) throw nb::value_error("a tensor of rank 0 is no argument of attention");
  tensor.dtype = torch_type(get(object, n.dtype));
  tensor.data = reinterpret_cast<void*>(integer(call_method(object, n.data_ptr)));
  if (get(object, n.is_cuda).ptr() == Py_True) {
    tensor.device = {kDLCUDA, static_cast<int>(integer(call_method(object, n.get_device)))};
  } else if (get(object, n.is_cpu).ptr() != Py_True) {
    const std::string device = nb::cast<std::string>(nb::str(get(object, n.device)));
    throw nb::value_error(("a tensor lies on " + device + ", expected cpu or cuda").c_str());
  }
  return tensor;
}

Tensor from_tuple(nb::handle object) {
  const nb::tuple fields = nb::borrow<nb::tuple>(object);
  if (nb::len(fields) != 7) throw nb::type_error("a tensor as a tuple has 7 fields");
  Tensor tensor;
  tensor.data = reinterpret_cast<void*>(integer(fields[0]));
  set_extents(tensor, fields[1], fields[2]);
  tensor.dtype = {static_cast<std::uint8_t>(integer(fields[3])),
                  static_cast<std::uint8_t>(integer(fields[4])), 1};
  tensor.device = {static_cast<DLDeviceType>(integer(fields[5])), static_cast<int>(integer(fields[6]))};
  return tensor;
}

// The arguments of one call: keeps what they were read from alive.
class Arguments {
 public:
  Tensor tensor(nb::handle object) {
    if (object.is_none()) return {};
    if (PyTuple_Check(object.ptr())) return from_tuple(object);
    if (PyObject_HasAttr(object.ptr(), names().data_ptr) != 0) return from_torch(object);
    if (PyObject_HasAttr(object.ptr(), names().dlpack) == 0)
      throw nb::type_error(
          (nb::cast<std::string>(nb::str(object.type())) + " is no tensor: it has no __dlpack__").c_str());
    nb::object capsule = call_method(object, names().dlpack);
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

tessera::Options make_options(Arguments& arguments, nb::handle tensors, nb::handle numbers) {
  // tensors: alibi_slopes, bias, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
  // numbers: softmax_scale, causal, window_left, window_right, top_left, softcap, dropout_p, seed, offset,
  //          max_seqlen_q, max_seqlen_k, deterministic, kernel, num_threads, stream
  tessera::Options options;
  const auto tensor = [&](Py_ssize_t i) { return arguments.tensor(PyTuple_GetItem(tensors.ptr(), i)); };
  const auto number = [&](Py_ssize_t i) { return nb::handle(PyTuple_GetItem(numbers.ptr(), i)); };
  const auto optional_integer = [&](Py_ssize_t i) -> std::optional<std::int64_t> {
    if (number(i).is_none()) return std::nullopt;
    return integer(number(i));
  };
  const auto real = [&](Py_ssize_t i) {
    const double value = PyFloat_AsDouble(number(i).ptr());
    if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return value;
  };
  const auto unsigned_integer = [&](Py_ssize_t i) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(number(i).ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return value;
  };
  if (PyTuple_Size(tensors.ptr()) != 7 || PyTuple_Size(numbers.ptr()) != 15)
    throw nb::type_error("options are two tuples, of 7 and of 15");
  options.alibi_slopes = tensor(0);
  options.bias = tensor(1);
  options.sinks = tensor(2);
  options.cu_seqlens_q = tensor(3);
  options.cu_seqlens_k = tensor(4);
  options.seqused_q = tensor(5);
  options.seqused_k = tensor(6);
  if (!number(0).is_none()) options.softmax_scale = real(0);
  options.causal = PyObject_IsTrue(number(1).ptr()) == 1;
  options.window_left = optional_integer(2);
  options.window_right = optional_integer(3);
  if (PyObject_IsTrue(number(4).ptr()) == 1) options.alignment = tessera::Alignment::top_left;
  options.softcap = real(5);
  options.dropout_p = real(6);
  options.seed = unsigned_integer(7);
  options.offset = unsigned_integer(8);
  options.max_seqlen_q = optional_integer(9);
  options.max_seqlen_k = optional_integer(10);
  options.deterministic = PyObject_IsTrue(number(11).ptr()) == 1;
  if (!number(12).is_none()) options.kernel = nb::cast<std::string>(number(12));
  options.num_threads = static_cast<int>(integer(number(13)));
  options.stream = reinterpret_cast<void*>(unsigned_integer(14));
  return options;
}

// Memory for a call's workspace: on the CPU from the heap, else from allocate(bytes), a tensor.
template <class Call>
class OwnWorkspace {
 public:
  OwnWorkspace(Arguments& arguments, Call& call, nb::handle allocate) {
    const tessera::Result<std::size_t> bytes = tessera::workspace_size(call);
    check(bytes.status());
    if (bytes.value() == 0) return;
    if (call.q.device.device_type == kDLCPU) {
      heap_ = std::make_unique_for_overwrite<std::byte[]>(bytes.value());
      call.workspace = {heap_.get(), bytes.value()};
    } else {
      device_ = allocate(bytes.value());
      call.workspace = {arguments.tensor(device_).data, bytes.value()};
    }
  }

 private:
  std::unique_ptr<std::byte[]> heap_;
  nb::object device_;
};

template <class Call>
void run(Arguments& arguments, Call& call, nb::handle allocate, tessera::Status (*function)(const Call&)) {
  const OwnWorkspace<Call> workspace(arguments, call, allocate);
  tessera::Status status;
  {
    const nb::gil_scoped_release released;
    status = function(call);
  }
  check(status);
}

template <class Call>
Call make_call(Arguments& arguments, nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse,
               nb::handle tensors, nb::handle numbers) {
  Call call;
  call.q = arguments.tensor(q);
  call.k = arguments.tensor(k);
  call.v = arguments.tensor(v);
  call.o = arguments.tensor(o);
  call.lse = arguments.tensor(lse);
  call.options = make_options(arguments, tensors, numbers);
  return call;
}
// grads: dq, dk, dv, dbias, dsinks
void set_grads(Arguments& arguments, tessera::Backward& call, nb::handle dout, nb::handle dlse,
               nb::handle grads) {
  if (PyTuple_Size(grads.ptr()) != 5) throw nb::type_error("grads is a tuple of 5");
  const auto grad = [&](Py_ssize_t i) { return arguments.tensor(PyTuple_GetItem(grads.ptr(), i)); };
  call.dout = arguments.tensor(dout);
  call.dlse = arguments.tensor(dlse);
  call.dq = grad(0);
  call.dk = grad(1);
  call.dv = grad(2);
  call.dbias = grad(3);
  call.dsinks = grad(4);
}

template <class Call>
nb::tuple explanation_of(const Call& call) {
  const tessera::Result<tessera::Explanation> result = tessera::explain(call);
  check(result.status());
  return nb::make_tuple(result.value().to_json(), result.value().to_string());
}

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
    Arguments arguments;
    const Tensor tensor = arguments.tensor(x);
    return nb::make_tuple(static_cast<int>(tensor.dtype.code), static_cast<int>(tensor.dtype.bits),
                          static_cast<int>(tensor.device.device_type), tensor.device.device_id);
  });
  module.def(
      "forward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle tensors,
         nb::handle numbers, nb::handle allocate) {
        Arguments arguments;
        auto call = make_call<tessera::Forward>(arguments, q, k, v, o, lse, tensors, numbers);
        run(arguments, call, allocate, &tessera::forward);
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none(), "lse"_a.none(), "tensors"_a.none(),
      "numbers"_a.none(), "allocate"_a.none());
  module.def(
      "backward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle dout,
         nb::handle dlse, nb::handle grads, nb::handle tensors, nb::handle numbers, nb::handle allocate) {
        Arguments arguments;
        auto call = make_call<tessera::Backward>(arguments, q, k, v, o, lse, tensors, numbers);
        set_grads(arguments, call, dout, dlse, grads);
        run(arguments, call, allocate, &tessera::backward);
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none(), "lse"_a.none(), "dout"_a.none(),
      "dlse"_a.none(), "grads"_a.none(), "tensors"_a.none(), "numbers"_a.none(), "allocate"_a.none());
  module.def(
      "explain_forward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle tensors,
         nb::handle numbers) {
        Arguments arguments;
        return explanation_of(make_call<tessera::Forward>(arguments, q, k, v, o, lse, tensors, numbers));
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none(), "lse"_a.none(), "tensors"_a.none(),
      "numbers"_a.none());
  module.def(
      "explain_backward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle dout,
         nb::handle dlse, nb::handle grads, nb::handle tensors, nb::handle numbers) {
        Arguments arguments;
        auto call = make_call<tessera::Backward>(arguments, q, k, v, o, lse, tensors, numbers);
        set_grads(arguments, call, dout, dlse, grads);
        return explanation_of(call);
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "o"_a.none(), "lse"_a.none(), "dout"_a.none(),
      "dlse"_a.none(), "grads"_a.none(), "tensors"_a.none(), "numbers"_a.none());
}
