#include "cli/flags.h"

#include <CLI/CLI.hpp>
#include <limits>

namespace tessera::cli {
namespace {

constexpr std::int64_t max_head_dim = 256;
constexpr std::int64_t max_extent = std::numeric_limits<std::int32_t>::max();

CLI::Range extent_from(std::int64_t low) { return {low, max_extent}; }

void require(bool condition, const char* flag, const std::string& message) {
  if (!condition) throw CLI::ValidationError(flag, message);
}

void check_lengths(const OptionFlags& options) {
  require(options.lengths_q.empty() == options.lengths_k.empty(),
          options.lengths_q.empty() ? "--lengths-q" : "--lengths-k",
          "expected as many as its counterpart has");
  require(options.lengths_q.size() == options.lengths_k.size(), "--lengths-k",
          std::to_string(options.lengths_k.size()) + " lengths, --lengths-q has " +
              std::to_string(options.lengths_q.size()));
}

void check_seqused(const char* flag, const std::vector<std::int32_t>& seqused, std::int64_t batch) {
  require(seqused.empty() || static_cast<std::int64_t>(seqused.size()) == batch, flag,
          std::to_string(seqused.size()) + " lengths, expected one a sequence: " + std::to_string(batch));
}

}  // namespace

CLI::Validator dtype_name() {
  // Not CLI::CheckedTransformer: it shows a DType as the character of that number.
  static const std::map<std::string, DType> names = {
      {"fp32", DType::float32},    {"fp16", DType::float16},    {"bf16", DType::bfloat16},
      {"float32", DType::float32}, {"float16", DType::float16}, {"bfloat16", DType::bfloat16}};
  const auto number = [](std::string& text) -> std::string {
    const auto found = names.find(CLI::detail::to_lower(text));
    if (found == names.end()) return text + ", expected fp32, fp16 or bf16";
    text = std::to_string(static_cast<int>(found->second));
    return "";
  };
  return {number, ""};
}

const char* short_name(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "fp32";
    case DType::float16:
      return "fp16";
    case DType::bfloat16:
      return "bf16";
    case DType::int32:
      return "int32";
    case DType::float8_e4m3fn:
      return "fp8";
    case DType::int8:
      return "int8";
  }
  return "?";
}

void add_kernel(CLI::App& command, std::string& kernel) {
  command.add_option("--kernel", kernel, "Force a kernel by name (tessera info lists them)");
}

void add_threads(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "Threads; 0: TESSERA_NUM_THREADS, else every core")
      ->check(CLI::Range(0, 4096));
}

void add_shape(CLI::App& command, ShapeFlags& flags) {
  const std::string group = "Shape";
  command.add_option("--batch", flags.batch, "Batch")
      ->check(extent_from(0))
      ->group(group)
      ->capture_default_str();
  command.add_option("--seqlen", flags.seqlen, "Queries and keys")
      ->check(extent_from(0))
      ->group(group)
      ->capture_default_str();
  command.add_option("--seqlen-q", flags.seqlen_q, "Queries, if not --seqlen")
      ->check(extent_from(0))
      ->group(group);
  command.add_option("--seqlen-k", flags.seqlen_k, "Keys, if not --seqlen")
      ->check(extent_from(0))
      ->group(group);
  command.add_option("--heads", flags.heads, "Query heads")
      ->check(extent_from(1))
      ->group(group)
      ->capture_default_str();
  command.add_option("--heads-k", flags.heads_k, "Key heads, a divisor of --heads")
      ->check(extent_from(1))
      ->group(group);
  const CLI::Range head_dims(std::int64_t{1}, max_head_dim);
  command.add_option("--head-dim", flags.head_dim, "Dimension of q and k")
      ->check(head_dims)
      ->group(group)
      ->capture_default_str();
  command.add_option("--head-dim-v", flags.head_dim_v, "Dimension of v, if not --head-dim")
      ->check(head_dims)
      ->group(group);
  command.add_option("--dtype", flags.dtype, "fp32, bf16 or fp16")
      ->transform(dtype_name())
      ->type_name("DTYPE")
      ->group(group);
}

void add_options(CLI::App& command, OptionFlags& flags) {
  const std::string group = "Options";
  const auto window = extent_from(0);
  command.add_flag("--causal", flags.causal, "No key after the query")->group(group);
  command.add_option("--window-left", flags.window_left, "Keys before the query; default unbounded")
      ->check(window)
      ->group(group);
  command.add_option("--window-right", flags.window_right, "Keys after the query; default unbounded")
      ->check(window)
      ->group(group);
  command.add_flag("--top-left", flags.top_left, "Align the mask at the first query, not at the last")
      ->group(group);
  command.add_option("--softmax-scale", flags.softmax_scale, "Default: 1 / sqrt(head dim)")->group(group);
  command.add_option("--softcap", flags.softcap, "c in c * tanh(s / c); 0: off")
      ->check(CLI::NonNegativeNumber)
      ->group(group);
  command.add_flag("--alibi", flags.alibi, "With ALiBi slopes")->group(group);
  command.add_flag("--bias", flags.bias, "With a bias (1, heads, seqlen_q, seqlen_k) and its gradient")
      ->group(group);
  command.add_flag("--sinks", flags.sinks, "With a sink a head and its gradient")->group(group);
  command.add_option("--dropout", flags.dropout, "Probability to drop")
      ->check(CLI::Range(0.0, 1.0))
      ->group(group);
  command.add_option("--seed", flags.seed, "Of the dropout")->group(group);
  command.add_option("--lengths-q", flags.lengths_q, "Packed: the sequences' queries, as 100,20,3")
      ->delimiter(',')
      ->check(window)
      ->group(group);
  command.add_option("--lengths-k", flags.lengths_k, "Packed: the sequences' keys")
      ->delimiter(',')
      ->check(window)
      ->group(group);
  command.add_option("--seqused-q", flags.seqused_q, "Queries in use, one a sequence")
      ->delimiter(',')
      ->check(window)
      ->group(group);
  command.add_option("--seqused-k", flags.seqused_k, "Keys in use, one a sequence")
      ->delimiter(',')
      ->check(window)
      ->group(group);
  command.add_flag("--deterministic", flags.deterministic, "Bitwise repeatable backward")->group(group);
  add_kernel(command, flags.kernel);
  add_threads(command, flags.threads);
}

void check(const CallFlags& flags) {
  const ShapeFlags& shape = flags.shape;
  if (shape.heads_k) {
    require(shape.heads % *shape.heads_k == 0, "--heads-k",
            std::to_string(*shape.heads_k) + " does not divide --heads " + std::to_string(shape.heads));
  }
  const OptionFlags& options = flags.options;
  require(!options.causal || options.window_right.value_or(0) == 0, "--window-right",
          "--causal means 0, not " + std::to_string(options.window_right.value_or(0)));
  check_lengths(options);
  const auto packed = static_cast<std::int64_t>(options.lengths_q.size());
  const std::int64_t batch = packed > 0 ? packed : shape.batch;
  check_seqused("--seqused-q", options.seqused_q, batch);
  check_seqused("--seqused-k", options.seqused_k, batch);
}

}  // namespace tessera::cli
