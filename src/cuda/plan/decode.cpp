#include "cuda/plan/decode.h"

#include <algorithm>

#include "core/mask.h"

namespace tessera::cuda {
namespace {

// Parts of a sequence: multiples of a step's keys, so many that a sequence alone fills a GPU with a part for
// each warp, whatever the number of its key heads. kernels/sm80/NOTES.md has the measurements.
constexpr std::int64_t split_fewest = 64, split_fewest_joined = 32, split_rows = 256;
constexpr std::int64_t fewest_parts = 32, parts_of_all_heads = 512;
constexpr std::int64_t enough_blocks = 240;   // for a GPU; a block takes more parts only where there are more
constexpr std::int64_t cluster_keys = 64;     // of a warp: with more, all multiprocessors count for more
constexpr std::int64_t merged_keys = 512;     // of a warp: with fewer, blocks begin and end too often
constexpr std::int64_t workspace_step = 256;  // bytes

Stored stored_of(const Problem& problem) {
  return problem.k.dtype == DType::float8_e4m3fn ? Stored::float8
         : problem.k.dtype == DType::int8        ? Stored::int8
                                                 : Stored::half;
}

AnglesArg angles_arg(const View& view) { return {view.data, view.seq, view.dtype == DType::float32}; }

std::int64_t round_to_power(std::int64_t x) {
  std::int64_t power = 1;
  while (power < x) power *= 2;
  return power;
}

}  // namespace

DecodeCut decode_cut(const DecodeConfig& config, const Problem& problem) {
  const std::int64_t group = problem.group_size, longest = std::max<std::int64_t>(problem.max_seqlen_q, 1);
  DecodeCut cut;
  cut.head_tiles = ceil_div(group, config.block_m);
  cut.heads = ceil_div(group, cut.head_tiles);
  cut.head_tiles = ceil_div(group, cut.heads);
  cut.head_tiles_k = cut.head_tiles * problem.num_heads_k;
  cut.queries = std::min(config.block_m / cut.heads, longest);
  cut.tiles = std::max<std::int64_t>(ceil_div(problem.rows_q, cut.queries), 1);
  cut.all_tiles = problem.rows_q == 0 ? 0
                                      : count_tiles(problem.batch, static_cast<int>(problem.rows_q),
                                                    problem.packed, static_cast<int>(cut.queries));
  const std::int64_t most_parts = DecodeParams::most_blocks * config.warps;
  const std::int64_t given = std::min<std::int64_t>(problem.cache.num_splits, DecodeParams::most_blocks);
  const std::int64_t automatic = std::clamp(
      parts_of_all_heads / std::max<std::int64_t>(problem.num_heads_k, 1), fewest_parts, most_parts);
  // Parts that no warp joins are larger: by the sequence's own rows, for in a packed batch others may make
  // its tiles larger.
  const auto rule = [&](std::int64_t fewest) {
    return Splits::Rule{config.keys, std::max<std::int64_t>(fewest, config.keys), automatic};
  };
  cut.rule = rule(split_fewest);
  cut.joined = rule(split_fewest_joined);
  cut.joined_queries = most_joined_rows(config.head_dim_v) / group;
  cut.given_parts = given * config.warps;
  cut.split_queries = given > 0 ? longest : std::min(longest, std::max<std::int64_t>(split_rows / group, 1));
  const bool none = !problem.packed && longest > cut.split_queries;
  const std::int64_t parts =
      Splits::most(problem.max_seqlen_k, cut.given_parts, cut.rule_of(problem.packed ? 1 : longest));
  cut.most_splits = none ? 1 : ceil_div(parts, config.warps);
  if (config.cluster > 1) {
    cut.most_splits = config.cluster;
  } else if (given == 0) {
    for (int of_warp = 1 << config.levels; of_warp > 1; of_warp /= 2) {
      const std::int64_t splits = ceil_div(cut.most_splits, of_warp);
      if (cut.all_tiles * cut.head_tiles_k * splits < enough_blocks) continue;
      cut.most_splits = splits;
      break;
    }
  }
  cut.split_tiles = ceil_div(cut.split_queries, cut.queries);
  cut.partial_as_all = problem.packed && cut.all_tiles < problem.batch * cut.split_tiles;
  cut.partial_tiles = std::min(cut.all_tiles, problem.batch * cut.split_tiles);
  return cut;
}

DecodeWorkspace decode_workspace(const DecodeConfig& config, const Problem& problem) {
  if (config.cluster > 1) return {};
  const DecodeCut cut = decode_cut(config, problem);
  const std::int64_t rows = cut.partial_places() * cut.most_splits * cut.partial_rows();
  const auto padded = [](std::int64_t bytes) { return ceil_div(bytes, workspace_step) * workspace_step; };
  DecodeWorkspace w;
  w.state = padded(rows * config.head_dim_v * 4);
  w.end = w.state + padded(rows * 2 * 4);
  return w;
}

DecodeConfig decode_config(const DeviceLimits& limits, const Problem& problem, bool clusters) {
  const Stored stored = stored_of(problem);
  const int piece = stored == Stored::half ? 8 : 16;  // numbers
  const bool aligned = problem.head_dim % piece == 0 && problem.head_dim_v % piece == 0 &&
                       (stored != Stored::half || rows_aligned(problem.q)) && rows_aligned(problem.k) &&
                       rows_aligned(problem.v);
  DecodeConfig config =
      decode_config(limits, problem.dtype == DType::bfloat16 ? Half::bfloat16 : Half::float16,
                    static_cast<int>(problem.head_dim), static_cast<int>(problem.head_dim_v),
                    problem.group_size * std::max<std::int64_t>(problem.max_seqlen_q, 1), aligned, stored);
  const DecodeCut cut = decode_cut(config, problem);
  // A few blocks of a few keys only: then one launch counts for more than bytes in flight.
  if (!clusters || config.levels == 0 || problem.max_seqlen_k > most_cluster * config.warps * cluster_keys) {
    const std::int64_t keys_of_warp = ceil_div(problem.max_seqlen_k, cut.most_splits * config.warps);
    const bool many = keys_of_warp > (config.stages - 1) * config.keys;
    if (many && cut.blocks() <= limits.multiprocessors) return alone(limits, config);
    // A block for each tile anyway. How keys are cut does not depend on it.
    const bool whole =
        cut.most_splits == 1 && cut.given_parts == 0 && problem.max_seqlen_q <= cut.split_queries;
    return whole && keys_of_warp >= merged_keys ? merged(limits, config) : config;
  }
  const std::int64_t tiles = cut.all_tiles * cut.head_tiles_k;
  std::int64_t splits = cut.most_splits;
  for (int of_warp = 1; splits > most_cluster && of_warp < 1 << config.levels; of_warp *= 2)
    splits = ceil_div(splits, 2);
  if (splits > 1 && splits <= most_cluster && tiles * splits <= limits.multiprocessors)
    config.cluster = static_cast<int>(round_to_power(splits));
  return config;
}

DecodeParams decode_params(const DeviceLimits& limits, const DecodeConfig& config, const Problem& problem,
                           const AttentionParams& attention) {
  const DecodeCut cut = decode_cut(config, problem);
  const Cache& cache = problem.cache;
  const auto divisor = [](std::int64_t x) { return Divisor(static_cast<unsigned>(x)); };
  DecodeParams p{};
  p.attention = attention;
  if (cache.blocks == 0) p.attention.rows_k = 0;
  p.seqlens = cache.seqlens;
  p.page_table = cache.page_table;
  p.page_table_row = cache.page_table_row;
  p.page_size = divisor(std::max<std::int64_t>(cache.page_size, 1));
  p.blocks = static_cast<int>(std::min<std::int64_t>(cache.blocks, (std::int64_t{1} << 31) - 1));
  p.batch_idx = cache.batch_idx;
  p.leftpad = cache.leftpad;
  p.stored = stored_of(problem);
  p.k_scale = {cache.k_scale.data, cache.k_scale.stride};
  p.v_scale = {cache.v_scale.data, cache.v_scale.stride};
  p.k_new = rows_arg(cache.k_new);
  p.v_new = rows_arg(cache.v_new);
  p.rows_new = cache.k_new.given() ? static_cast<int>(cache.rows_new) : 0;
  p.cos = angles_arg(cache.cos);
  p.sin = angles_arg(cache.sin);
  p.positions = static_cast<int>(std::min<std::int64_t>(cache.positions, (std::int64_t{1} << 31) - 1));
  p.rotary_dim = cache.positions > 0 ? static_cast<int>(cache.rotary_dim) : 0;
  p.interleaved = cache.interleaved;
  p.ordered = problem.window_left < Mask::unbounded || problem.window_right < Mask::unbounded;
  p.max_seqlen_k = static_cast<int>(problem.max_seqlen_k);
  p.queries = static_cast<int>(cut.queries);
  p.heads = static_cast<int>(cut.heads);
  p.tile_heads = divisor(cut.heads);
  p.head_tiles = divisor(cut.head_tiles);
  p.head_tiles_k = divisor(cut.head_tiles_k);
  p.tiles = divisor(cut.tiles);
  p.parts = divisor(cut.given_parts > 0 ? cut.given_parts : cut.rule.most);
  p.split_unit = static_cast<int>(cut.rule.unit);
  const auto fewest = [&](const Splits::Rule& rule) {
    return static_cast<int>(problem.cache.num_splits > 0 ? rule.unit : rule.fewest);
  };
  p.split_fewest = fewest(cut.rule);
  p.split_fewest_joined = fewest(cut.joined);
  p.joined_queries = static_cast<int>(cut.joined_queries);
  p.warps = config.warps;
  p.at_once = static_cast<unsigned>(limits.multiprocessors * config.per_sm);
  p.split_queries = static_cast<int>(cut.split_queries);
  p.most_splits = divisor(cut.most_splits);
  p.split_tiles = divisor(cut.split_tiles);
  p.partial_as_all = cut.partial_as_all;
  p.partial_rows = static_cast<int>(cut.partial_rows());
  p.partial_cols = config.head_dim_v;
  return p;
}

std::int64_t blocks_of(const DecodeConfig& config, const Problem& problem) {
  return decode_cut(config, problem).blocks();
}
std::int64_t append_blocks(const Problem& problem) {
  if (!problem.cache.k_new.given() || problem.cache.blocks == 0) return 0;
  return (problem.packed ? 1 : problem.batch) * problem.cache.rows_new;
}
std::int64_t combine_blocks(const DecodeConfig& config, const Problem& problem) {
  if (config.cluster > 1) return 0;
  const DecodeCut cut = decode_cut(config, problem);
  const int rows = threads_of(SmallConfig{Small::combine, config.type}) / 32;
  return ceil_div(cut.partial_places() * cut.partial_rows(), rows);
}

}  // namespace tessera::cuda
