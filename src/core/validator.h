// Validation's checks. validate.cpp has those that calls share, forward's and backward's; validate_decode.cpp
// those of decode and merge_states.
//
// A message reads "argument: what it was, expected what", and the first fault found is reported. Every check
// is a bool: `a() && b()` stops at the first fault, which fail() has put into the status.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "core/arguments.h"
#include "core/layout.h"
#include "core/problem.h"

namespace tessera {

inline constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int64_t max_heads_of_batch =
    (std::int64_t{1} << 32) - 1;  // dropout's counter has 32 bits for it
inline constexpr std::int64_t max_rows_of_heads = std::int64_t{1}
                                                  << 46;  // their bytes, in any form, fit 63 bits

// An expected extent: a number, or the name of one that is free.
struct Extent {
  std::int64_t size = 0;
  const char* free = nullptr;
  Extent() = default;
  Extent(std::int64_t n) : size(n) {}       // NOLINT(google-explicit-constructor)
  Extent(const char* name) : free(name) {}  // NOLINT(google-explicit-constructor)
};

// What is expected of a tensor's shape.
class Expected {
 public:
  Expected(std::initializer_list<Extent> list) : size_(list.size()) {
    std::copy(list.begin(), list.end(), extents_.begin());
  }
  explicit Expected(const Tensor& like) : size_(static_cast<std::size_t>(like.rank)) {
    std::copy_n(like.shape.begin(), size_, extents_.begin());
  }
  [[nodiscard]] const Extent* begin() const { return extents_.data(); }
  [[nodiscard]] const Extent* end() const { return begin() + size_; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  std::array<Extent, Tensor::max_rank> extents_{};
  std::size_t size_;
};

[[nodiscard]] std::string number_text(double value);

// Of a tensor whose dtype has passed.
inline DType checked_dtype(const Tensor& tensor) { return dtype_of(tensor).value_or(DType::float32); }

class Validator {
 public:
  Validator(Direction direction, const Options& options, const Arguments& table, Pointers pointers)
      : options_(options), table_(table), pointers_(pointers) {
    problem.direction = direction;
  }

  Problem problem;
  Status status;

  // Everything that forward and backward share; o and lse are outputs of one and inputs of the other.
  bool common(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse) {
    return presence() && devices() && each_tensor() && scalars() && sizes(q, k, v) && sequences() &&
           shape("o", o, tokens(problem.rows_q, problem.num_heads_q, problem.head_dim_v)) &&
           row_shape("lse", lse) && alibi() && bias() && sinks() && views(q, k, v, o, lse);
  }
  bool gradients(const Backward& call);
  bool aliases(const Workspace& workspace);

 protected:
  bool fail(const std::string& argument, const std::string& was, const std::string& expected) {
    status = Status(Code::invalid_argument, argument + ": " + was + ", expected " + expected);
    return false;
  }

  bool presence();
  bool together(const char* name, const Tensor& one, const char* other_name, const Tensor& other);
  bool devices();
  bool each_tensor();
  bool dtype(const Argument& argument);
  bool rank(const Argument& argument);
  bool layout(const Argument& argument);
  bool pointer(const Argument& argument);

  bool scalars();
  bool threads();
  bool window(const char* name, const std::optional<std::int64_t>& given, std::int64_t& out);

  bool sizes(const Tensor& q, const Tensor& k, const Tensor& v);
  bool sizes_of_q(const Tensor& q);
  bool heads_of_k(const char* name, const Tensor& k, int axis);
  bool few_rows(const char* name, const Tensor& tensor, int rows_axis);
  bool shape(const char* name, const Tensor& tensor, const Expected& expected);
  bool row_shape(const char* name, const Tensor& tensor);
  bool within(const char* name, const Tensor& tensor, int axis, const char* axis_name, std::int64_t low,
              std::int64_t high);
  [[nodiscard]] Expected tokens(Extent rows, Extent heads, Extent dim) const {
    return problem.packed ? Expected{rows, heads, dim} : Expected{problem.batch, rows, heads, dim};
  }

  bool sequences();
  bool cumulative(const char* name, const Tensor& tensor, const char* total_name, std::int64_t total,
                  const std::int32_t*& out);
  bool used(const char* name, const Tensor& tensor, bool of_q, const std::int32_t*& out);
  bool longest(const char* name, const char* cu_name, const std::optional<std::int64_t>& given,
               const std::int32_t* cu, std::int64_t rows, std::int64_t& out);

  bool alibi();
  bool bias();
  bool sinks();
  bool views(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse);
  [[nodiscard]] View token_view(const Tensor& tensor) const;
  [[nodiscard]] View row_view(const Tensor& tensor) const;

  const Options& options_;
  Arguments table_;
  Pointers pointers_;
  DType q_dtype_ = DType::float32;
};

}  // namespace tessera
