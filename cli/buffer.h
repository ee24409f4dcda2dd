// Memory for the tensors of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::cli {

inline constexpr std::size_t alignment = 64;  // of the CPU's workspace, and of every buffer here

struct AlignedDelete {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{alignment}); }
};
using Memory = std::unique_ptr<void, AlignedDelete>;

[[nodiscard]] Memory allocate(std::size_t bytes);

// Address space with no memory behind it.
struct Reservation {
  explicit Reservation(std::size_t size);
  ~Reservation();
  Reservation(Reservation&& other) noexcept;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  Reservation& operator=(Reservation&&) = delete;

  void* address;
  std::size_t bytes;
};

// Owns tensors. A phantom store's tensors have addresses of their own but no memory, for explain: any size is
// cheap, and touching one is a fault. Those of a huge one lie in huge pages where the system gives them: what
// is read at the speed of memory would else be told by its translation of addresses.
class Store {
 public:
  enum class Kind : std::uint8_t { real, huge, phantom };
  explicit Store(Kind kind) : kind_(kind) {}

  [[nodiscard]] Tensor zeros(DType dtype, std::initializer_list<std::int64_t> shape);
  [[nodiscard]] Tensor normal(DType dtype, std::initializer_list<std::int64_t> shape);
  // Always real: the library reads lengths even to explain.
  [[nodiscard]] Tensor integers(const std::vector<std::int32_t>& values);

  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  [[nodiscard]] void* take(std::size_t bytes);

  Kind kind_;
  std::size_t bytes_ = 0;
  std::uint64_t tensors_ = 0;
  std::vector<Memory> memory_;
  std::vector<Reservation> reserved_;
};

}  // namespace tessera::cli
