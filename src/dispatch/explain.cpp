// explain(): the cost of a problem and the answer of every kernel.
#include <array>
#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "dispatch/dispatch.h"

namespace tessera {
namespace {

// (row, key) pairs of one query head, summed over the batch: those that the mask leaves, and all.
struct Pairs {
  double visible = 0, all = 0;
};

Pairs pairs_of(const Problem& problem, const Sequence& sequence) {
  const Mask mask = problem.mask(sequence);
  Pairs pairs;
  for (std::int64_t i = 0; i < sequence.seqlen_q; ++i)
    pairs.visible += static_cast<double>(mask.keys_of_row(i).size());
  pairs.all = static_cast<double>(sequence.seqlen_q) * static_cast<double>(sequence.seqlen_k);
  return pairs;
}

// The host does not read the lengths of a GPU's sequences: as if they were fully used, and packed ones
// equally long, to within one row.
Sequence sequence_of(const Problem& problem, std::int64_t b) {
  if (problem.on_host()) return problem.sequence(b);
  const auto share = [&](std::int64_t rows) {
    return problem.packed ? rows * (b + 1) / problem.batch - rows * b / problem.batch : rows;
  };
  Sequence s;
  s.seqlen_q = s.allocated_q = share(problem.rows_q);
  s.seqlen_k = s.allocated_k = share(problem.rows_k);
  return s;
}

Pairs count_pairs(const Problem& problem) {
  // Sequences of a dense batch without seqused are all alike.
  const bool shortened = problem.on_host() && (problem.seqused_q != nullptr || problem.seqused_k != nullptr);
  const bool alike = !problem.packed && !shortened;
  if (alike) {
    const Pairs one = problem.batch == 0 ? Pairs{} : pairs_of(problem, sequence_of(problem, 0));
    const auto batch = static_cast<double>(problem.batch);
    return {one.visible * batch, one.all * batch};
  }
  Pairs sum;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Pairs one = pairs_of(problem, sequence_of(problem, b));
    sum.visible += one.visible;
    sum.all += one.all;
  }
  return sum;
}

// Matmul operations of one pair. Forward: q k^T and p v. Backward: q k^T anew, dq and dk over head_dim, dp
// and dv over head_dim_v.
double flops_per_pair(const Problem& problem) {
  const auto dim = static_cast<double>(problem.head_dim), dim_v = static_cast<double>(problem.head_dim_v);
  return problem.direction == Direction::forward ? 2 * (dim + dim_v) : 2 * (3 * dim + 2 * dim_v);
}

// Compulsory traffic: every tensor once, and the workspace once. It is the lower bound that a roofline
// wants: the tiles of k and v that each block of queries reads again come from a cache, and what part of
// them does is the machine's affair and not the problem's. Options a few floats long do not count.
double count_bytes(const Problem& problem, const Plan& plan) {
  const double batch = problem.packed ? 1.0 : static_cast<double>(problem.batch);
  const double rows_q =
      batch * static_cast<double>(problem.rows_q) * static_cast<double>(problem.num_heads_q);
  const double rows_k =
      batch * static_cast<double>(problem.rows_k) * static_cast<double>(problem.num_heads_k);
  const auto dim = static_cast<double>(problem.head_dim), dim_v = static_cast<double>(problem.head_dim_v);
  double bytes = static_cast<double>(plan.workspace);
  const auto add = [&](const View& view, double elements) {
    if (view.given()) bytes += elements * static_cast<double>(size_of(view.dtype));
  };
  const auto add_bias = [&](const BiasView& view) {
    if (!view.given()) return;
    double elements = 1;
    for (const std::int64_t extent : view.extent) elements *= static_cast<double>(extent);
    bytes += elements * static_cast<double>(size_of(view.dtype));
  };
  add(problem.q, rows_q * dim);
  add(problem.k, rows_k * dim);
  add(problem.v, rows_k * dim_v);
  add(problem.o, rows_q * dim_v);
  add(problem.lse, rows_q);
  add(problem.dout, rows_q * dim_v);
  add(problem.dlse, rows_q);
  add(problem.dq, rows_q * dim);
  add(problem.dk, rows_k * dim);
  add(problem.dv, rows_k * dim_v);
  add_bias(problem.bias);
  add_bias(problem.dbias);
  return bytes;
}

std::string line(const char* name, const std::string& value) {
  std::array<char, 16> column{};
  std::snprintf(column.data(), column.size(), "%-12s", name);
  return column.data() + value + "\n";
}

std::string number(double value, const char* unit) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.6g %s", value, unit);
  return text.data();
}

}  // namespace

Result<Explanation> explain_problem(std::span<const Kernel> kernels, const Problem& problem,
                                    std::string_view forced) {
  const Result<Choice> choice = choose(kernels, problem, forced);
  if (!choice.ok() && choice.status().code() != Code::unsupported) return choice.status();

  Explanation explanation;
  Plan plan;
  if (choice.ok()) {
    plan = choice.value().plan;
    explanation.kernel = choice.value().kernel.name;
    explanation.block_m = plan.block_m;
    explanation.block_n = plan.block_n;
    explanation.threads = plan.threads;
    explanation.workspace = plan.workspace;
    if (choice.value().kernel.describe != nullptr) choice.value().kernel.describe(problem, explanation);
  }
  const Pairs pairs = count_pairs(problem);
  const double flops = static_cast<double>(problem.num_heads_q) * flops_per_pair(problem);
  explanation.flops = pairs.visible * flops;
  explanation.dense_flops = pairs.all * flops;
  explanation.bytes = count_bytes(problem, plan);
  for (const Kernel& kernel : kernels) {
    std::string reason = refusal(kernel, problem);
    if (reason.empty() && !forced.empty() && forced != kernel.name)
      reason = std::string(forced) + " is forced";
    if (!reason.empty()) explanation.refusals.push_back({kernel.name, std::move(reason)});
  }
  return explanation;
}

Result<Explanation> explain_problem(const Problem& problem, std::string_view forced) {
  return explain_problem(all_kernels(), problem, forced);
}

std::string Explanation::to_string() const {
  std::string text = line("kernel", kernel.empty() ? "none" : kernel);
  if (!kernel.empty()) {
    text += line("tile", std::to_string(block_m) + " x " + std::to_string(block_n));
    text += line("threads", std::to_string(threads));
  }
  if (registers > 0) {
    text += line("registers", std::to_string(registers) + " a thread");
    text += line("shared", std::to_string(shared_memory) + " bytes a block");
    text += line("occupancy", number(100 * occupancy, "% of the warps"));
  }
  if (!cubin.empty()) text += line("cubin", cubin + ", in " + number(1e3 * cubin_seconds, "ms"));
  text += line("flops", number(flops, "of ") + number(dense_flops, "without the mask"));
  text += line("bytes", number(bytes, "read and written"));
  text += line("workspace", std::to_string(workspace) + " bytes");
  const char* name = "refused";
  for (const Refusal& refusal : refusals) {
    text += line(name, refusal.kernel + ": " + refusal.reason);
    name = "";
  }
  return text;
}

std::string Explanation::to_json() const {
  nlohmann::ordered_json json;
  json["kernel"] = kernel.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(kernel);
  json["block_m"] = block_m;
  json["block_n"] = block_n;
  json["threads"] = threads;
  json["flops"] = flops;
  json["dense_flops"] = dense_flops;
  json["bytes"] = bytes;
  json["workspace"] = workspace;
  if (registers > 0) {
    json["registers"] = registers;
    json["shared_memory"] = shared_memory;
    json["occupancy"] = occupancy;
  }
  if (!cubin.empty()) {
    json["cubin"] = cubin;
    json["cubin_seconds"] = cubin_seconds;
  }
  json["refusals"] = nlohmann::ordered_json::array();
  for (const Refusal& refusal : refusals) {
    json["refusals"].push_back({{"kernel", refusal.kernel}, {"reason", refusal.reason}});
  }
  return json.dump();
}

}  // namespace tessera
