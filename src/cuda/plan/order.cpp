// Which tiles of queries Hopper's forward kernel has, and in which order it takes them.
#include <algorithm>
#include <limits>

#include "core/attention_params.h"
#include "cuda/plan/plan.h"

namespace tessera::cuda {
namespace {

// By a causal mask or a window; where they reach beyond every key they mean nothing.
bool is_masked(const Problem& problem) {
  return problem.window_left < problem.max_seqlen_q + problem.max_seqlen_k ||
         problem.window_right < problem.max_seqlen_q + problem.max_seqlen_k;
}

// What a head has of a tile of several.
int head_rows(const Problem& problem) {
  constexpr int warp = 16, warpgroup = 64;
  int rows = warp;
  while (rows < warpgroup && rows < problem.rows_q) rows *= 2;
  return rows;
}

// How many rows of tiles stay apart so that the longest way of a multiprocessor is shortest.
unsigned rows_apart(TileOrder order, const Sm90ForwardConfig& config, const Problem& problem,
                    unsigned multiprocessors) {
  const Mask mask{problem.max_seqlen_q, problem.max_seqlen_k, problem.window_left, problem.window_right,
                  problem.alignment == Alignment::top_left ? 0 : problem.max_seqlen_k - problem.max_seqlen_q};
  constexpr std::int64_t beside = 256;  // what a tile takes apart from its keys, in keys
  const auto cost = [&](unsigned row) {
    const std::int64_t first = std::int64_t{row} * config.block_m;
    return mask.keys_of_any({first, std::min(first + config.block_m, problem.max_seqlen_q)}).size() + beside;
  };
  constexpr unsigned most = 32;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  unsigned best = 0;
  for (unsigned apart = 0; apart <= std::min(most, order.rows / 2); ++apart) {
    order.apart = apart;
    order.count();
    const unsigned pairs = order.pairs, middle = (order.rows - apart - 1) / 2;
    const std::int64_t pair =
        std::max(cost(order.rows - 1) + cost(apart), cost(order.rows - 1 - middle) + cost(apart + middle));
    std::int64_t way = (pairs + multiprocessors - 1) / multiprocessors * pair;
    // Who has no pair in the last turn has a single tile.
    for (unsigned unit = (pairs + multiprocessors - 1) / multiprocessors * multiprocessors;
         unit < order.units; unit += multiprocessors)
      way += cost(apart - 1 - (unit - pairs) / order.heads);
    if (way < shortest) {
      shortest = way;
      best = apart;
    }
  }
  return best;
}

}  // namespace

std::int64_t forward_tiles(const Sm90ForwardConfig& config, const Problem& problem) {
  if (problem.rows_q == 0) return 0;
  if (config.grouped) {
    const std::int64_t heads_of_tile = config.block_m / head_rows(problem);
    return problem.batch * problem.num_heads_k * ceil_div(problem.group_size, heads_of_tile);
  }
  return count_tiles(problem.batch, static_cast<int>(problem.rows_q), problem.packed, config.block_m) *
         problem.num_heads_q;
}

bool groups_heads(Sm90ForwardConfig config, const DeviceLimits& limits, const Problem& problem) {
  constexpr std::int64_t most_rows = 64;
  if (config.terms != Terms::plain || problem.packed || problem.seqused_q != nullptr ||
      problem.group_size == 1 || problem.rows_q > most_rows)
    return false;
  // Few tiles have a multiprocessor each, and are then the faster the less is in one.
  const auto turns = [&](bool grouped) {
    config.grouped = grouped;
    return ceil_div(forward_tiles(config, problem), std::max<std::int64_t>(limits.multiprocessors, 1));
  };
  return turns(true) < turns(false);
}

TileOrder tile_order(const Sm90ForwardConfig& config, const Problem& problem, const DeviceLimits& limits) {
  const std::int64_t num_heads = config.grouped ? problem.num_heads_k : problem.num_heads_q;
  const std::int64_t heads = (problem.packed ? 1 : problem.batch) * num_heads;
  if (forward_tiles(config, problem) == 0) return {};
  TileOrder order{};
  order.heads = static_cast<unsigned>(heads);
  order.rows = static_cast<unsigned>(forward_tiles(config, problem) / heads);
  // Pairs are for many tiles: of few, every one has a multiprocessor of its own.
  order.masked = is_masked(problem);
  if (config.grouped) order.head_rows = head_rows(problem);
  order.paired = !problem.packed && !config.grouped && order.masked &&
                 (order.rows + 1) / 2 * order.heads >= static_cast<unsigned>(limits.multiprocessors);
  order.by_rows = problem.packed;
  order.sorted = problem.packed && problem.batch < most_sorted;
  if (order.paired)
    order.apart = rows_apart(order, config, problem, static_cast<unsigned>(limits.multiprocessors));
  order.count();
  order.inner = Divisor(order.by_rows ? order.heads : order.units_of_head());
  order.all_heads = Divisor(order.heads);
  order.change = 7 % std::clamp<unsigned>(limits.multiprocessors, 1, order.units);
  order.heads_of_batch = Divisor(static_cast<unsigned>(num_heads));
  order.group_size = Divisor(static_cast<unsigned>(problem.group_size));
  return order;
}

}  // namespace tessera::cuda
