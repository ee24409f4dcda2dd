// The flags that describe one attention call, shared by every subcommand that takes one.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::cli {

struct ShapeFlags {
  std::int64_t batch = 1;
  std::int64_t seqlen = 1024;
  std::optional<std::int64_t> seqlen_q, seqlen_k;  // default: seqlen
  std::int64_t heads = 8;
  std::optional<std::int64_t> heads_k;  // default: heads
  std::int64_t head_dim = 64;
  std::optional<std::int64_t> head_dim_v;  // default: head_dim
  DType dtype = DType::float32;
};

struct OptionFlags {
  bool causal = false;
  std::optional<std::int64_t> window_left, window_right;
  bool top_left = false;
  std::optional<double> softmax_scale;
  double softcap = 0.0;
  bool alibi = false, bias = false, sinks = false;
  double dropout = 0.0;
  std::uint64_t seed = 0;
  std::vector<std::int32_t> lengths_q, lengths_k;  // packed when given
  std::vector<std::int32_t> seqused_q, seqused_k;
  bool deterministic = false;
  std::string kernel;
  int threads = 0;
};

struct CallFlags {
  ShapeFlags shape;
  OptionFlags options;
};

void add_shape(CLI::App& command, ShapeFlags& flags);
void add_options(CLI::App& command, OptionFlags& flags);
void add_kernel(CLI::App& command, std::string& kernel);
void add_threads(CLI::App& command, int& threads);

// Throws CLI::ValidationError, naming the flag, where two flags contradict each other.
void check(const CallFlags& flags);

// "float32", "fp32", ... -> the type.
[[nodiscard]] CLI::Validator dtype_name();
[[nodiscard]] const char* short_name(DType dtype);  // "fp32", "bf16", "fp16"

}  // namespace tessera::cli
