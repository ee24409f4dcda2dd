// The tensors of a call, one table: what each is called and what must hold of it by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera {

enum class Role : std::uint8_t { input, output };
enum class Types : std::uint8_t { floating, as_q, as_q_or_float32, float32, int32 };
enum class Last : std::uint8_t { contiguous, strided };  // the stride of the last dimension
enum class Need : std::uint8_t { required, optional };

struct Argument {
  const char* name;
  const Tensor* tensor;
  Role role;
  Need need;
  Types types;
  Last last;
  int min_rank, max_rank;
};

[[nodiscard]] bool is_packed(const Options& options);
[[nodiscard]] std::vector<Argument> arguments(const Forward& x);
[[nodiscard]] std::vector<Argument> arguments(const Backward& x);

}  // namespace tessera
