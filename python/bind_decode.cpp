// decode and merge_states for Python. What decode has besides attention's options is a tuple, `cache`, in the
// order of _call.py, and two numbers.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "call.h"
#include "reader.h"
#include "tessera/tessera.hpp"

namespace tessera::python {

using namespace nb::literals;

namespace {

constexpr Py_ssize_t cache_count = 10;
namespace at {
using namespace tessera::python::at;
enum InCache {
  cache_seqlens,
  page_table,
  cache_batch_idx,
  leftpad_k,
  k_new,
  v_new,
  rotary_cos,
  rotary_sin,
  k_scale,
  v_scale
};
}  // namespace at

// The arguments of every decode here.
struct Arguments {
  nb::handle q, k_cache, v_cache;
  Items cache, tensors, options;
  nb::handle rotary_interleaved, num_splits;
};

// All but the outputs.
Decode make_decode(Reader& read, const Arguments& x) {
  Decode call;
  call.q = read(x.q);
  call.k_cache = read(x.k_cache);
  call.v_cache = read(x.v_cache);
  call.cache_seqlens = read(x.cache[at::cache_seqlens]);
  call.page_table = read(x.cache[at::page_table]);
  call.cache_batch_idx = read(x.cache[at::cache_batch_idx]);
  call.leftpad_k = read(x.cache[at::leftpad_k]);
  call.k_new = read(x.cache[at::k_new]);
  call.v_new = read(x.cache[at::v_new]);
  call.rotary_cos = read(x.cache[at::rotary_cos]);
  call.rotary_sin = read(x.cache[at::rotary_sin]);
  call.k_scale = read(x.cache[at::k_scale]);
  call.v_scale = read(x.cache[at::v_scale]);
  call.rotary_interleaved = truth(x.rotary_interleaved);
  call.num_splits = PyLong_AsLongLong(x.num_splits.ptr());
  if (call.num_splits == -1 && PyErr_Occurred() != nullptr)
    raise_wrong("num_splits", x.num_splits, "an integer");
  call.options = make_options(read, x.tensors, x.options);
  return call;
}

// Torch's tensors. Into `out` unless that is None. Nothing: rows are not whole, or q's or the cache's rank is
// wrong.
std::optional<Outputs> torch_decode(const Torch& torch, const Arguments& x, nb::handle out, bool with_lse) {
  Reader read;
  Decode call = make_decode(read, x);
  if ((call.q.rank != 3 && call.q.rank != 4) || call.v_cache.rank != 4 || !has_whole_rows(call.q) ||
      !has_whole_rows(call.k_new) || !has_whole_rows(call.v_new)) {
    return std::nullopt;
  }
  Outputs outputs;
  if (out.is_none()) {
    outputs = make_outputs(torch, x.q, call.q, call.v_cache.shape[3], with_lse);
  } else {
    outputs.out = nb::borrow(out);
    outputs.lse = with_lse ? make_lse(torch, x.q, call.q) : nb::none();
  }
  call.o = read(outputs.out);
  call.lse = read(outputs.lse);
  set_place(torch, call.options, call.q.device);
  run(read, call, [&](std::size_t bytes) { return torch.empty_bytes(x.q, bytes); });
  if (!out.is_none()) torch.mark_written(out);
  if (call.k_new.given()) {
    torch.mark_written(x.k_cache);
    torch.mark_written(x.v_cache);
  }
  return outputs;
}

// decode() where that is no more than its arithmetic; NotImplemented elsewhere. Arguments: q, k_cache,
// v_cache, out, the cache's, the tensors, the options, rotary_interleaved, num_splits, return_lse.
PyObject* simple_decode(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    constexpr Py_ssize_t before = 4, tensors = before + cache_count, options = tensors + tensor_count,
                         after = options + option_count;
    if (count != after + 3)
      raise(PyExc_TypeError, "simple_decode: " + std::to_string(after + 3) + " arguments");
    const Arguments x{arguments[0],        arguments[1],        arguments[2],     arguments + before,
                      arguments + tensors, arguments + options, arguments[after], arguments[after + 1]};
    const bool with_lse = truth(arguments[after + 2]);
    const nb::handle out = arguments[3];
    const Torch* torch = Torch::loaded();
    const bool simple =
        torch != nullptr && torch->is_plain(x.q) && torch->is_plain(x.k_cache) &&
        torch->is_plain(x.v_cache) &&
        std::all_of(arguments + 3, arguments + options,
                    [&](PyObject* object) { return object == Py_None || torch->is_plain(object); }) &&
        torch->is_simple({x.q.ptr(), x.k_cache.ptr(), x.v_cache.ptr(), out.ptr(), x.cache[at::k_new],
                          x.cache[at::v_new], x.cache[at::rotary_cos], x.cache[at::rotary_sin],
                          x.cache[at::k_scale], x.cache[at::v_scale], x.tensors[at::alibi_slopes],
                          x.tensors[at::sinks]});
    if (simple) {
      if (std::optional<Outputs> done = torch_decode(*torch, x, out, with_lse)) {
        if (!with_lse) return done->out.release().ptr();
        return nb::make_tuple(done->out, done->lse).release().ptr();
      }
    }
    return Py_NewRef(Py_NotImplemented);
  });
}
PyMethodDef simple_decode_method = {"simple_decode",
                                    reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&simple_decode)),
                                    METH_FASTCALL, nullptr};

MergeStates make_merge(Reader& read, nb::handle o_a, nb::handle lse_a, nb::handle o_b, nb::handle lse_b,
                       nb::handle o, nb::handle lse, nb::handle kernel) {
  MergeStates call;
  call.o_a = read(o_a);
  call.lse_a = read(lse_a);
  call.o_b = read(o_b);
  call.lse_b = read(lse_b);
  call.o = read(o);
  call.lse = read(lse);
  if (!kernel.is_none() && !nb::try_cast(kernel, call.options.kernel))
    raise_wrong("kernel", kernel, "None or a string");
  return call;
}
[[noreturn]] nb::object no_workspace(std::size_t bytes) {
  raise(PyExc_RuntimeError, std::to_string(bytes) + " bytes of workspace, expected none");
}

// The tuples of a call, for as long as it takes.
struct Tuples {
  Tuples(nb::handle cache, nb::handle tensors, nb::handle options)
      : cache(items_of<cache_count>(cache, "cache")),
        tensors(items_of<tensor_count>(tensors, "tensors")),
        options(items_of<option_count>(options, "options")) {}
  std::array<PyObject*, cache_count> cache;
  std::array<PyObject*, tensor_count> tensors;
  std::array<PyObject*, option_count> options;

  [[nodiscard]] Arguments with(nb::handle q, nb::handle k_cache, nb::handle v_cache,
                               nb::handle rotary_interleaved, nb::handle num_splits) const {
    return {q,         k_cache, v_cache, cache.data(), tensors.data(), options.data(), rotary_interleaved,
            num_splits};
  }
};

}  // namespace

void bind_decode(nb::module_& module) {
  module.attr("simple_decode") = owned(PyCFunction_New(&simple_decode_method, nullptr));
  // torch's tensors, with rows that are whole: the output (`out`, if it is given), and lse or None.
  module.def(
      "torch_decode",
      [](nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle out, nb::handle cache,
         nb::handle tensors, nb::handle options, nb::handle interleaved, nb::handle num_splits,
         bool with_lse) {
        const Tuples tuples(cache, tensors, options);
        const auto done = torch_decode(
            Torch::required(), tuples.with(q, k_cache, v_cache, interleaved, num_splits), out, with_lse);
        if (!done) raise(PyExc_ValueError, "q, k_new, v_new: expected rows that are contiguous");
        return nb::make_tuple(done->out, done->lse);
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "out"_a.none(), "cache"_a, "tensors"_a, "options"_a,
      "rotary_interleaved"_a, "num_splits"_a, "with_lse"_a);
  // Any tensors, on a stream by its address. allocate(bytes) makes a workspace on a GPU.
  module.def(
      "decode",
      [](nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle out, nb::handle lse,
         nb::handle cache, nb::handle tensors, nb::handle options, nb::handle interleaved,
         nb::handle num_splits, std::uintptr_t stream, nb::handle allocate) {
        const Tuples tuples(cache, tensors, options);
        Reader read;
        Decode call = make_decode(read, tuples.with(q, k_cache, v_cache, interleaved, num_splits));
        call.o = read(out);
        call.lse = read(lse);
        call.options.stream = reinterpret_cast<void*>(stream);
        run(read, call, [&](std::size_t bytes) -> nb::object { return allocate(bytes); });
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "out"_a, "lse"_a.none(), "cache"_a, "tensors"_a, "options"_a,
      "rotary_interleaved"_a, "num_splits"_a, "stream"_a, "allocate"_a.none());
  module.def(
      "explain_decode",
      [](nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle out, nb::handle lse,
         nb::handle cache, nb::handle tensors, nb::handle options, nb::handle interleaved,
         nb::handle num_splits) {
        const Tuples tuples(cache, tensors, options);
        Reader read;
        Decode call = make_decode(read, tuples.with(q, k_cache, v_cache, interleaved, num_splits));
        call.o = read(out);
        call.lse = read(lse);
        return explanation_of(call);
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "out"_a, "lse"_a.none(), "cache"_a, "tensors"_a, "options"_a,
      "rotary_interleaved"_a, "num_splits"_a);

  // torch's tensors.
  module.def(
      "torch_merge_states",
      [](nb::handle o_a, nb::handle lse_a, nb::handle o_b, nb::handle lse_b, nb::handle o, nb::handle lse,
         nb::handle kernel) {
        Reader read;
        MergeStates call = make_merge(read, o_a, lse_a, o_b, lse_b, o, lse, kernel);
        set_place(Torch::required(), call.options, call.o_a.device);
        run(read, call, no_workspace);
      },
      "o_a"_a, "lse_a"_a, "o_b"_a, "lse_b"_a, "o"_a, "lse"_a, "kernel"_a.none());
  // Any tensors, on a stream by its address.
  module.def(
      "merge_states",
      [](nb::handle o_a, nb::handle lse_a, nb::handle o_b, nb::handle lse_b, nb::handle o, nb::handle lse,
         nb::handle kernel, std::uintptr_t stream) {
        Reader read;
        MergeStates call = make_merge(read, o_a, lse_a, o_b, lse_b, o, lse, kernel);
        call.options.stream = reinterpret_cast<void*>(stream);
        run(read, call, no_workspace);
      },
      "o_a"_a, "lse_a"_a, "o_b"_a, "lse_b"_a, "o"_a, "lse"_a, "kernel"_a.none(), "stream"_a);
}

}  // namespace tessera::python
