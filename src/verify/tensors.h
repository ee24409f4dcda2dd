// The memory of a Case: inputs that hold what should be read and NaN elsewhere, outputs in guard bands.
//
//   Tensors tensors(c);
//   Forward call = tensors.forward_call();  // the workspace is the caller's, see Scratch
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "core/problem.h"
#include "tessera/tessera.hpp"
#include "verify/case.h"
#include "verify/mirror.h"

namespace tessera::verify {

template <class T>
struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t alignment{64};

  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}  // NOLINT(google-explicit-constructor)
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), alignment)); }
  void deallocate(T* data, std::size_t) { ::operator delete(data, alignment); }
  friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
};
using AlignedBytes = std::vector<std::byte, AlignedAllocator<std::byte>>;

// Memory of one tensor, guarded on both sides. What belongs to no element (guards, gaps between rows) holds a
// pattern that reads as NaN in every dtype.
class Buffer {
 public:
  // An input ends where its allocation ends, so that AddressSanitizer sees every read past it.
  enum class Role : std::uint8_t { input, output };

  Buffer() = default;
  // shape and stride are the view's; it starts lead elements behind a 64-byte boundary.
  Buffer(Role role, DType dtype, const Tensor& view, std::int64_t lead);
  Buffer(Buffer&&) = default;  // keeps the addresses
  Buffer& operator=(Buffer&&) = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] const Tensor& tensor() const { return view_; }
  [[nodiscard]] bool given() const { return view_.given(); }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t size() const;  // elements of the view

  // Element `index` in the row-major order of the view's shape.
  [[nodiscard]] double get(std::int64_t index) const;
  void set(std::int64_t index, double value);
  [[nodiscard]] std::int64_t position(std::int64_t index) const;  // in elements from the view's start
  [[nodiscard]] bool unwritten(std::int64_t index) const;         // it still holds the pattern
  void poison();                                                  // back to the pattern, all of it
  [[nodiscard]] bool guards_intact() const;
  [[nodiscard]] const AlignedBytes& bytes() const { return bytes_; }  // guards included

  // Inputs: remember the bytes, and whether they are still the same.
  void freeze() { frozen_ = bytes_; }
  [[nodiscard]] bool unchanged() const { return frozen_ == bytes_; }

 private:
  [[nodiscard]] std::byte* element(std::int64_t index);
  [[nodiscard]] const std::byte* element(std::int64_t index) const;

  AlignedBytes bytes_, frozen_;
  std::size_t begin_ = 0;  // of the view, in bytes
  Tensor view_;
  DType dtype_ = DType::float32;
};

// A workspace full of NaN, guarded. Its size comes from workspace_size().
class Scratch {
 public:
  explicit Scratch(std::size_t bytes);
  [[nodiscard]] Workspace workspace();
  [[nodiscard]] bool guards_intact() const;

 private:
  AlignedBytes bytes_;
  std::size_t size_ = 0;
};

// With a workspace of its own, poisoned and between guards. Where the call forces a GPU kernel, on a GPU.
template <class Call>
Status run_call(Call call, Status (*function)(const Call&)) {
  if (on_gpu(call.options.kernel)) return run_mirrored(call, function);
  const Result<std::size_t> bytes = workspace_size(call);
  if (!bytes.ok()) return bytes.status();
  Scratch scratch(bytes.value());
  call.workspace = scratch.workspace();
  Status status = function(call);
  if (status.ok() && !scratch.guards_intact())
    return {Code::internal, "memory around the workspace was overwritten"};
  return status;
}

// All the memory of a case. Inputs are random; padding (rows beyond seqused, behind the last packed sequence)
// is NaN; outputs are poisoned.
struct Tensors {
  explicit Tensors(const Case& c);

  Case settings;
  Buffer q, k, v, o, lse;
  Buffer dout, dlse, dq, dk, dv, dbias, dsinks;
  Buffer bias, sinks, alibi_slopes;
  Buffer cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;

  // The calls view this memory. The workspace is left to the caller.
  [[nodiscard]] Forward forward_call() const;
  [[nodiscard]] Backward backward_call() const;

  // Outputs and guards of either direction, by name.
  struct Named {
    const char* name;
    Buffer* buffer;
  };
  [[nodiscard]] std::vector<Named> outputs(Direction direction);
  [[nodiscard]] std::vector<Named> inputs();
};

}  // namespace tessera::verify
