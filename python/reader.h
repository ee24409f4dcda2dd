// From Python's objects to tensors. A tensor argument is one of
//   None: not given
//   a torch.Tensor
//   a tuple (address, shape, strides in elements, dtype code, dtype bits, device type, device index)
//   a DLPack capsule, or a producer of one
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::python {

namespace nb = nanobind;

[[noreturn]] void raise(PyObject* type, const std::string& text);
void check(const Status& status);
// An argument that is not what it should be: a TypeError or a ValueError, after Python's own that is pending.
[[noreturn]] void raise_wrong(const char* name, nb::handle value, const char* expected);

nb::object owned(PyObject* object);
std::int64_t integer(nb::handle object);
bool truth(nb::handle object);
nb::object shape_tuple(std::initializer_list<std::int64_t> extents);

struct Exchange;

// PyTorch, where the program has imported it: never by ourselves.
class Torch {
 public:
  // Null: not imported, or only half so far.
  static const Torch* loaded();
  // For a call that cannot be without it.
  static const Torch& required();

  // Of exactly these types: what a subclass means is for torch's dispatcher to say.
  [[nodiscard]] bool is_plain(nb::handle object) const;
  [[nodiscard]] bool is_tensor(nb::handle object) const;
  // Whether a call with these tensors is no more than its arithmetic: no gradient is wanted, forwards or
  // backwards, nothing is cast, and nobody looks on.
  [[nodiscard]] bool is_simple(std::initializer_list<PyObject*> differentiable) const;

  [[nodiscard]] Tensor read(nb::handle object) const;
  // The stream on which the program works.
  [[nodiscard]] void* stream(DLDevice device) const;
  // As many threads as torch takes, unless Tessera was told otherwise.
  [[nodiscard]] int threads() const;

  // Compact, and of like's dtype and device.
  [[nodiscard]] nb::object empty(nb::handle like, nb::handle shape) const;
  [[nodiscard]] nb::object empty_like(nb::handle like) const { return empty_like_(like); }
  [[nodiscard]] nb::object empty_float32(nb::handle like, nb::handle shape) const;
  [[nodiscard]] nb::object empty_bytes(nb::handle like, std::size_t size) const;

  // Tells autograd that a tensor was written to behind its back.
  void mark_written(nb::handle object) const;

 private:
  explicit Torch(const nb::object& torch);
  [[nodiscard]] Tensor read_attributes(nb::handle object) const;

  nb::object tensor_, parameter_, is_grad_enabled_, any_autocast_, watchers_, tracing_, forward_ad_,
      raw_stream_, get_num_threads_, empty_, empty_like_, increment_version_, float32_, uint8_;
  std::vector<std::pair<nb::object, DLDataType>> types_;
  const Exchange* exchange_ = nullptr;
};

// Reads the tensors of one call, and keeps alive what they were read from.
class Reader {
 public:
  Tensor operator()(nb::handle object);

 private:
  std::vector<nb::object> kept_;
};

}  // namespace tessera::python
