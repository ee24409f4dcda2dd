// What runs for a problem on a GPU: configs, their names and programs, workspace. Pure functions, no GPU
// needed.
#pragma once

#include <cstdint>
#include <string>

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "core/problem.h"

namespace tessera::cuda {

struct DeviceLimits {
  int arch = 0;  // 80, 90, ...
  std::int64_t shared_per_block = 0;
  int multiprocessors = 0;
};

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

// The kernels that are compiled for a type only; merge for none, its tensors say theirs.
enum class Small : std::uint8_t { delta, dsinks, convert_dq, append, combine, merge };
struct SmallConfig {
  Small kernel;
  Half type;
};

// A config's kernel: its name (all of the config is in it), the text of its program, a block's size.
[[nodiscard]] std::string kernel_name(const ForwardConfig& config);
[[nodiscard]] std::string kernel_name(const Sm90ForwardConfig& config);
[[nodiscard]] std::string kernel_name(const BackwardConfig& config);
[[nodiscard]] std::string kernel_name(const Sm90BackwardConfig& config);
[[nodiscard]] std::string kernel_name(const DbiasConfig& config);
[[nodiscard]] std::string kernel_name(const DecodeConfig& config);
[[nodiscard]] std::string kernel_name(const SmallConfig& config);
[[nodiscard]] std::string program_text(const ForwardConfig& config);
[[nodiscard]] std::string program_text(const Sm90ForwardConfig& config);
[[nodiscard]] std::string program_text(const BackwardConfig& config);
[[nodiscard]] std::string program_text(const Sm90BackwardConfig& config);
[[nodiscard]] std::string program_text(const DbiasConfig& config);
[[nodiscard]] std::string program_text(const DecodeConfig& config);
[[nodiscard]] std::string program_text(const SmallConfig& config);
[[nodiscard]] int threads_of(const ForwardConfig& config);
[[nodiscard]] int threads_of(const Sm90ForwardConfig& config);
[[nodiscard]] int threads_of(const BackwardConfig& config);
[[nodiscard]] int threads_of(const Sm90BackwardConfig& config);
[[nodiscard]] int threads_of(const DbiasConfig& config);
[[nodiscard]] int threads_of(const DecodeConfig& config);
[[nodiscard]] int threads_of(const SmallConfig& config);
// Bytes of dynamic shared memory. The program asserts that it is its struct's size.
[[nodiscard]] int shared_of(const ForwardConfig& config);
[[nodiscard]] int shared_of(const Sm90ForwardConfig& config);
[[nodiscard]] int shared_of(const BackwardConfig& config);
[[nodiscard]] int shared_of(const Sm90BackwardConfig& config);
[[nodiscard]] int shared_of(const DbiasConfig& config);
[[nodiscard]] int shared_of(const DecodeConfig& config);
[[nodiscard]] int shared_of(const SmallConfig& config);

// The config for tensors whose rows are, or are not, whole aligned pieces of 16 bytes.
[[nodiscard]] ForwardConfig forward_config(const DeviceLimits& limits, Half type, int head_dim,
                                           int head_dim_v, Terms terms, bool aligned);
[[nodiscard]] BackwardConfig backward_config(const DeviceLimits& limits, Half type, int head_dim,
                                             int head_dim_v, Terms terms, bool aligned);
[[nodiscard]] DbiasConfig dbias_config(const DeviceLimits& limits, Half type, int head_dim, int head_dim_v,
                                       Terms terms, bool aligned);

// rows: of a key head, the queries of a sequence by the heads of its group. Without a cluster.
[[nodiscard]] DecodeConfig decode_config(const DeviceLimits& limits, Half type, int head_dim, int head_dim_v,
                                         std::int64_t rows, bool aligned, Stored stored = Stored::half);
// Of so many rows and fewer a warp has several parts, and joins them; head_dim_v is a tile's.
[[nodiscard]] std::int64_t most_joined_rows(int head_dim_v);
// The same for blocks that have a multiprocessor each: twice the bytes under way, where there is room.
[[nodiscard]] DecodeConfig alone(const DeviceLimits& limits, DecodeConfig config);
// The same with one block of twice the warps instead of two, where that was measured: a multiprocessor reads
// one tile's keys at a time.
[[nodiscard]] DecodeConfig merged(const DeviceLimits& limits, DecodeConfig config);

[[nodiscard]] Sm90ForwardConfig sm90_forward_config(Half type, int head_dim, int head_dim_v, Terms terms);
[[nodiscard]] Sm90ForwardConfig sm90_forward_config(const DeviceLimits& limits, const Problem& problem);

[[nodiscard]] Sm90BackwardConfig sm90_backward_config(Half type, int head_dim, int head_dim_v, Terms terms,
                                                      bool ordered = false);
[[nodiscard]] Sm90BackwardConfig sm90_backward_config(const DeviceLimits& limits, const Problem& problem);

[[nodiscard]] ForwardConfig forward_config(const DeviceLimits& limits, const Problem& problem);
[[nodiscard]] BackwardConfig backward_config(const DeviceLimits& limits, const Problem& problem);
[[nodiscard]] DbiasConfig dbias_config(const DeviceLimits& limits, const Problem& problem);

// Whether every row of a tensor starts at a multiple of 16 bytes.
[[nodiscard]] bool rows_aligned(const View& view);
[[nodiscard]] RowsArg rows_arg(const View& view);

// Blocks of each kernel's grid.
[[nodiscard]] std::int64_t blocks_of(const ForwardConfig& config, const Problem& problem);
[[nodiscard]] std::int64_t blocks_of(const Sm90ForwardConfig& config, const Problem& problem,
                                     const DeviceLimits& limits);
[[nodiscard]] std::int64_t blocks_of(const BackwardConfig& config, const Problem& problem);
[[nodiscard]] std::int64_t blocks_of(const Sm90BackwardConfig& config, const Problem& problem,
                                     const DeviceLimits& limits);
[[nodiscard]] std::int64_t blocks_of(const DbiasConfig& config, const Problem& problem);
[[nodiscard]] std::int64_t blocks_of(const SmallConfig& config, const Problem& problem);

// Tiles of queries that the blocks share out, and in which order.
[[nodiscard]] std::int64_t forward_tiles(const Sm90ForwardConfig& config, const Problem& problem);
[[nodiscard]] TileOrder tile_order(const Sm90ForwardConfig& config, const Problem& problem,
                                   const DeviceLimits& limits);
// Whether a tile shall have several of the heads that share a key head, as for a few queries.
[[nodiscard]] bool groups_heads(Sm90ForwardConfig config, const DeviceLimits& limits, const Problem& problem);

// Blocks of keys, of all heads, that the blocks share out, and in which order where that matters.
[[nodiscard]] std::int64_t backward_tiles(const Sm90BackwardConfig& config, const Problem& problem);
[[nodiscard]] KeyOrder key_order(const Sm90BackwardConfig& config, const Problem& problem,
                                 const DeviceLimits& limits);

// Backward's workspace, in bytes from its start.
struct BackwardWorkspace {
  std::int64_t delta = 0, dq_acc = 0, turn = 0, ticket = 0, end = 0;
  std::int64_t clear = 0;  // from there to the end it is to be 0
  bool ordered = false;    // there is a turn
};
[[nodiscard]] BackwardWorkspace backward_workspace(const BackwardConfig& config, const Problem& problem);
[[nodiscard]] BackwardWorkspace backward_workspace(const Sm90BackwardConfig& config, const Problem& problem);

}  // namespace tessera::cuda
