#include "cuda/plan/plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "core/attention_params.h"
#include "cuda/plan/tiles.h"

namespace tessera::cuda {
namespace {

constexpr int small_threads = 256;
constexpr int dq_warps = 4;
constexpr std::int64_t workspace_step = 256;  // bytes

template <class... Args>
std::string format(const char* pattern, Args... args) {
  static_assert((std::is_trivially_copyable_v<Args> && ...), "a string needs c_str()");
  std::array<char, 512> text{};
  std::snprintf(text.data(), text.size(), pattern, args...);
  return text.data();
}

const char* type_name(Half type) { return type == Half::bfloat16 ? "bf16" : "f16"; }
constexpr std::array<std::pair<Terms, const char*>, 6> term_names = {{{Terms::softcap, "softcap"},
                                                                      {Terms::alibi, "alibi"},
                                                                      {Terms::bias, "bias"},
                                                                      {Terms::wide_bias, "f32"},
                                                                      {Terms::dropout, "dropout"},
                                                                      {Terms::any_scale, "any_scale"}}};
std::string terms_name(Terms terms) {
  std::string name;
  for (const auto& [term, text] : term_names) {
    if (!has(terms, term)) continue;
    if (!name.empty()) name += '_';
    name += text;
  }
  return name.empty() ? "plain" : name;
}
const char* aligned_name(bool aligned) { return aligned ? "" : "_unaligned"; }

const char* spelled(Half type) { return type == Half::bfloat16 ? "Half::bfloat16" : "Half::float16"; }
std::string spelled(Terms terms) { return "Terms(" + std::to_string(static_cast<int>(terms)) + ")"; }
const char* spelled(bool flag) { return flag ? "true" : "false"; }

std::string spelled(const ForwardConfig& c) {
  return format("ForwardConfig{%s, %d, %d, %d, %d, %d, %d, %s, %s, %s}", spelled(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.block_n, c.warps, c.per_sm, spelled(c.q_in_registers),
                spelled(c.aligned), spelled(c.terms).c_str());
}
std::string spelled(const Sm90ForwardConfig& c) {
  return format("Sm90ForwardConfig{%s, %d, %d, %d, %d, %d, %d, %s, %s, %s}", spelled(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.block_n, c.stages, c.q_stages, spelled(c.turns),
                spelled(c.terms).c_str(), spelled(c.grouped));
}
std::string spelled(const BackwardConfig& c) {
  return format("BackwardConfig{%s, %d, %d, %d, %d, %d, %d, %d, %d, %s, %s, %s}", spelled(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.block_n, c.split, c.stages, c.dq_warps_m, c.per_sm,
                spelled(c.kv_in_registers), spelled(c.aligned), spelled(c.terms).c_str());
}
std::string spelled(const Sm90BackwardConfig& c) {
  return format("Sm90BackwardConfig{%s, %d, %d, %d, %d, %d, %d, %d, %s, %s, %s}", spelled(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.block_n, c.q_stages, c.dout_stages, c.dv_parts,
                spelled(c.ds_in_registers), spelled(c.terms).c_str(), spelled(c.ordered));
}
std::string spelled(const DbiasConfig& c) {
  return format("DbiasConfig{%s, %d, %d, %d, %s, %s}", spelled(c.type), c.head_dim, c.head_dim_v, c.block,
                spelled(c.aligned), spelled(c.terms).c_str());
}

const char* spelled(Stored stored) {
  return stored == Stored::half     ? "Stored::half"
         : stored == Stored::float8 ? "Stored::float8"
                                    : "Stored::int8";
}
std::string spelled(const DecodeConfig& c) {
  return format("DecodeConfig{%s, %d, %d, %d, %d, %d, %d, %d, %d, %d, %s, %s}", spelled(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.warps, c.keys, c.stages, c.levels, c.per_sm, c.cluster,
                spelled(c.aligned), spelled(c.stored));
}

// A program of one kernel: call is what its body does with params.
std::string program(const std::string& header, const std::string& name, int threads, int per_sm,
                    const std::string& call, const std::string& checks,
                    const std::string& params = "AttentionParams", int cluster = 1) {
  const std::string clusters = cluster == 1 ? "" : "__cluster_dims__(" + std::to_string(cluster) + ", 1, 1) ";
  return "#include \"" + header + "\"\nusing namespace tessera;\n" + checks +
         "extern \"C\" __global__ void " + clusters + "__launch_bounds__(" + std::to_string(threads) + ", " +
         std::to_string(per_sm) + ") " + name + "(const __grid_constant__ " + params + " params) {\n  " +
         call + "(params);\n}\n";
}
// Hopper's. Its blocks have a multiprocessor each.
template <class Config>
std::string program(const char* header, const char* function, const char* shared, const char* params,
                    const Config& config) {
  const std::string spelling = spelled(config);
  return program(header, kernel_name(config), threads_of(config), 1,
                 "sm90::" + std::string(function) + "<" + spelling + ">",
                 "static_assert(sizeof(sm90::" + std::string(shared) + "<" + spelling +
                     ">) == " + std::to_string(shared_of(config)) + ");\n",
                 params);
}
template <class Config>
std::string program(const char* header, const char* function, const char* shared, int per_sm,
                    const Config& config) {
  const std::string spelling = spelled(config);
  const std::string checks = "static_assert(sizeof(sm80::" + std::string(shared) + "<" + spelling +
                             ">) == " + std::to_string(shared_of(config)) + ");\n";
  return program(header, kernel_name(config), threads_of(config), per_sm,
                 "sm80::" + std::string(function) + "<" + spelling + ">", checks);
}

struct SmallKernel {
  const char *name, *header, *params;
  int threads;
};
SmallKernel small_kernel(Small kernel) {
  switch (kernel) {
    case Small::delta:
      return {"delta", "delta.cuh", "AttentionParams", small_threads};
    case Small::dsinks:
      return {"dsinks", "delta.cuh", "AttentionParams", small_threads};
    case Small::convert_dq:
      return {"convert_dq", "dq.cuh", "AttentionParams", dq_warps * 32};
    case Small::append:
      return {"append", "append.cuh", "DecodeParams", 128};
    case Small::merge:
      return {"merge", "merge.cuh", "MergeParams", 128};
    case Small::combine:
      break;
  }
  return {"combine", "combine.cuh", "DecodeParams", 128};
}

// The widths that tiles come in.
int tile_width(int head_dim) {
  for (const int width : {64, 96, 128, 192}) {
    if (head_dim <= width) return width;
  }
  return 256;
}
template <class Rows>
auto row_for(const Rows& rows, int head_dim) {
  return *std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return head_dim <= row.head_dim; });
}
// Of Hopper's, that has room for both.
template <class Rows>
auto row_for(const Rows& rows, int head_dim, int head_dim_v) {
  return *std::find_if(rows.begin(), rows.end(), [&](const auto& row) {
    return head_dim <= row.head_dim && head_dim_v <= row.head_dim_v;
  });
}
// ALiBi is where the sum of q k^T begins: it needs hardly more registers, and on sm_90, which has its uniform
// ones beside them, none.
bool is_light(const DeviceLimits& limits, Terms terms) {
  return terms == Terms::plain || (terms == Terms::alibi && limits.arch >= 90);
}
const TileTable& table_for(const DeviceLimits& limits) {
  constexpr std::int64_t sm80_shared = 160 << 10, sm90_shared = 220 << 10;
  return limits.shared_per_block >= sm90_shared   ? sm90_tiles
         : limits.shared_per_block >= sm80_shared ? sm80_tiles
                                                  : small_tiles;
}

Half half_of(const Problem& problem) {
  return problem.dtype == DType::bfloat16 ? Half::bfloat16 : Half::float16;
}
Terms terms_of(const Problem& problem) {
  Terms terms = problem.softmax_scale > 0 ? Terms::plain : Terms::any_scale;
  if (problem.softcap != 0) terms = terms | Terms::softcap;
  if (problem.alibi_slopes != nullptr) terms = terms | Terms::alibi;
  if (problem.bias.given()) terms = terms | Terms::bias;
  if (problem.bias.given() && problem.bias.dtype == DType::float32) terms = terms | Terms::wide_bias;
  if (problem.dropout.active()) terms = terms | Terms::dropout;
  return terms;
}
bool inputs_aligned(const Problem& problem) {
  const bool whole = problem.head_dim % 8 == 0 && problem.head_dim_v % 8 == 0;
  const bool forward = rows_aligned(problem.q) && rows_aligned(problem.k) && rows_aligned(problem.v);
  if (problem.direction == Direction::forward) return whole && forward;
  return whole && forward && problem.dout.dtype != DType::float32 && rows_aligned(problem.dout);
}

std::int64_t tiles_q(const Problem& problem, int rows) {
  return count_tiles(problem.batch, static_cast<int>(problem.rows_q), problem.packed, rows);
}
std::int64_t tiles_k(const Problem& problem, int rows) {
  return count_tiles(problem.batch, static_cast<int>(problem.rows_k), problem.packed, rows);
}
std::int64_t all_rows_q(const Problem& problem) {
  return problem.packed ? problem.rows_q : problem.batch * problem.rows_q;
}

// Sums that have an order need not be cleared, which pays for their waits as long as sequences are short: if
// blocks of keys begin one after the other, as under a causal mask, or if there are many.
bool faster_in_order(const Sm90BackwardConfig& config, const DeviceLimits& limits, const Problem& problem) {
  constexpr std::int64_t longest = 4096, many = 12;
  if (config.wide() || config.terms != Terms::plain || problem.max_seqlen_k > longest) return false;
  const bool follow =
      problem.window_right < problem.max_seqlen_k && problem.max_seqlen_q >= problem.max_seqlen_k;
  return backward_tiles(config, problem) >= (follow ? 1 : many) * limits.multiprocessors;
}

// A part that waits for its right neighbour has as many registers as o.
bool joins(int block_m, int head_dim_v) { return block_m * head_dim_v / 32 <= 32; }

}  // namespace

std::string kernel_name(const ForwardConfig& c) {
  return format("tessera_sm80_forward_%s_d%dx%d_m%dn%dw%d%s_%s%s", type_name(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.block_n, c.warps, c.q_in_registers ? "q" : "",
                terms_name(c.terms).c_str(), aligned_name(c.aligned));
}
std::string kernel_name(const Sm90ForwardConfig& c) {
  return format("tessera_sm90_forward_%s_d%dx%d_m%dn%ds%dq%d%s_%s%s", type_name(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.block_n, c.stages, c.q_stages, c.turns ? "t" : "",
                terms_name(c.terms).c_str(), c.grouped ? "_grouped" : "");
}
std::string kernel_name(const BackwardConfig& c) {
  return format("tessera_sm80_backward_%s_d%dx%d_m%dn%d_split%d_stages%d_dq%d%s_%s%s", type_name(c.type),
                c.head_dim, c.head_dim_v, c.block_m, c.block_n, c.split, c.stages, c.dq_warps_m,
                c.kv_in_registers ? "kv" : "", terms_name(c.terms).c_str(), aligned_name(c.aligned));
}
std::string kernel_name(const Sm90BackwardConfig& c) {
  return format("tessera_sm90_backward_%s_d%dx%d_m%dn%dq%do%dv%d%s_%s%s", type_name(c.type), c.head_dim,
                c.head_dim_v, c.block_m, c.block_n, c.q_stages, c.dout_stages, c.dv_parts,
                c.ds_in_registers ? "r" : "", terms_name(c.terms).c_str(), c.ordered ? "_ordered" : "");
}
std::string kernel_name(const DbiasConfig& c) {
  return format("tessera_sm80_dbias_%s_d%dx%d_b%d_%s%s", type_name(c.type), c.head_dim, c.head_dim_v, c.block,
                terms_name(c.terms).c_str(), aligned_name(c.aligned));
}
std::string kernel_name(const DecodeConfig& c) {
  const std::string cluster = c.cluster == 1 ? "" : "_c" + std::to_string(c.cluster);
  const char* stored = c.stored == Stored::float8 ? "f8" : c.stored == Stored::int8 ? "i8" : "";
  return format("tessera_decode_%s%s_d%dx%d_m%dw%dk%ds%d%s%s", type_name(c.type), stored, c.head_dim,
                c.head_dim_v, c.block_m, c.warps, c.keys, c.stages, cluster.c_str(), aligned_name(c.aligned));
}
std::string kernel_name(const SmallConfig& c) {
  if (c.kernel == Small::merge) return "tessera_merge";
  return format("tessera_%s_%s", small_kernel(c.kernel).name, type_name(c.type));
}

std::string program_text(const ForwardConfig& c) {
  return program("sm80/forward.cuh", "forward", "ForwardShared", c.per_sm, c);
}
std::string program_text(const Sm90ForwardConfig& c) {
  return program("sm90/forward.cuh", "forward", "ForwardShared", "Sm90ForwardParams", c);
}
std::string program_text(const BackwardConfig& c) {
  return program("sm80/backward.cuh", "backward", "BackwardShared", c.per_sm, c);
}
std::string program_text(const Sm90BackwardConfig& c) {
  return c.wide()
             ? program("sm90/backward_wide.cuh", "backward_wide", "BackwardShared", "Sm90BackwardParams", c)
             : program("sm90/backward.cuh", "backward", "BackwardShared", "Sm90BackwardParams", c);
}
std::string program_text(const DbiasConfig& c) {
  return program("sm80/dbias.cuh", "dbias", "DbiasShared", 1, c);
}
std::string program_text(const DecodeConfig& c) {
  const std::string spelling = spelled(c);
  return program("sm80/decode.cuh", kernel_name(c), threads_of(c), c.per_sm, "sm80::decode<" + spelling + ">",
                 "static_assert(sizeof(sm80::DecodeShared<" + spelling +
                     ">) == " + std::to_string(shared_of(c)) + ");\n",
                 "DecodeParams", c.cluster);
}
std::string program_text(const SmallConfig& c) {
  const auto [name, header, params, threads] = small_kernel(c.kernel);
  return program(header, kernel_name(c), threads, 1, format("%s<%s, %d>", name, spelled(c.type), threads), "",
                 params);
}

int threads_of(const ForwardConfig& c) { return c.warps * 32; }
int threads_of(const Sm90ForwardConfig& c) { return c.threads(); }
int threads_of(const BackwardConfig& c) { return c.warps() * 32; }
int threads_of(const Sm90BackwardConfig& c) { return c.threads(); }
int threads_of(const DbiasConfig& c) { return c.threads(); }
int threads_of(const DecodeConfig& c) { return c.warps * 32; }
int threads_of(const SmallConfig& c) { return small_kernel(c.kernel).threads; }

int shared_of(const ForwardConfig& c) {
  const int bias_size = has(c.terms, Terms::wide_bias) ? 4 : 2;
  const int bias = has(c.terms, Terms::bias) ? c.block_m * c.block_n * bias_size : 0;
  const int kept = has(c.terms, Terms::dropout) ? c.block_m / 16 * 2 * 32 * 4 : 0;
  const int loop = (c.block_m * c.head_dim + c.block_n * (c.head_dim + c.head_dim_v)) * 2;
  return bias + kept + std::max(loop, c.block_m * c.head_dim_v * 2);
}
int shared_of(const Sm90ForwardConfig& c) {
  const int queries = c.o_apart() ? c.block_m * (c.head_dim + c.o_cols())
                                  : c.q_stages * c.block_m * std::max(c.head_dim, c.head_dim_v);
  const int keys = c.stages * c.block_n * (c.head_dim + c.head_dim_v);
  const int kept = has(c.terms, Terms::dropout) ? c.consumers() * 128 * 2 * 4 : 0;
  const int bias_size = has(c.terms, Terms::wide_bias) ? 4 : 2;
  const int bias = has(c.terms, Terms::bias) ? c.block_m * c.block_n * bias_size : 0;
  const int barriers = (c.q_stages * c.consumers() + 2 * c.stages) * 2 * 8, sorted = most_sorted * 5;
  const int work = 2 * c.consumers() * 16 * 4;
  return ((queries + keys) * 2 + bias + kept + barriers + work + sorted + 1023) / 1024 * 1024;
}
int shared_of(const BackwardConfig& c) {
  const int keys = c.block_n * (c.head_dim + c.head_dim_v), queries = c.block_m * (c.head_dim + c.head_dim_v);
  const int passed = c.block_n * c.block_m * (c.split == 1 ? 1 : 2);
  const int rest = 2 * c.block_m * 4 + 8;
  return (((keys + queries * c.stages + passed) * 2 + rest) + 127) / 128 * 128;
}
int shared_of(const Sm90BackwardConfig& c) {
  constexpr int facts = 48, work_stages = 4, work = 64;
  const int keys = c.block_n * (c.head_dim + c.head_dim_v);
  const int queries = c.block_m * (c.q_stages * c.head_dim + c.dout_stages * c.head_dim_v);
  const int ds = c.ds_stages() * c.block_m * c.block_n;
  const int dq = c.dq_direct() ? 0 : c.dq_stages() * c.consumers() * 64 * c.dq_cols();
  const int p = c.wide() ? c.block_m * c.block_n : 0;
  const int leaving = c.own_leave() ? c.block_n * std::max(c.head_dim, c.head_dim_v) : 0;
  const int rows = c.row_stages() * (2 * c.block_m * 4 + facts);
  const int barriers =
      (work_stages + 2 + c.q_stages + c.dout_stages + c.row_stages() + c.dq_turns() + 1 + c.ds_stages()) * 2 *
      8;
  return ((keys + queries + ds + leaving) * 2 + (dq + p) * 4 + rows + work_stages * work + barriers + 8 +
          1023) /
         1024 * 1024;
}
int shared_of(const DbiasConfig& c) {
  const int rest = (2 * c.block + c.block * (c.block + 1)) * 4;
  return (2 * c.block * (c.head_dim + c.head_dim_v) * 2 + rest + 127) / 128 * 128;
}
int shared_of(const DecodeConfig& c) {
  const int ring = c.warps * c.stages * c.keys * (c.head_dim + c.head_dim_v) * c.number_bytes();
  const int joined = c.warps * c.block_m * (c.head_dim_v + 4) * 4;
  const int states = c.warps * c.block_m * 8;
  const int sent = c.cluster == 1 ? 1 : c.block_m * (c.head_dim_v / 4) + c.cluster;
  const auto padded = [](int bytes) { return (bytes + 127) / 128 * 128; };
  return padded(padded(std::max(ring, joined)) + std::max(c.block_m, 16) * c.head_dim * 2 + states +
                sent * (16 + 8));
}
int shared_of(const SmallConfig&) { return 0; }

ForwardConfig forward_config(const DeviceLimits& limits, Half type, int head_dim, int head_dim_v, Terms terms,
                             bool aligned) {
  const TileTable& table = table_for(limits);
  const bool only_bias = without(terms, Terms::wide_bias) == Terms::bias && aligned;
  const auto& rows = only_bias                 ? table.forward_bias
                     : has(terms, Terms::bias) ? table.forward_both
                     : is_light(limits, terms) ? table.forward
                                               : table.forward_terms;
  const ForwardTiles tiles = row_for(rows, std::max(head_dim, head_dim_v));
  return {type,        tile_width(head_dim), tile_width(head_dim_v), tiles.block_m, tiles.block_n,
          tiles.warps, tiles.per_sm,         tiles.q_in_registers,   aligned,       terms};
}
BackwardConfig backward_config(const DeviceLimits& limits, Half type, int head_dim, int head_dim_v,
                               Terms terms, bool aligned) {
  const TileTable& table = table_for(limits);
  const BackwardTiles tiles = row_for(is_light(limits, terms) ? table.backward : table.backward_terms,
                                      std::max(head_dim, head_dim_v));
  // Shared by several warps, columns of 96 come in no whole parts.
  const auto width_of = [&](int dim) {
    return tiles.split > 1 ? std::max(tile_width(dim), dim > 64 ? 128 : 64) : tile_width(dim);
  };
  // Warps share dq by rows and columns of at least 16.
  const int width = width_of(head_dim), warps = tiles.block_n / 16 * tiles.split;
  int dq_warps_m = tiles.dq_warps_m;
  while (width * dq_warps_m % (warps * 16) != 0) dq_warps_m *= 2;
  BackwardConfig config{type,        width,        width_of(head_dim_v), tiles.block_m, tiles.block_n,
                        tiles.split, tiles.stages, dq_warps_m,           tiles.per_sm,  tiles.kv_in_registers,
                        aligned,     terms};
  if (shared_of(config) > limits.shared_per_block) config.stages = 1;
  return config;
}
std::int64_t most_joined_rows(int head_dim_v) {
  for (const int rows : {16, 8}) {
    if (joins(rows, head_dim_v)) return rows;
  }
  return 0;
}
DecodeConfig decode_config(const DeviceLimits& limits, Half type, int head_dim, int head_dim_v,
                           std::int64_t rows, bool aligned, Stored stored) {
  DecodeTiles tiles = row_for(table_for(limits).decode, std::max(head_dim, head_dim_v));
  // A row of bytes is no 96 of them wide.
  const auto width = [&](int dim) {
    const int cols = tile_width(dim);
    return stored != Stored::half && cols == 96 ? 128 : cols;
  };
  // As many bytes under way as of 16-bit numbers: by twice the keys a step, where there are registers, for
  // half the instructions a key. Of any number of rows, for a sequence's bits depend on a step's keys: so
  // there are no 32 rows where they and 32 keys want too many registers.
  if (stored != Stored::half) {
    const int most = width(std::max(head_dim, head_dim_v));
    (most > 128 || tiles.keys > 16 ? tiles.stages : tiles.keys) *= 2;
    if (most > 64) tiles.block_m = 16;
  }
  const int block_m = rows <= 8 ? 8 : rows <= 16 ? 16 : tiles.block_m;
  const int levels = joins(block_m, width(head_dim_v)) ? 4 : 0;
  return {type,         width(head_dim), width(head_dim_v), block_m, tiles.warps, tiles.keys,
          tiles.stages, levels,          tiles.per_sm,      1,       aligned,     stored};
}
DecodeConfig alone(const DeviceLimits& limits, DecodeConfig config) {
  DecodeConfig deep = config;
  deep.per_sm = 1;
  deep.stages *= 2;
  return shared_of(deep) <= limits.shared_per_block ? deep : config;
}
DecodeConfig merged(const DeviceLimits& limits, DecodeConfig config) {
  DecodeConfig one = config;
  one.per_sm = 1;
  one.warps *= 2;
  const bool measured = limits.arch == 90 && config.head_dim == 128 && config.head_dim_v == 128;
  const bool joins = config.levels > 0;
  return measured && joins && config.per_sm == 2 && shared_of(one) <= limits.shared_per_block ? one : config;
}
DbiasConfig dbias_config(const DeviceLimits& limits, Half type, int head_dim, int head_dim_v, Terms terms,
                         bool aligned) {
  DbiasConfig config{type, tile_width(head_dim), tile_width(head_dim_v), 64, aligned, terms};
  if (shared_of(config) > limits.shared_per_block) config.block = 32;
  return config;
}

Sm90ForwardConfig sm90_forward_config(Half type, int head_dim, int head_dim_v, Terms terms) {
  const auto& rows = has(terms, Terms::wide_bias) ? sm90_forward_wide_bias
                     : has(terms, Terms::bias)    ? sm90_forward_bias
                     : has(terms, Terms::dropout) ? sm90_forward_dropout
                     : terms == Terms::softcap    ? sm90_forward_softcap
                     : terms != Terms::plain      ? sm90_forward_terms
                                                  : sm90_forward;
  const Sm90ForwardTiles tiles = row_for(rows, head_dim, head_dim_v);
  return {type,           tile_width(head_dim), tile_width(head_dim_v),
          tiles.block_m,  tiles.block_n,        tiles.stages,
          tiles.q_stages, tiles.turns,          terms};
}
Sm90ForwardConfig sm90_forward_config(const DeviceLimits& limits, const Problem& problem) {
  Sm90ForwardConfig config = sm90_forward_config(half_of(problem), static_cast<int>(problem.head_dim),
                                                 static_cast<int>(problem.head_dim_v), terms_of(problem));
  config.grouped = groups_heads(config, limits, problem);
  return config;
}

Sm90BackwardConfig sm90_backward_config(Half type, int head_dim, int head_dim_v, Terms terms, bool ordered) {
  const Sm90BackwardTiles tiles =
      row_for(terms == Terms::plain ? sm90_backward : sm90_backward_terms, head_dim, head_dim_v);
  return {type,           tile_width(head_dim), tile_width(head_dim_v), tiles.block_m,         tiles.block_n,
          tiles.q_stages, tiles.dout_stages,    tiles.dv_parts,         tiles.ds_in_registers, terms,
          ordered};
}
Sm90BackwardConfig sm90_backward_config(const DeviceLimits& limits, const Problem& problem) {
  Sm90BackwardConfig config = sm90_backward_config(
      half_of(problem), static_cast<int>(problem.head_dim), static_cast<int>(problem.head_dim_v),
      without(terms_of(problem), Terms::wide_bias), problem.deterministic);
  if (!config.ordered) config.ordered = faster_in_order(config, limits, problem);
  return config;
}

ForwardConfig forward_config(const DeviceLimits& limits, const Problem& problem) {
  return forward_config(limits, half_of(problem), static_cast<int>(problem.head_dim),
                        static_cast<int>(problem.head_dim_v), terms_of(problem), inputs_aligned(problem));
}
BackwardConfig backward_config(const DeviceLimits& limits, const Problem& problem) {
  return backward_config(limits, half_of(problem), static_cast<int>(problem.head_dim),
                         static_cast<int>(problem.head_dim_v), without(terms_of(problem), Terms::wide_bias),
                         inputs_aligned(problem));
}
DbiasConfig dbias_config(const DeviceLimits& limits, const Problem& problem) {
  return dbias_config(limits, half_of(problem), static_cast<int>(problem.head_dim),
                      static_cast<int>(problem.head_dim_v), without(terms_of(problem), Terms::wide_bias),
                      inputs_aligned(problem));
}

bool rows_aligned(const View& view) {
  const std::int64_t size = size_of(view.dtype);
  const auto whole = [&](std::int64_t stride) { return stride * size % 16 == 0; };
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && whole(view.batch) && whole(view.seq) &&
         whole(view.head);
}
RowsArg rows_arg(const View& view) {
  return {view.data, view.batch, view.seq, view.head, view.dtype == DType::float32, rows_aligned(view)};
}

std::int64_t blocks_of(const ForwardConfig& config, const Problem& problem) {
  return problem.rows_q == 0 ? 0 : tiles_q(problem, config.block_m) * problem.num_heads_q;
}
std::int64_t blocks_of(const Sm90ForwardConfig& config, const Problem& problem, const DeviceLimits& limits) {
  return std::min<std::int64_t>(tile_order(config, problem, limits).units, limits.multiprocessors);
}
std::int64_t blocks_of(const BackwardConfig& config, const Problem& problem) {
  return problem.rows_k == 0 ? 0 : tiles_k(problem, config.block_n) * problem.num_heads_k;
}
std::int64_t backward_tiles(const Sm90BackwardConfig& config, const Problem& problem) {
  return problem.rows_k == 0 ? 0 : tiles_k(problem, config.block_n) * problem.num_heads_k;
}
KeyOrder key_order(const Sm90BackwardConfig& config, const Problem& problem, const DeviceLimits& limits) {
  if (backward_tiles(config, problem) == 0) return {1, 0, 1};
  const std::int64_t lists = (problem.packed ? 1 : problem.batch) * problem.num_heads_k;
  // Blocks of threads that are at the same sequence and head follow one another in the time that one addition
  // takes, and the last has to wait for all of them at first: so twice as many lists as would fill the
  // device.
  const std::int64_t blocks = ceil_div(
      problem.rows_k, config.block_n * (problem.packed ? std::max<std::int64_t>(problem.batch, 1) : 1));
  const std::int64_t beside = std::clamp<std::int64_t>(2 * limits.multiprocessors / blocks, 1, lists);
  return {static_cast<unsigned>(backward_tiles(config, problem) / lists), static_cast<unsigned>(lists),
          static_cast<unsigned>(beside)};
}
std::int64_t blocks_of(const Sm90BackwardConfig& config, const Problem& problem, const DeviceLimits& limits) {
  return std::min<std::int64_t>(backward_tiles(config, problem), limits.multiprocessors);
}
std::int64_t blocks_of(const DbiasConfig& config, const Problem& problem) {
  const auto& extent = problem.dbias.extent;
  return extent[0] * extent[1] * ceil_div(extent[2], config.block) * ceil_div(extent[3], config.block);
}
std::int64_t blocks_of(const SmallConfig& config, const Problem& problem) {
  switch (config.kernel) {
    case Small::delta:
      return std::max<std::int64_t>(1, ceil_div(all_rows_q(problem), delta_rows));  // it clears, too
    case Small::dsinks:
      return problem.num_heads_q;
    case Small::convert_dq:
      return problem.rows_q == 0 ? 0 : ceil_div(tiles_q(problem, 16) * problem.num_heads_q, dq_warps);
    case Small::merge:
      return ceil_div(all_rows_q(problem) * problem.num_heads_q, threads_of(config) / 32);
    case Small::append:
    case Small::combine:
      break;  // plan/decode.h
  }
  return 0;
}

namespace {

BackwardWorkspace backward_workspace(int block_m, bool ordered, bool adds, const Problem& problem) {
  const auto padded = [](std::int64_t bytes) { return ceil_div(bytes, workspace_step) * workspace_step; };
  BackwardWorkspace w;
  w.dq_acc = padded(all_rows_q(problem) * problem.num_heads_q * 4);  // delta stands first
  w.turn = w.dq_acc +
           padded(tiles_q(problem, 16) * problem.num_heads_q * 16 * ceil_div(problem.head_dim, 8) * 8 * 4);
  w.ticket = w.turn + (ordered ? tiles_q(problem, block_m) * problem.num_heads_q * 4 : 0);
  w.end = padded(w.ticket + 4);
  w.clear = adds ? w.dq_acc : w.turn;
  w.ordered = ordered;
  return w;
}

}  // namespace

BackwardWorkspace backward_workspace(const BackwardConfig& config, const Problem& problem) {
  return backward_workspace(config.block_m, problem.deterministic, true, problem);
}
// Where sums have an order, Hopper's kernel does not add to what it finds: the first one is stored.
BackwardWorkspace backward_workspace(const Sm90BackwardConfig& config, const Problem& problem) {
  return backward_workspace(config.block_m, config.ordered, !config.ordered, problem);
}

}  // namespace tessera::cuda
