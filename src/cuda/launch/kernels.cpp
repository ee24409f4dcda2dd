// Problem + plan -> arguments, workspace, launches.
#include "cuda/launch/kernels.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "core/attention_params.h"
#include "core/merge_params.h"
#include "cuda/driver/driver.h"
#include "cuda/launch/tensor_maps.h"
#include "cuda/plan/decode.h"
#include "cuda/plan/plan.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t max_blocks = std::numeric_limits<std::int32_t>::max();

DeviceLimits limits_of(const DeviceFacts& facts) {
  return {facts.arch, facts.shared_per_block, facts.multiprocessors};
}

// Of the problem's device, or of nothing where it is not one: why_not has spoken then.
DeviceLimits limits_of(const Problem& problem) {
  const Result<const DeviceFacts*> facts = device_facts(problem.device.device_id);
  return facts.ok() ? limits_of(*facts.value()) : DeviceLimits{};
}

BiasArg bias_arg(const BiasView& view) {
  const bool aligned =
      view.col == 1 && rows_aligned({view.data, view.dtype, view.batch, view.row, view.head});
  BiasArg arg{view.given() ? view.data : nullptr, view.batch, view.head, view.row, view.col, {},
              view.dtype == DType::float32,       aligned};
  for (int d = 0; d < 4; ++d) arg.extent[d] = view.extent[d];
  return arg;
}

AttentionParams make_params(const Problem& problem) {
  AttentionParams p{};
  p.q = rows_arg(problem.q);
  p.k = rows_arg(problem.k);
  p.v = rows_arg(problem.v);
  p.o = rows_arg(problem.o);
  p.lse = rows_arg(problem.lse);
  p.dout = rows_arg(problem.dout);
  p.dlse = rows_arg(problem.dlse);
  p.dq = rows_arg(problem.dq);
  p.dk = rows_arg(problem.dk);
  p.dv = rows_arg(problem.dv);
  p.batch = static_cast<int>(problem.batch);
  p.rows_q = static_cast<int>(problem.rows_q);
  p.rows_k = static_cast<int>(problem.rows_k);
  p.num_heads_q = static_cast<int>(problem.num_heads_q);
  p.num_heads_k = static_cast<int>(problem.num_heads_k);
  p.group_size = static_cast<int>(problem.group_size);
  p.head_dim = static_cast<int>(problem.head_dim);
  p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.cu_seqlens_q = problem.cu_seqlens_q;
  p.cu_seqlens_k = problem.cu_seqlens_k;
  p.seqused_q = problem.seqused_q;
  p.seqused_k = problem.seqused_k;
  p.window_left = problem.window_left;
  p.window_right = problem.window_right;
  p.top_left = problem.alignment == Alignment::top_left;
  p.scale = static_cast<float>(problem.softmax_scale);
  p.scale_log2 = static_cast<float>(problem.softmax_scale * 1.4426950408889634);
  p.softcap = static_cast<float>(problem.softcap);
  if (problem.softcap != 0) p.cap = CapInExponent(p.scale, p.softcap);
  p.alibi_slopes = problem.alibi_slopes;
  p.alibi_batch = problem.alibi_batch;
  p.alibi_head = problem.alibi_head;
  p.bias = bias_arg(problem.bias);
  p.dbias = bias_arg(problem.dbias);
  p.sinks = problem.sinks;
  p.dsinks = problem.dsinks;
  p.sinks_stride = problem.sinks_stride;
  p.dsinks_stride = problem.dsinks_stride;
  p.sinks_wide = p.dsinks_wide = problem.sinks_dtype == DType::float32;
  p.dropout = problem.dropout;
  return p;
}

Sm90Params sm90_params(const Problem& problem, const AttentionParams& attention) {
  const auto narrow = [](std::int64_t side) {
    return static_cast<int>(std::min<std::int64_t>(side, NarrowMask::unbounded));
  };
  return {attention, narrow(problem.window_left), narrow(problem.window_right)};
}

// Loads a kernel, and launches it unless only its loading is asked for or it has nothing to do.
class Stage {
 public:
  Stage(const Context& context, const Problem& problem, bool only_load)
      : context_(context), problem_(problem), only_load_(only_load) {}

  template <class Config>
  Status operator()(const Config& config, const AttentionParams& params) {
    return run(config, params, blocks_of(config, problem_));
  }
  Status operator()(const Sm90BackwardConfig& config, const Sm90BackwardParams& params) {
    return run(config, params, blocks_of(config, problem_, limits_of(context_.facts())));
  }
  Status operator()(const Sm90ForwardConfig& config, const Sm90ForwardParams& params) {
    return run(config, params, blocks_of(config, problem_, limits_of(context_.facts())));
  }
  template <class Config>
  Status operator()(const Config& config, const DecodeParams& params, std::int64_t blocks) {
    return run(config, params, blocks);
  }
  Status operator()(const SmallConfig& config, const MergeParams& params) {
    return run(config, params, blocks_of(config, problem_));
  }

 private:
  template <class Config, class Params>
  Status run(const Config& config, const Params& params, std::int64_t blocks) {
    if (blocks == 0 && !only_load_) return {};
    const Result<const LoadedKernel*> kernel =
        load(context_, kernel_name(config), shared_of(config), [&] { return program_text(config); });
    if (!kernel.ok() || only_load_) return kernel.status();
    const bool early =
        (problem_.direction == Direction::decode || waits(config)) && context_.facts().arch >= 90;
    return launch(*kernel.value(), static_cast<unsigned>(blocks), static_cast<unsigned>(threads_of(config)),
                  shared_of(config), problem_.stream, &params, early);
  }

  // Decode's kernels, and of backward those that follow another, wait for what is before them by themselves.
  template <class Config>
  static bool waits(const Config& /*config*/) {
    return std::is_same_v<Config, Sm90BackwardConfig>;
  }
  static bool waits(const SmallConfig& config) { return config.kernel == Small::convert_dq; }

  const Context& context_;
  const Problem& problem_;
  bool only_load_;
};

Status run_forward(const Context& context, const Problem& problem, bool only_load) {
  return Stage(context, problem, only_load)(forward_config(limits_of(context.facts()), problem),
                                            make_params(problem));
}

Status run_forward_sm90(const Context& context, const Problem& problem, bool only_load) {
  const DeviceLimits limits = limits_of(context.facts());
  const Sm90ForwardConfig config = sm90_forward_config(limits, problem);
  Sm90ForwardParams params{};
  static_cast<Sm90Params&>(params) = sm90_params(problem, make_params(problem));
  params.order = tile_order(config, problem, limits);
  if (!only_load && forward_tiles(config, problem) > 0) {
    if (Status status = fill_maps(config, problem, params); !status.ok()) return status;
  }
  return Stage(context, problem, only_load)(config, params);
}

// Delta, what bias and sinks want, the main kernel, dq.
template <class Config, class Main>
Status run_backward(const Context& context, const Problem& problem, void* workspace, bool only_load,
                    const Config& config, const Main& run_main) {
  const BackwardWorkspace places = backward_workspace(config, problem);
  AttentionParams params = make_params(problem);
  auto* const memory = static_cast<std::byte*>(workspace);
  params.delta = reinterpret_cast<float*>(memory + places.delta);
  params.dq_acc = reinterpret_cast<float*>(memory + places.dq_acc);
  params.turn = places.ordered ? reinterpret_cast<int*>(memory + places.turn) : nullptr;
  params.ticket = reinterpret_cast<int*>(memory + places.ticket);

  Stage stage(context, problem, only_load);
  AttentionParams clearing = params;
  clearing.dq_acc = reinterpret_cast<float*>(memory + places.clear);
  clearing.clear_bytes = places.end - places.clear;
  if (Status status = stage(SmallConfig{Small::delta, config.type}, clearing); !status.ok()) return status;
  if (problem.dsinks != nullptr) {
    if (Status status = stage(SmallConfig{Small::dsinks, config.type}, params); !status.ok()) return status;
  }
  if (problem.dbias.given()) {
    if (Status status = stage(dbias_config(limits_of(context.facts()), problem), params); !status.ok())
      return status;
  }
  if (Status status = run_main(stage, params); !status.ok()) return status;
  return stage(SmallConfig{Small::convert_dq, config.type}, params);
}
Status run_backward(const Context& context, const Problem& problem, void* workspace, bool only_load) {
  const BackwardConfig config = backward_config(limits_of(context.facts()), problem);
  return run_backward(context, problem, workspace, only_load, config,
                      [&](Stage& stage, const AttentionParams& params) { return stage(config, params); });
}

Status run_backward_sm90(const Context& context, const Problem& problem, void* workspace, bool only_load,
                         const Sm90BackwardConfig& config) {
  return run_backward(context, problem, workspace, only_load, config,
                      [&](Stage& stage, const AttentionParams& params) {
                        Sm90BackwardParams all{};
                        static_cast<Sm90Params&>(all) = sm90_params(problem, params);
                        all.order = key_order(config, problem, limits_of(context.facts()));
                        if (!only_load && backward_tiles(config, problem) > 0) {
                          if (Status status = fill_maps(config, problem, all); !status.ok()) return status;
                        }
                        return stage(config, all);
                      });
}

// The append, the main kernel, and what joins the splits where it does not do so itself.
Status run_decode(const Context& context, const Problem& problem, void* workspace, bool only_load,
                  bool clusters) {
  const DeviceLimits limits = limits_of(context.facts());
  const DecodeConfig config = decode_config(limits, problem, clusters);
  DecodeParams params = decode_params(limits, config, problem, make_params(problem));
  auto* const memory = static_cast<std::byte*>(workspace);
  params.o_partial = reinterpret_cast<float*>(memory);
  params.state_partial = reinterpret_cast<float*>(memory + decode_workspace(config, problem).state);
  Stage stage(context, problem, only_load);
  if (problem.cache.k_new.given()) {
    const SmallConfig append{Small::append, config.type};
    if (Status status = stage(append, params, append_blocks(problem)); !status.ok()) return status;
  }
  const std::int64_t combined = combine_blocks(config, problem);
  if (Status status = stage(config, params, blocks_of(config, problem)); !status.ok()) return status;
  return combined == 0 ? Status() : stage(SmallConfig{Small::combine, config.type}, params, combined);
}
Status execute_decode(const Problem& problem, void* workspace, bool only_load, bool clusters) {
  const Result<Context> context = Context::enter(problem.device.device_id);
  if (!context.ok()) return context.status();
  return run_decode(context.value(), problem, workspace, only_load, clusters);
}

constexpr SmallConfig merge_config{Small::merge, Half::bfloat16};

Status run_merge(const Context& context, const Problem& problem, bool only_load) {
  const auto state = [](const View& o, const View& lse) {
    return StateArg{rows_arg(o), o.dtype == DType::float16 ? Half::float16 : Half::bfloat16, rows_arg(lse)};
  };
  const auto& [o_a, lse_a, o_b, lse_b] = problem.states;
  MergeParams params{};
  params.a = state(o_a, lse_a);
  params.b = state(o_b, lse_b);
  params.all = state(problem.o, problem.lse);
  params.rows = (problem.packed ? 1 : problem.batch) * problem.rows_q * problem.num_heads_q;
  params.rows_q = static_cast<int>(problem.rows_q);
  params.num_heads = static_cast<int>(problem.num_heads_q);
  params.head_dim_v = static_cast<int>(problem.head_dim_v);
  return Stage(context, problem, only_load)(merge_config, params);
}

Status execute(const Problem& problem, void* workspace, bool only_load) {
  if (problem.direction == Direction::decode) return execute_decode(problem, workspace, only_load, false);
  const Result<Context> context = Context::enter(problem.device.device_id);
  if (!context.ok()) return context.status();
  if (problem.direction == Direction::merge) return run_merge(context.value(), problem, only_load);
  return problem.direction == Direction::forward
             ? run_forward(context.value(), problem, only_load)
             : run_backward(context.value(), problem, workspace, only_load);
}

std::string missing() { return unavailable(); }

std::int64_t most_decode_blocks(const DeviceLimits& limits, const Problem& problem, bool clusters) {
  const DecodeConfig config = decode_config(limits, problem, clusters);
  return std::max(
      {blocks_of(config, problem), append_blocks(problem), combine_blocks(config, problem), problem.rows_k});
}

std::string why_not(const Problem& problem) {
  if (problem.device.device_type != kDLCUDA) return "the tensors are not in GPU memory";
  const Result<const DeviceFacts*> facts = device_facts(problem.device.device_id);
  if (!facts.ok()) return facts.status().message();
  if (facts.value()->arch < 80) {
    return "it needs compute capability 8.0, " + facts.value()->name + " has " +
           std::to_string(facts.value()->arch / 10) + "." + std::to_string(facts.value()->arch % 10);
  }
  const bool merge = problem.direction == Direction::merge;
  if (problem.dtype == DType::float32 && !merge) return "its tiles are float16 or bfloat16, q is float32";
  if (std::max(problem.batch, problem.num_heads_q) > max_blocks)
    return "batch or num_heads_q is 2^31 or more";
  const DeviceLimits limits = limits_of(*facts.value());
  std::int64_t most = 0;
  if (merge) {
    most = blocks_of(merge_config, problem);
  } else if (problem.direction == Direction::forward) {
    most = blocks_of(forward_config(limits, problem), problem);
  } else if (problem.direction == Direction::decode) {
    most = most_decode_blocks(limits, problem, false);
  } else {
    const BackwardConfig config = backward_config(limits, problem);
    most = std::max({blocks_of(config, problem), blocks_of(SmallConfig{Small::delta, config.type}, problem),
                     blocks_of(SmallConfig{Small::convert_dq, config.type}, problem),
                     problem.dbias.given() ? blocks_of(dbias_config(limits, problem), problem) : 0});
  }
  if (most > max_blocks) return "the problem has " + std::to_string(most) + " tiles, more than 2^31 - 1";
  return "";
}

std::string why_not_sm90(const Problem& problem) {
  if (problem.device.device_type != kDLCUDA) return "the tensors are not in GPU memory";
  if (problem.direction == Direction::merge) return "merge_states has no products for its tiles";
  const Result<const DeviceFacts*> facts = device_facts(problem.device.device_id);
  if (!facts.ok()) return facts.status().message();
  if (facts.value()->arch != 90) {
    return "it needs compute capability 9.0, " + facts.value()->name + " has " +
           std::to_string(facts.value()->arch / 10) + "." + std::to_string(facts.value()->arch % 10);
  }
  if (problem.dtype == DType::float32) return "its tiles are float16 or bfloat16, q is float32";
  if (problem.direction == Direction::decode) return why_not(problem);
  if (std::string reason = why_no_maps(problem); !reason.empty()) return reason;
  if (std::max(problem.rows_q, problem.rows_k) >= NarrowMask::unbounded)
    return "q or k has 2^29 rows or more";
  if (problem.direction == Direction::backward) return why_not(problem);
  const std::int64_t tiles =
      std::max({problem.batch * problem.num_heads_q, problem.num_heads_q,
                forward_tiles(sm90_forward_config(limits_of(*facts.value()), problem), problem)});
  if (tiles > max_blocks) return "the problem has " + std::to_string(tiles) + " tiles, more than 2^31 - 1";
  return "";
}

Plan decode_plan(const Problem& problem, bool clusters) {
  const DecodeConfig config = decode_config(limits_of(problem), problem, clusters);
  Plan plan;
  plan.block_m = config.block_m;
  plan.block_n = config.warps * config.keys;
  plan.threads = threads_of(config);
  plan.workspace = static_cast<std::size_t>(decode_workspace(config, problem).end);
  return plan;
}

Plan plan(const Problem& problem) {
  if (problem.direction == Direction::decode) return decode_plan(problem, false);
  const DeviceLimits limits = limits_of(problem);
  Plan plan;
  if (problem.direction == Direction::merge) {
    plan.block_m = plan.block_n = 1;
    plan.threads = threads_of(merge_config);
  } else if (problem.direction == Direction::forward) {
    const ForwardConfig config = forward_config(limits, problem);
    plan.block_m = config.block_m;
    plan.block_n = config.block_n;
    plan.threads = threads_of(config);
  } else {
    const BackwardConfig config = backward_config(limits, problem);
    plan.block_m = config.block_m;
    plan.block_n = config.block_n;
    plan.threads = threads_of(config);
    plan.workspace = static_cast<std::size_t>(backward_workspace(config, problem).end);
  }
  return plan;
}

// Hopper's backward kernel, where it has tiles and TMA can copy what it loads. Otherwise cuda_sm80's runs.
std::optional<Sm90BackwardConfig> own_backward(const Problem& problem) {
  if (problem.direction != Direction::backward || !why_no_dout_map(problem).empty()) return {};
  return sm90_backward_config(limits_of(problem), problem);
}

Plan plan_sm90(const Problem& problem) {
  if (problem.direction == Direction::decode) return decode_plan(problem, true);
  Plan plan;
  const auto fill = [&](const auto& config) {
    plan.block_m = config.block_m;
    plan.block_n = config.block_n;
    plan.threads = threads_of(config);
  };
  if (problem.direction == Direction::forward) {
    fill(sm90_forward_config(limits_of(problem), problem));
    return plan;
  }
  const std::optional<Sm90BackwardConfig> config = own_backward(problem);
  if (!config) return cuda::plan(problem);
  fill(*config);
  // Enough for cuda_sm80's, too: without its address nobody knows whether TMA can copy dout.
  plan.workspace = std::max(static_cast<std::size_t>(backward_workspace(*config, problem).end),
                            cuda::plan(problem).workspace);
  return plan;
}

Status run(const Problem& problem, const Plan&, void* workspace) {
  return execute(problem, workspace, false);
}
Status prepare(const Problem& problem, const Plan&) { return execute(problem, nullptr, true); }

Status execute_sm90(const Problem& problem, void* workspace, bool only_load) {
  if (problem.direction == Direction::decode) return execute_decode(problem, workspace, only_load, true);
  const std::optional<Sm90BackwardConfig> backward = own_backward(problem);
  if (problem.direction == Direction::backward && !backward) return execute(problem, workspace, only_load);
  const Result<Context> context = Context::enter(problem.device.device_id);
  if (!context.ok()) return context.status();
  return backward ? run_backward_sm90(context.value(), problem, workspace, only_load, *backward)
                  : run_forward_sm90(context.value(), problem, only_load);
}
Status run_sm90(const Problem& problem, const Plan&, void* workspace) {
  return execute_sm90(problem, workspace, false);
}
Status prepare_sm90(const Problem& problem, const Plan&) { return execute_sm90(problem, nullptr, true); }

// Of the main kernel: loads it, and so compiles it where nobody has. Without a compiler there is nothing to
// say.
template <class Config>
void describe_kernel(const Context& context, const Config& config, Explanation& explanation) {
  const Result<const LoadedKernel*> loaded =
      load(context, kernel_name(config), shared_of(config), [&] { return program_text(config); });
  if (!loaded.ok()) return;
  const LoadedKernel& kernel = *loaded.value();
  explanation.registers = kernel.resources.registers;
  explanation.shared_memory = kernel.resources.shared_bytes + shared_of(config);
  explanation.cubin = name_of(kernel.origin);
  explanation.cubin_seconds = kernel.seconds;
  const Result<int> blocks = occupancy(kernel, threads_of(config), shared_of(config));
  if (blocks.ok() && context.facts().threads_per_multiprocessor > 0)
    explanation.occupancy =
        static_cast<double>(blocks.value()) * threads_of(config) / context.facts().threads_per_multiprocessor;
}
void describe(const Problem& problem, Explanation& explanation) {
  const Result<Context> context = Context::enter(problem.device.device_id);
  if (!context.ok()) return;
  const DeviceLimits limits = limits_of(context.value().facts());
  if (problem.direction == Direction::decode) {
    describe_kernel(context.value(), decode_config(limits, problem, false), explanation);
  } else if (problem.direction == Direction::forward) {
    describe_kernel(context.value(), forward_config(limits, problem), explanation);
  } else {
    describe_kernel(context.value(), backward_config(limits, problem), explanation);
  }
}

void describe_sm90(const Problem& problem, Explanation& explanation) {
  const std::optional<Sm90BackwardConfig> backward = own_backward(problem);
  if (problem.direction == Direction::backward && !backward) return describe(problem, explanation);
  const Result<Context> context = Context::enter(problem.device.device_id);
  if (!context.ok()) return;
  if (problem.direction == Direction::decode) {
    describe_kernel(context.value(), decode_config(limits_of(context.value().facts()), problem, true),
                    explanation);
  } else if (backward) {
    describe_kernel(context.value(), *backward, explanation);
  } else {
    describe_kernel(context.value(), sm90_forward_config(limits_of(context.value().facts()), problem),
                    explanation);
  }
}

constexpr std::array list{
    Kernel{"cuda_sm90", "TMA copies and wgmma tiles of float16 or bfloat16, float32 softmax; Hopper's own",
           missing, why_not_sm90, plan_sm90, run_sm90, prepare_sm90, describe_sm90, "cuda"},
    Kernel{"cuda_sm80", "mma.sync tiles of float16 or bfloat16, float32 softmax; every GPU since Ampere",
           missing, why_not, plan, run, prepare, describe, "cuda"},
};

}  // namespace

std::span<const Kernel> kernels() { return list; }

}  // namespace tessera::cuda
