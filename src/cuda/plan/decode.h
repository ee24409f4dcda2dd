// Decode on a GPU: how its work is cut into blocks of threads. Pure functions, no GPU needed.
#pragma once

#include "core/decode_params.h"
#include "core/split.h"
#include "cuda/plan/plan.h"

namespace tessera::cuda {

// As many blocks of a cluster as every Hopper GPU has room for.
inline constexpr std::int64_t most_cluster = 8;

// A tile is `queries` queries by `heads` of the heads that share a key head. All by bounds: lengths are the
// device's.
struct DecodeCut {
  std::int64_t queries = 1, heads = 1;
  std::int64_t head_tiles = 1, head_tiles_k = 1;  // of a key head, of all of them
  std::int64_t tiles = 1;                         // of a sequence, unless packed
  std::int64_t all_tiles = 0;                     // of all sequences, of one head tile
  Splits::Rule rule, joined;                      // of a sequence's parts; of up to joined_queries queries
  std::int64_t joined_queries = 0;
  std::int64_t given_parts = 0;    // by num_splits, which counts blocks; 0: automatic
  std::int64_t split_queries = 0;  // a sequence of more is one block's
  std::int64_t most_splits = 1;    // blocks of a tile
  std::int64_t split_tiles = 1;    // of a sequence of split_queries
  std::int64_t partial_tiles = 0;  // of one head tile, that the workspace has places for, if there are splits
  bool partial_as_all = false;     // packed: each of all_tiles has one

  [[nodiscard]] std::int64_t blocks() const { return all_tiles * head_tiles_k * most_splits; }
  [[nodiscard]] std::int64_t partial_places() const {
    return most_splits == 1 ? 0 : partial_tiles * head_tiles_k;
  }
  [[nodiscard]] std::int64_t partial_rows() const { return queries * heads; }
  [[nodiscard]] const Splits::Rule& rule_of(std::int64_t seqlen_q) const {
    return seqlen_q > joined_queries ? rule : joined;
  }
};
[[nodiscard]] DecodeCut decode_cut(const DecodeConfig& config, const Problem& problem);

// In bytes from its start; nothing where no sequence is split, or where a cluster joins the splits.
struct DecodeWorkspace {
  std::int64_t state = 0, end = 0;  // o stands first
};
[[nodiscard]] DecodeWorkspace decode_workspace(const DecodeConfig& config, const Problem& problem);

// clusters: where Hopper's clusters join the splits sooner than a second kernel, they shall.
[[nodiscard]] DecodeConfig decode_config(const DeviceLimits& limits, const Problem& problem, bool clusters);

// Everything but the pointers into the workspace. attention: the tensors'.
[[nodiscard]] DecodeParams decode_params(const DeviceLimits& limits, const DecodeConfig& config,
                                         const Problem& problem, const AttentionParams& attention);

// Blocks of the grids of the main kernel, of append and of combine.
[[nodiscard]] std::int64_t blocks_of(const DecodeConfig& config, const Problem& problem);
[[nodiscard]] std::int64_t append_blocks(const Problem& problem);
[[nodiscard]] std::int64_t combine_blocks(const DecodeConfig& config, const Problem& problem);

}  // namespace tessera::cuda
