// A call from Python: its options, its workspace, its outputs.
//
// Options are two tuples, `tensors` and `options`, in the order of _call.py.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "core/problem.h"
#include "dispatch/dispatch.h"
#include "reader.h"

namespace tessera::python {

// A tuple's items, or a call's arguments.
using Items = PyObject* const*;
constexpr Py_ssize_t tensor_count = 7, option_count = 12;

template <Py_ssize_t count>
std::array<PyObject*, count> items_of(nb::handle tuple, const char* name) {
  if (PyTuple_Check(tuple.ptr()) == 0 || PyTuple_Size(tuple.ptr()) != count)
    raise(PyExc_TypeError, std::string(name) + ": expected a tuple of " + std::to_string(count));
  std::array<PyObject*, count> items;
  for (Py_ssize_t i = 0; i < count; ++i) items[static_cast<std::size_t>(i)] = PyTuple_GetItem(tuple.ptr(), i);
  return items;
}

// Where an option stands in its tuple.
namespace at {
enum InTensors { alibi_slopes, bias, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k };
enum InOptions {
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
}  // namespace at

Options make_options(Reader& read, Items tensors, Items items);

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
  const Result<Problem> problem = validate(call);
  check(problem.status());
  const Result<Choice> choice = choose(problem.value(), forced_kernel(call.options));
  check(choice.status());
  Workspace workspace{nullptr, choice.value().plan.workspace};
  std::optional<HostMemory> host;
  nb::object device;
  if (workspace.bytes != 0 && problem.value().on_host()) {
    workspace.data = host.emplace(workspace.bytes).data;
  } else if (workspace.bytes != 0) {
    device = allocate(workspace.bytes);
    workspace.data = read(device).data;
  }
  Status status;
  {
    const nb::gil_scoped_release released;
    status = tessera::run(problem.value(), choice.value(), workspace);
  }
  check(status);
}

template <class Call>
nb::tuple explanation_of(const Call& call) {
  const Result<Explanation> result = tessera::explain(call);
  check(result.status());
  return nb::make_tuple(result.value().to_json(), result.value().to_string());
}

// ---- Calls with torch's tensors, whose outputs are made here.

void set_place(const Torch& torch, Options& options, DLDevice device);

// Whether the last dimension is contiguous, as the kernels want it.
bool has_whole_rows(const Tensor& tensor);

// For queries (batch, seqlen, heads, dim) or (total, heads, dim), and values of a dim.
struct Outputs {
  nb::object out, lse;  // lse: or None
};
nb::object make_lse(const Torch& torch, nb::handle q, const Tensor& rows);
Outputs make_outputs(const Torch& torch, nb::handle q, const Tensor& rows, std::int64_t dim, bool with_lse);

// The body of a C function: what it throws becomes Python's error.
template <class Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// decode and merge_states (bind_decode.cpp).
void bind_decode(nb::module_& module);

}  // namespace tessera::python
