#include "reader.h"

#include <algorithm>
#include <cstdlib>

#include "core/layout.h"

namespace tessera::python {

using namespace nb::literals;

void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw nb::python_error();
}
void check(const Status& status) {
  if (status.ok()) return;
  // The output that a caller gives is `out` in Python.
  const bool of_out = status.message().starts_with("o:") || status.message().starts_with("o.");
  raise(status.code() == Code::invalid_argument ? PyExc_ValueError
        : status.code() == Code::unsupported    ? PyExc_NotImplementedError
                                                : PyExc_RuntimeError,
        of_out ? "out" + status.message().substr(1) : status.message());
}
void raise_wrong(const char* name, nb::handle value, const char* expected) {
  PyObject* type = PyErr_ExceptionMatches(PyExc_TypeError) != 0 ? PyExc_TypeError : PyExc_ValueError;
  PyErr_Clear();
  raise(type, std::string(name) + ": " + nb::cast<std::string>(nb::repr(value)) + ", expected " + expected);
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
nb::object shape_tuple(std::initializer_list<std::int64_t> extents) {
  nb::object tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(extents.size())));
  Py_ssize_t i = 0;
  for (const std::int64_t extent : extents) PyTuple_SetItem(tuple.ptr(), i++, PyLong_FromLongLong(extent));
  return tuple;
}

namespace {

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
      forward_level{"_current_level"}, is_inference{"is_inference"}, dlpack{"__dlpack__"};
};
const Names& names() {
  static const Names all;
  return all;
}

}  // namespace

// ---- PyTorch.

// The table of functions in torch.Tensor.__dlpack_c_exchange_api__ (torch 2.10 and later): what a tensor is,
// without a capsule and without a dozen attributes of Python.
struct Exchange {
  std::uint32_t major, minor;
  const Exchange* older;
  void *allocate, *from_object, *to_object;  // not used: their tensors are strangers to torch's allocator
  int (*describe)(void* object, DLTensor* out);
  int (*current_stream)(DLDeviceType device, std::int32_t index, void** out);
};

const Torch* Torch::loaded() {
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
const Torch& Torch::required() {
  const Torch* torch = loaded();
  if (torch == nullptr) raise(PyExc_RuntimeError, "torch is not imported");
  return *torch;
}

bool Torch::is_plain(nb::handle object) const {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  return type == tensor_.ptr() || type == parameter_.ptr();
}
bool Torch::is_tensor(nb::handle object) const {
  if (is_plain(object)) return true;
  const int found = PyObject_IsInstance(object.ptr(), tensor_.ptr());
  if (found < 0) throw nb::python_error();
  return found == 1;
}
bool Torch::is_simple(std::initializer_list<PyObject*> differentiable) const {
  if (any_autocast_.is_none() || truth(any_autocast_())) return false;
  if (!watchers_.is_none() && integer(watchers_()) != 0) return false;
  if (!tracing_.is_none() && !tracing_().is_none()) return false;
  if (integer(names().forward_level.of(forward_ad_)) >= 0) return false;
  if (!truth(is_grad_enabled_())) return true;
  return std::none_of(differentiable.begin(), differentiable.end(), [](PyObject* object) {
    return object != Py_None && truth(names().requires_grad.of(object));
  });
}

Tensor Torch::read(nb::handle object) const {
  if (exchange_ != nullptr && is_plain(object)) {
    DLTensor tensor;
    if (exchange_->describe(object.ptr(), &tensor) == 0) return Tensor(tensor);
    PyErr_Clear();  // the attributes tell the same, in words of ours
  }
  return read_attributes(object);
}
void* Torch::stream(DLDevice device) const {
  if (device.device_type != kDLCUDA) return nullptr;
  if (exchange_ != nullptr) {
    void* stream = nullptr;
    if (exchange_->current_stream(device.device_type, device.device_id, &stream) != 0)
      throw nb::python_error();
    return stream;
  }
  return reinterpret_cast<void*>(integer(raw_stream_(device.device_id)));
}
int Torch::threads() const {
  return std::getenv("TESSERA_NUM_THREADS") != nullptr ? 0 : static_cast<int>(integer(get_num_threads_()));
}

nb::object Torch::empty(nb::handle like, nb::handle shape) const {
  return empty_(shape, "dtype"_a = names().dtype.of(like), "device"_a = names().device.of(like));
}
nb::object Torch::empty_float32(nb::handle like, nb::handle shape) const {
  return empty_(shape, "dtype"_a = float32_, "device"_a = names().device.of(like));
}
nb::object Torch::empty_bytes(nb::handle like, std::size_t size) const {
  return empty_(size, "dtype"_a = uint8_, "device"_a = names().device.of(like));
}

void Torch::mark_written(nb::handle object) const {
  if (!truth(names().is_inference.call(object))) increment_version_(object);  // those count no versions
}

Torch::Torch(const nb::object& torch)
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
      increment_version_(torch.attr("autograd").attr("graph").attr("increment_version")),
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
  add("float8_e4m3fn", float8_e4m3fn_code, 8);

  const nb::object capsule = nb::getattr(tensor_, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return;
  const auto* found =
      static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (found != nullptr && found->major > 1) found = found->older;
  if (found != nullptr && found->major == 1 && found->describe != nullptr && found->current_stream != nullptr)
    exchange_ = found;
}

// ---- Tensors.

namespace {

void set_extents(Tensor& tensor, nb::handle shape, nb::handle stride) {
  const Py_ssize_t rank = PyTuple_Size(shape.ptr());
  if (rank < 0) throw nb::python_error();
  tensor.rank = rank == 0 ? -1 : static_cast<int>(rank);  // a scalar is given, and wrong everywhere
  for (Py_ssize_t i = 0; i < rank && i < Tensor::max_rank; ++i) {
    tensor.shape[i] = integer(PyTuple_GetItem(shape.ptr(), i));
    tensor.stride[i] = integer(PyTuple_GetItem(stride.ptr(), i));
  }
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

}  // namespace

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

Tensor Reader::operator()(nb::handle object) {
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
  const auto* managed = static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw nb::python_error();
  kept_.push_back(std::move(capsule));
  return Tensor(managed->dl_tensor);
}

}  // namespace tessera::python
