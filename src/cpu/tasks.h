// How the work of a call is cut into tasks: sequence by sequence, head by head, block by block. And how the
// caller's workspace is cut into arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace tessera::cpu {

// Cuts a workspace into arrays. On a null base it only counts, so that one function both sizes and cuts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
    return array;
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  static constexpr std::size_t alignment = 64;
  std::byte* base_;
  std::size_t used_ = 0;
};

// The sequences of a call, the rows that belong to none (behind cu_seqlens[batch]) as one more of length 0.
[[nodiscard]] inline std::int64_t sequence_count(const Problem& problem) {
  return problem.batch + (problem.packed ? 1 : 0);
}
[[nodiscard]] inline Sequence sequence_or_rest(const Problem& problem, std::int64_t b) {
  if (b < problem.batch) return problem.sequence(b);
  Sequence rest;
  rest.q_begin = problem.cu_seqlens_q[problem.batch];
  if (problem.direction != Direction::decode) rest.k_begin = problem.cu_seqlens_k[problem.batch];
  rest.allocated_q = problem.rows_q - rest.q_begin;
  rest.allocated_k = problem.direction == Direction::decode ? 0 : problem.rows_k - rest.k_begin;
  return rest;
}

// Blocks of `size` rows (or keys) of every sequence, for each of `heads` heads.
struct BlockTasks {
  struct Task {
    std::int64_t b, h, block;
    std::int64_t blocks;  // of this sequence and head
  };

  std::int64_t heads = 0, size = 1;
  std::int64_t* first = nullptr;  // [sequences + 1]: blocks before sequence b
  std::int64_t sequences = 0;

  // first is an array for sequence_count(problem) + 1 numbers; length(sequence) is what is cut into blocks.
  template <class Length>
  BlockTasks(const Problem& problem, std::int64_t heads_, std::int64_t size_, std::int64_t* first_,
             Length length)
      : heads(heads_), size(size_), first(first_), sequences(sequence_count(problem)) {
    first[0] = 0;
    for (std::int64_t b = 0; b < sequences; ++b) {
      first[b + 1] = first[b] + (length(sequence_or_rest(problem, b)) + size - 1) / size;
    }
  }
  [[nodiscard]] std::int64_t count() const { return first[sequences] * heads; }
  [[nodiscard]] std::int64_t index(std::int64_t b, std::int64_t h, std::int64_t block) const {
    return first[b] * heads + h * (first[b + 1] - first[b]) + block;
  }
  [[nodiscard]] Task task(std::int64_t index) const {
    const std::int64_t b = std::upper_bound(first, first + sequences + 1, index / heads) - first - 1;
    const std::int64_t blocks = first[b + 1] - first[b];
    const std::int64_t rest = index - first[b] * heads;
    return {b, rest / blocks, rest % blocks, blocks};
  }
};

}  // namespace tessera::cpu
