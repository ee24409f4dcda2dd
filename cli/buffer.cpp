#include "cli/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/half.h"
#include "core/problem.h"

namespace tessera::cli {
namespace {

std::int64_t count_of(std::initializer_list<std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

// A prime number of normal variates. Every tensor walks round this table from its own start: as good as
// fresh numbers for timing, at the price of a copy.
const std::vector<float>& normal_table() {
  static const std::vector<float> table = [] {
    std::vector<float> values(65537);
    std::mt19937 engine(20240229);  // NOLINT: the same data in every run
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(engine);
    return values;
  }();
  return table;
}

template <class T>
void fill_normal(T* data, std::int64_t count, std::uint64_t tensor) {
  const std::vector<float>& table = normal_table();
  std::size_t at = tensor * 7919 % table.size();
  for (std::int64_t i = 0; i < count; ++i) {
    data[i] = from_float<T>(table[at]);
    at = at + 1 == table.size() ? 0 : at + 1;
  }
}

// A wish: where it is not granted, nothing is wrong.
void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::size_t skipped = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
  if (skipped < bytes) madvise(static_cast<std::byte*>(data) + skipped, bytes - skipped, MADV_HUGEPAGE);
#endif
}

}  // namespace

Memory allocate(std::size_t bytes) {
  return Memory(::operator new(bytes == 0 ? 1 : bytes, std::align_val_t{alignment}));
}

Reservation::Reservation(std::size_t size)
    : address(mmap(nullptr, size + 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
      bytes(size + 1) {
  if (address == MAP_FAILED)
    throw std::runtime_error("no address space for " + std::to_string(size) + " bytes");
}

Reservation::~Reservation() {
  if (address != nullptr) munmap(address, bytes);
}

Reservation::Reservation(Reservation&& other) noexcept
    : address(std::exchange(other.address, nullptr)), bytes(other.bytes) {}

void* Store::take(std::size_t bytes) {
  bytes_ += bytes;
  ++tensors_;
  if (kind_ == Kind::phantom) return reserved_.emplace_back(bytes).address;
  memory_.push_back(allocate(bytes));
  void* data = memory_.back().get();
  if (kind_ == Kind::huge) ask_for_huge_pages(data, bytes);
  return data;
}

Tensor Store::zeros(DType dtype, std::initializer_list<std::int64_t> shape) {
  const auto bytes = static_cast<std::size_t>(count_of(shape) * size_of(dtype));
  void* data = take(bytes);
  if (kind_ != Kind::phantom) std::memset(data, 0, bytes);  // also makes the pages resident
  return {data, dtype, shape};
}

Tensor Store::normal(DType dtype, std::initializer_list<std::int64_t> shape) {
  const std::int64_t count = count_of(shape);
  void* data = take(static_cast<std::size_t>(count * size_of(dtype)));
  if (kind_ != Kind::phantom) {
    if (dtype == DType::float32) fill_normal(static_cast<float*>(data), count, tensors_);
    if (dtype == DType::float16) fill_normal(static_cast<float16*>(data), count, tensors_);
    if (dtype == DType::bfloat16) fill_normal(static_cast<bfloat16*>(data), count, tensors_);
  }
  return {data, dtype, shape};
}

Tensor Store::integers(const std::vector<std::int32_t>& values) {
  const std::size_t bytes = values.size() * sizeof(std::int32_t);
  memory_.push_back(allocate(bytes));
  std::memcpy(memory_.back().get(), values.data(), bytes);
  return {memory_.back().get(), DType::int32, {static_cast<std::int64_t>(values.size())}};
}

}  // namespace tessera::cli
