// tessera._core: the C++ API for Python. Private: python/tessera is what users see.
// Decode and merge_states: bind_decode.cpp.
#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "call.h"
#include "reader.h"
#include "tessera/tessera.hpp"
#if defined(TESSERA_CUDA)
#include "cuda/driver/driver.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace tessera::python {
namespace {

constexpr Py_ssize_t grad_count = 5;

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
void set_grads(Reader& read, Backward& call, nb::handle dout, nb::handle dlse, nb::handle grads) {
  const auto items = items_of<grad_count>(grads, "grads");
  call.dout = read(dout);
  call.dlse = read(dlse);
  call.dq = read(items[0]);
  call.dk = read(items[1]);
  call.dv = read(items[2]);
  call.dbias = read(items[3]);
  call.dsinks = read(items[4]);
}

// None: not for rows or ranks such as these.
std::optional<Outputs> torch_forward(const Torch& torch, nb::handle q, nb::handle k, nb::handle v,
                                     Items tensors, Items options, bool with_lse) {
  Reader read;
  Forward call;
  call.q = read(q);
  call.k = read(k);
  call.v = read(v);
  const int rank = call.q.rank;
  if ((rank != 3 && rank != 4) || call.k.rank != rank || call.v.rank != rank || !has_whole_rows(call.q) ||
      !has_whole_rows(call.k) || !has_whole_rows(call.v)) {
    return std::nullopt;
  }
  Outputs outputs = make_outputs(torch, q, call.q, call.v.shape[rank - 1], with_lse);
  call.o = read(outputs.out);
  call.lse = read(outputs.lse);
  call.options = make_options(read, tensors, options);
  set_place(torch, call.options, call.q.device);
  run(read, call, [&](std::size_t bytes) { return torch.empty_bytes(q, bytes); });
  return outputs;
}

// attention() where that is no more than a forward of torch's tensors; NotImplemented elsewhere. Arguments:
// q, k, v, the tensors, the options, return_lse. A plain C function: a tiny call takes a few microseconds.
PyObject* simple_attention(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 3 + tensor_count + option_count + 1)
      raise(PyExc_TypeError, "simple_attention: 23 arguments");
    const Items tensors = arguments + 3, options = tensors + tensor_count;
    const nb::handle q = arguments[0], k = arguments[1], v = arguments[2];
    const bool with_lse = truth(arguments[count - 1]);
    const Torch* torch = Torch::loaded();
    bool simple = torch != nullptr && torch->is_plain(q) && torch->is_plain(k) && torch->is_plain(v) &&
                  std::all_of(tensors, tensors + tensor_count,
                              [&](PyObject* x) { return x == Py_None || torch->is_plain(x); }) &&
                  torch->is_simple({q.ptr(), k.ptr(), v.ptr(), tensors[at::bias], tensors[at::sinks]});
    if (simple && options[at::seed] == Py_None) {
      simple = PyFloat_AsDouble(options[at::dropout_p]) == 0.0;
      PyErr_Clear();  // no number: said where options are read
    }
    if (simple) {
      if (std::optional<Outputs> done = torch_forward(*torch, q, k, v, tensors, options, with_lse)) {
        if (!with_lse) return done->out.release().ptr();
        return nb::make_tuple(done->out, done->lse).release().ptr();
      }
    }
    return Py_NewRef(Py_NotImplemented);
  });
}
PyMethodDef simple_attention_method = {
    "simple_attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&simple_attention)),
    METH_FASTCALL, nullptr};

}  // namespace
}  // namespace tessera::python

NB_MODULE(_core, module) {
  using namespace tessera::python;
  using tessera::Backward, tessera::Forward, tessera::Tensor;
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
        const auto done =
            torch_forward(Torch::required(), q, k, v, items_of<tensor_count>(tensors, "tensors").data(),
                          items_of<option_count>(options, "options").data(), with_lse);
        if (!done) raise(PyExc_ValueError, "q, k, v: expected 3 or 4 dimensions each, the last contiguous");
        return nb::make_tuple(done->out, done->lse);
      },
      "q"_a, "k"_a, "v"_a, "tensors"_a, "options"_a, "with_lse"_a);
  module.def(
      "torch_backward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle dout,
         nb::handle dlse, nb::handle grads, nb::handle tensors, nb::handle options) {
        const Torch& torch = Torch::required();
        Reader read;
        auto call = make_call<Backward>(read, q, k, v, o, lse, tensors, options);
        set_grads(read, call, dout, dlse, grads);
        set_place(torch, call.options, call.q.device);
        run(read, call, [&](std::size_t bytes) { return torch.empty_bytes(q, bytes); });
      },
      "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "dout"_a, "dlse"_a.none(), "grads"_a, "tensors"_a, "options"_a);
  // Any tensors, on a stream by its address.
  module.def(
      "forward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle tensors,
         nb::handle options, std::uintptr_t stream) {
        Reader read;
        auto call = make_call<Forward>(read, q, k, v, o, lse, tensors, options);
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
        return explanation_of(make_call<Forward>(read, q, k, v, o, lse, tensors, options));
      },
      "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a.none(), "tensors"_a, "options"_a);
  module.def(
      "explain_backward",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle o, nb::handle lse, nb::handle dout,
         nb::handle dlse, nb::handle grads, nb::handle tensors, nb::handle options) {
        Reader read;
        auto call = make_call<Backward>(read, q, k, v, o, lse, tensors, options);
        set_grads(read, call, dout, dlse, grads);
        return explanation_of(call);
      },
      "q"_a, "k"_a, "v"_a, "o"_a, "lse"_a, "dout"_a, "dlse"_a.none(), "grads"_a, "tensors"_a, "options"_a);
  bind_decode(module);
}
