// explain(): the cost of a problem and the answer of every kernel.
#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdio>

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
  const auto share = [&](std::int64_t rows, bool packed) {
    return packed ? rows * (b + 1) / problem.batch - rows * b / problem.batch : rows;
  };
  Sequence s;
  const bool decode = problem.direction == Direction::decode;
  s.seqlen_q = s.allocated_q = share(problem.rows_q, problem.packed);
  s.seqlen_k = s.allocated_k = decode ? problem.max_seqlen_k : share(problem.rows_k, problem.packed);
  return s;
}

Pairs count_pairs(const Problem& problem) {
  // Sequences of a dense batch without seqused are all alike.
  const bool shortened = problem.on_host() && (problem.seqused_q != nullptr || problem.seqused_k != nullptr);
  const bool cached = problem.on_host() && problem.direction == Direction::decode;
  const bool alike = !problem.packed && !shortened && !cached;
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
  return problem.direction == Direction::backward ? 2 * (3 * dim + 2 * dim_v) : 2 * (dim + dim_v);
}

// Keys of the batch. A cache has room for more than it holds.
double count_keys(const Problem& problem) {
  if (problem.direction != Direction::decode)
    return (problem.packed ? 1.0 : static_cast<double>(problem.batch)) * static_cast<double>(problem.rows_k);
  double keys = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b)
    keys += static_cast<double>(sequence_of(problem, b).seqlen_k);
  return keys;
}

// Compulsory traffic: every tensor once, and the workspace once. It is the lower bound that a roofline
// wants: the tiles of k and v that each block of queries reads again come from a cache, and what part of
// them does is the machine's affair and not the problem's. Options a few floats long do not count.
double count_bytes(const Problem& problem, const Plan& plan) {
  const double batch = problem.packed ? 1.0 : static_cast<double>(problem.batch);
  const double rows_q =
      batch * static_cast<double>(problem.rows_q) * static_cast<double>(problem.num_heads_q);
  const double rows_k = count_keys(problem) * static_cast<double>(problem.num_heads_k);
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

// ---- JSON, on one line: what explain needs of it, and no more.

std::string json(std::string_view text) {
  constexpr std::string_view special = "\"\\\b\f\n\r\t", letters = "\"\\bfnrt";
  std::string quoted = "\"";
  for (const char c : text) {
    if (const std::size_t i = special.find(c); i != std::string_view::npos) {
      quoted += {'\\', letters[i]};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      quoted += escape.data();
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string json(std::integral auto value) { return std::to_string(value); }

// As few digits as give the same double again, and a point or an exponent, so that it is read as one.
std::string json(std::floating_point auto value) {
  if (!std::isfinite(value)) return "null";
  const auto size = std::abs(value);
  const bool fixed = size == 0 || (size >= 1e-4 && size < 1e15);
  std::array<char, 32> digits{};
  const std::to_chars_result end =
      std::to_chars(digits.data(), digits.data() + digits.size(), value,
                    fixed ? std::chars_format::fixed : std::chars_format::scientific);
  const std::string text(digits.data(), end.ptr);
  return fixed && text.find('.') == std::string::npos ? text + ".0" : text;
}

class JsonObject {
 public:
  template <class Value>
  JsonObject& add(const char* name, const Value& value) {
    return add_text(name, json(value));
  }
  // The value is JSON already.
  JsonObject& add_text(const char* name, const std::string& value) {
    members_ += (members_.empty() ? "" : ",") + json(name) + ":" + value;
    return *this;
  }
  [[nodiscard]] std::string text() const { return "{" + members_ + "}"; }

 private:
  std::string members_;
};

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
  JsonObject object;
  object.add_text("kernel", kernel.empty() ? "null" : json(kernel));
  object.add("block_m", block_m).add("block_n", block_n).add("threads", threads);
  object.add("flops", flops).add("dense_flops", dense_flops).add("bytes", bytes).add("workspace", workspace);
  if (registers > 0)
    object.add("registers", registers).add("shared_memory", shared_memory).add("occupancy", occupancy);
  if (!cubin.empty()) object.add("cubin", cubin).add("cubin_seconds", cubin_seconds);
  std::string list;
  for (const Refusal& refusal : refusals) {
    list += list.empty() ? "" : ",";
    list += JsonObject().add("kernel", refusal.kernel).add("reason", refusal.reason).text();
  }
  return object.add_text("refusals", "[" + list + "]").text();
}

}  // namespace tessera
