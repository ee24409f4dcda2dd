// The CPU kernels, compiled once a SIMD target (targets.cmake): TESSERA_CPU_KERNEL is the namespace,
// TESSERA_CPU_TARGET Highway's name of the target, TESSERA_CPU_TILES its row of tiles.h, TESSERA_CPU_AMX says
// that the matmul is AMX's.
#include "cpu/target.h"

#include "cpu/backward-inl.h"
#include "cpu/decode-inl.h"
#include "cpu/forward-inl.h"
#include "cpu/merge-inl.h"
#include "cpu/parallel.h"

namespace tessera::cpu::TESSERA_CPU_KERNEL {
namespace {

// Waking a thread costs about as much as this many floating-point operations.
constexpr double flops_per_thread = 2e5;

// The caller's workspace may begin anywhere: there is room to round its address up.
constexpr std::size_t alignment = 64;
void* aligned(void* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return static_cast<std::byte*>(workspace) + (alignment - address % alignment) % alignment;
}

int useful_threads(const Problem& problem) {
  const double rows = static_cast<double>(problem.packed ? problem.rows_q : problem.batch * problem.rows_q);
  // merge_states has no keys: its work is that of a few.
  const std::int64_t keys = problem.direction == Direction::merge ? 4 : problem.max_seqlen_k;
  const double flops = 2.0 * rows * static_cast<double>(problem.num_heads_q * keys) *
                       static_cast<double>(problem.head_dim + problem.head_dim_v);
  return static_cast<int>(std::min<double>(problem.num_threads, 1.0 + flops / flops_per_thread));
}

}  // namespace

Plan plan(const Problem& problem) {
  const int threads = useful_threads(problem);
  if (problem.direction == Direction::merge) return {1, 1, threads, 0};
  if (problem.direction == Direction::decode) {
    const std::size_t bytes = DecodeLayout(problem, threads, nullptr).bytes;
    return {forward_tiles.tile_m, forward_tiles.block_n, threads, bytes + alignment};
  }
  if (problem.direction == Direction::forward) {
    const std::size_t bytes = ForwardLayout(problem, threads, nullptr).bytes;
    return {forward_tiles.tile_m, forward_tiles.block_n, threads, bytes + alignment};
  }
  const std::size_t bytes = BackwardLayout(problem, threads, nullptr).bytes;
  const auto [tile_m, block_n] = BackwardTiling(problem);
  return {tile_m, block_n, threads, bytes + alignment};
}

Status run(const Problem& problem, const Plan& plan, void* workspace) {
  switch (problem.direction) {
    case Direction::forward:
      forward(problem, plan.threads, aligned(workspace));
      break;
    case Direction::backward:
      backward(problem, plan.threads, aligned(workspace));
      break;
    case Direction::decode:
      decode(problem, plan.threads, aligned(workspace));
      break;
    case Direction::merge:
      merge(problem, plan.threads);
      break;
  }
  return {};
}

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
