// What the tests of the kernels share: each runs once a kernel of tessera::kernels(), and is skipped, with
// the reason, for those that this machine lacks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"
#include "verify/judge.h"

namespace tessera {

// For googletest, which would print the bytes.
inline void PrintTo(const KernelInfo& info, std::ostream* out) { *out << info.name; }

}  // namespace tessera

namespace tessera::verify {

inline Case parsed(const std::string& line) {
  const std::optional<Case> c = parse_case(line);
  EXPECT_TRUE(c.has_value()) << line;
  return c.value_or(Case{});
}

class KernelTest : public testing::TestWithParam<KernelInfo> {
 protected:
  void SetUp() override {
    if (!GetParam().available) GTEST_SKIP() << GetParam().name << ": " << GetParam().why_not;
  }

  // The case, forced onto this kernel, in dtypes that it takes.
  static Case forced(const Case& c) { return verify::forced(c, GetParam().name); }
  static bool on_gpu() { return GetParam().device == "cuda"; }

  static void expect_right(const Case& c) {
    const Verdict verdict = judge(forced(c));
    EXPECT_TRUE(verdict.ok()) << verdict.to_string();
  }
};

// The bytes of every output, guards included.
using Snapshot = std::vector<AlignedBytes>;

// Forward and backward anew, from poisoned outputs.
inline Snapshot run_both(Tensors& tensors) {
  Snapshot snapshot;
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    const auto outputs = tensors.outputs(direction);
    for (const auto& [name, buffer] : outputs) buffer->poison();
    const Status status = run(tensors, direction);
    EXPECT_TRUE(status.ok()) << status.message() << "\n" << to_string(tensors.settings);
    for (const auto& [name, buffer] : outputs) snapshot.push_back(buffer->bytes());
  }
  return snapshot;
}

// A compact tensor of its own.
struct Owned {
  std::vector<std::byte> bytes;
  Tensor tensor;

  // Of the same shape and dtype as another, every byte 0xFF.
  explicit Owned(const Tensor& like) : tensor(like) {
    std::int64_t stride = 1;
    for (int d = like.rank - 1; d >= 0; --d) {
      tensor.stride[d] = stride;
      stride *= like.shape[d];
    }
    bytes.assign(static_cast<std::size_t>(stride) * like.dtype.bits / 8 + 1, std::byte{0xFF});
    tensor.data = bytes.data();
  }
};

inline std::byte* element_of(const Tensor& tensor, std::int64_t index) {
  std::int64_t at = 0;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    if (tensor.shape[d] > 1) at += index % tensor.shape[d] * tensor.stride[d];
    index /= tensor.shape[d];
  }
  return static_cast<std::byte*>(tensor.data) + at * (tensor.dtype.bits / 8);
}

inline std::int64_t size_of(const Tensor& tensor) {
  std::int64_t count = 1;
  for (int d = 0; d < tensor.rank; ++d) count *= tensor.shape[d];
  return count;
}

inline void copy_elements(const Tensor& from, const Tensor& to) {
  for (std::int64_t i = 0; i < size_of(from); ++i) {
    std::memcpy(element_of(to, i), element_of(from, i), from.dtype.bits / 8);
  }
}

// Elements that differ in any bit.
inline std::int64_t differences(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(size_of(a), size_of(b));
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < size_of(a); ++i) {
    count += std::memcmp(element_of(a, i), element_of(b, i), a.dtype.bits / 8) != 0 ? 1 : 0;
  }
  return count;
}

// The part begin .. begin + length of one dimension.
inline Tensor slice(Tensor tensor, int dimension, std::int64_t begin, std::int64_t length) {
  if (tensor.shape[dimension] > 1) {
    tensor.data =
        static_cast<std::byte*>(tensor.data) + begin * tensor.stride[dimension] * (tensor.dtype.bits / 8);
  }
  tensor.shape[dimension] = length;
  return tensor;
}

inline std::string kernel_name(const testing::TestParamInfo<KernelInfo>& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char x) { return std::isalnum(x) == 0; }, '_');
  return name;
}

}  // namespace tessera::verify

#define TESSERA_FOR_EACH_KERNEL(Suite) \
  INSTANTIATE_TEST_SUITE_P(Kernels, Suite, testing::ValuesIn(tessera::kernels()), kernel_name)
