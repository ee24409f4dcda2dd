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

constexpr unsigned most_apart = 32;  // rows of tiles

// The keys that a row of tiles sees.
std::int64_t keys_of_row(const Sm90ForwardConfig& config, const Problem& problem, unsigned row) {
  const Mask mask{problem.max_seqlen_q, problem.max_seqlen_k, problem.window_left, problem.window_right,
                  problem.alignment == Alignment::top_left ? 0 : problem.max_seqlen_k - problem.max_seqlen_q};
  const std::int64_t first = std::int64_t{row} * config.block_m;
  return mask.keys_of_any({first, std::min(first + config.block_m, problem.max_seqlen_q)}).size();
}

// How many rows, the first ones, see less than the one in the middle; most_apart + 1 if they are more, or if
// those behind it do not see as much as it does.
unsigned shorter_rows(const TileOrder& order, const Sm90ForwardConfig& config, const Problem& problem) {
  const std::int64_t middle = keys_of_row(config, problem, order.rows / 2);
  if (keys_of_row(config, problem, order.rows * 3 / 4) != middle) return most_apart + 1;
  unsigned rows = 0;
  while (rows <= most_apart && rows < order.rows / 2 && keys_of_row(config, problem, rows) < middle) ++rows;
  return rows;
}

// How many rows stay apart from pairs so that the longest way of a multiprocessor is shortest.
unsigned rows_apart(TileOrder order, const Sm90ForwardConfig& config, const Problem& problem,
                    unsigned multiprocessors) {
  constexpr std::int64_t beside = 256;  // what a tile takes apart from its keys, in keys
  const auto cost = [&](unsigned row) { return keys_of_row(config, problem, row) + beside; };
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  unsigned best = 0;
  for (unsigned apart = 0; apart <= std::min(most_apart, order.rows / 2); ++apart) {
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

// Short tiles wait for memory more: those that run at a time then read long pieces of its rows, and not only
// a head's. Few heads, so that what they read stays in the L2 cache until the next tile has read it, too.
unsigned heads_beside(unsigned heads) {
  unsigned beside = 8;
  while (heads % beside != 0) --beside;
  return beside;
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
  const bool uneven = !problem.packed && !config.grouped && order.masked;
  const unsigned shorter = uneven ? shorter_rows(order, config, problem) : 0;
  const bool alike = uneven && shorter <= most_apart && shorter < order.rows / 2;
  order.paired =
      uneven && !alike && (order.rows + 1) / 2 * order.heads >= static_cast<unsigned>(limits.multiprocessors);
  order.sorted = problem.packed && problem.batch < most_sorted;
  order.to_and_fro = order.sorted || alike;
  if (order.paired)
    order.apart = rows_apart(order, config, problem, static_cast<unsigned>(limits.multiprocessors));
  if (alike) order.apart = shorter;
  order.count();
  order.beside = Divisor(problem.packed ? order.heads : alike ? heads_beside(order.heads) : 1);
  order.inner = Divisor(order.units_of_head() * order.beside.divisor);
  order.all_heads = Divisor(order.heads);
  order.change = 7 % std::clamp<unsigned>(limits.multiprocessors, 1, order.units);
  order.heads_of_batch = Divisor(static_cast<unsigned>(num_heads));
  order.group_size = Divisor(static_cast<unsigned>(problem.group_size));
  return order;
}

}  // namespace tessera::cuda
