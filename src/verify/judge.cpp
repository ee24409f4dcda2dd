#include "verify/judge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace tessera::verify {
namespace {

std::string number(double x) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.9g", x);
  return text.data();
}

// "dq[0, 3, 1, 17]"
std::string place_of(const char* name, const Buffer& buffer, std::int64_t index) {
  const Tensor& view = buffer.tensor();
  std::array<std::int64_t, Tensor::max_rank> at{};
  for (int d = view.rank - 1; d >= 0; --d) {
    at[d] = index % view.shape[d];
    index /= view.shape[d];
  }
  std::string text = name;
  for (int d = 0; d < view.rank; ++d) text.append(d == 0 ? "[" : ", ").append(std::to_string(at[d]));
  return text.append("]");
}

double max_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double max = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= max)) max = difference;  // NaN stays
  }
  return max;
}

double max_abs(const std::vector<double>& values) {
  double max = 0;
  for (const double x : values) max = std::max(max, std::abs(x));
  return max;
}

// Twice the plain computation's error plus 1e-5 (docs/semantics.md). Where that error was small by luck
// (tensors of few elements, gradients that cancel to 0), four standard deviations of what it is a draw from:
// the errors on the way, and the rounding of the result.
double tolerance(double plain_error, double deviation, double result_rounding) {
  return std::max(2 * plain_error, 4 * std::hypot(deviation, result_rounding)) + 1e-5;
}

// The worst element of a tensor that came out.
struct Worst {
  std::int64_t index = -1;
  double error = 0;
  double excess = -1;  // error - tolerance, which can differ from element to element
};

void surroundings(Tensors& tensors, Direction direction, Comparison& comparison) {
  for (const auto& [name, buffer] : tensors.outputs(direction)) {
    if (!buffer->guards_intact())
      comparison.fail(std::string(name) + ": memory around its elements was overwritten");
  }
  for (const auto& [name, buffer] : tensors.inputs()) {
    if (!buffer->unchanged()) comparison.fail(std::string(name) + ": an input was changed");
  }
}

// False, with the reason, if the call failed or another kernel than the forced one ran.
bool runs(const Tensors& tensors, Direction direction, Verdict& verdict) {
  const char* what = direction == Direction::forward ? "forward" : "backward";
  const Status status = run(tensors, direction);
  if (!status.ok()) {
    verdict.failures.push_back(std::string(what) + " failed: " + status.message());
    return false;
  }
  verdict.kernel = last_kernel();
  if (!verdict.settings.kernel.empty() && verdict.kernel != verdict.settings.kernel) {
    verdict.failures.push_back(std::string(what) + " was run by " + verdict.kernel);
    return false;
  }
  return true;
}

}  // namespace

template <class Tolerance>
void Comparison::elements(const char* name, const Buffer& buffer, const std::vector<double>& exact,
                          double plain_error, Tolerance&& allowed) {
  if (buffer.size() != static_cast<std::int64_t>(exact.size())) {
    return fail(std::string(name) + ": has " + std::to_string(buffer.size()) + " elements, the oracle " +
                std::to_string(exact.size()));
  }
  Worst worst;
  std::int64_t unwritten = 0, first_unwritten = 0, not_finite = 0, first_not_finite = 0;
  for (std::int64_t i = 0; i < buffer.size(); ++i) {
    const double actual = buffer.get(i);
    if (buffer.unwritten(i)) {
      if (unwritten++ == 0) first_unwritten = i;
    } else if (actual != exact[i] && !(std::isfinite(actual) && std::isfinite(exact[i]))) {
      if (not_finite++ == 0) first_not_finite = i;
    } else if (actual != exact[i]) {
      const double error = std::abs(actual - exact[i]), excess = error - allowed(exact[i]);
      if (worst.index < 0 || excess > worst.excess) worst = {i, error, excess};
    }
  }
  if (unwritten > 0) {
    fail(place_of(name, buffer, first_unwritten) + " was not written, " + std::to_string(unwritten) + " of " +
         std::to_string(buffer.size()) + " were not");
  }
  if (not_finite > 0) {
    fail(place_of(name, buffer, first_not_finite) + " is " + number(buffer.get(first_not_finite)) +
         ", expected " + number(exact[first_not_finite]) + ", and so " + std::to_string(not_finite) + " of " +
         std::to_string(buffer.size()));
  }
  const double bound = worst.index < 0 ? allowed(0.0) : allowed(exact[worst.index]);
  scores_.push_back({name, worst.error, plain_error, bound});
  if (worst.index >= 0 && worst.excess > 0) {
    fail(place_of(name, buffer, worst.index) + " is " + number(buffer.get(worst.index)) + ", expected " +
         number(exact[worst.index]) + ": error " + number(worst.error) + ", tolerance " + number(bound) +
         ", plain error " + number(plain_error));
  }
}

void Comparison::tensor(const char* name, const Buffer& buffer, const std::vector<double>& exact,
                        const std::vector<double>& plain, double deviation) {
  const double plain_error = max_difference(exact, plain);
  const double result_rounding = reference::rounding(buffer.dtype()) * max_abs(exact);
  const double allowed = tolerance(plain_error, deviation, result_rounding);
  if (!std::isfinite(allowed)) {
    fail(std::string(name) + ": the plain computation is not finite, so that this case cannot be judged");
  }
  elements(name, buffer, exact, plain_error, [&](double) { return allowed; });
}

// 1e-5 relative plus 1e-5, or what float32 can do where large products cancel to a small score.
void Comparison::lse(const Buffer& buffer, const std::vector<double>& exact, const std::vector<double>& plain,
                     double deviation) {
  double plain_error = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (std::isfinite(exact[i])) plain_error = std::max(plain_error, std::abs(exact[i] - plain[i]));
  }
  elements("lse", buffer, exact, plain_error,
           [&](double x) { return std::max(1e-5 * std::abs(x) + 1e-5, 4 * deviation); });
}

Expected expect(const Tensors& tensors) {
  const Problem forward_problem = validate(tensors.forward_call()).or_throw();
  const Problem backward_problem = validate(tensors.backward_call()).or_throw();
  return {reference::forward(forward_problem), reference::plain_forward(forward_problem),
          reference::backward(backward_problem), reference::plain_backward(backward_problem),
          reference::deviations(backward_problem)};
}

void compare(Tensors& tensors, const Expected& expected, Direction direction, Verdict& verdict) {
  Comparison comparison(verdict.scores, verdict.failures);
  const reference::Deviations& deviations = expected.deviations;
  if (direction == Direction::forward) {
    comparison.tensor("o", tensors.o, expected.outputs.o, expected.plain_outputs.o, deviations.o);
    if (tensors.settings.lse)
      comparison.lse(tensors.lse, expected.outputs.lse, expected.plain_outputs.lse, deviations.lse);
  } else {
    const reference::Gradients &exact = expected.gradients, &plain = expected.plain_gradients;
    comparison.tensor("dq", tensors.dq, exact.dq, plain.dq, deviations.dq);
    comparison.tensor("dk", tensors.dk, exact.dk, plain.dk, deviations.dk);
    comparison.tensor("dv", tensors.dv, exact.dv, plain.dv, deviations.dv);
    if (tensors.dbias.given())
      comparison.tensor("dbias", tensors.dbias, exact.dbias, plain.dbias, deviations.dbias);
    if (tensors.dsinks.given())
      comparison.tensor("dsinks", tensors.dsinks, exact.dsinks, plain.dsinks, deviations.dsinks);
  }
  surroundings(tensors, direction, comparison);
}

Case forced(Case c, const std::string& kernel) {
  c.kernel = kernel;
  const auto is_taken = [&] {
    const Tensors tensors(c);
    return workspace_size(as_planned(tensors.forward_call())).ok() &&
           workspace_size(as_planned(tensors.backward_call())).ok();
  };
  if (is_taken()) return c;
  // A GPU's two types have the same tiles, and take turns. float16 cannot hold the largest magnitudes.
  const bool gpu = on_gpu(kernel), odd = (c.seed + static_cast<std::uint64_t>(c.seqlen_k)) % 2 != 0;
  const DType half = gpu && odd && c.magnitude <= 3000 ? DType::float16 : DType::bfloat16;
  const auto adapted = [&](DType dtype) { return dtype == DType::float32 ? dtype : half; };
  c.dtype = c.o_dtype = half;
  c.grad_dtype = gpu && c.seed % 4 != 3 ? half : adapted(c.grad_dtype);
  c.bias_dtype = adapted(c.bias_dtype);
  c.sinks_dtype = adapted(c.sinks_dtype);
  if (!gpu || is_taken()) return c;
  // A copy engine wants rows of whole pieces of 16 bytes.
  for (Layout* layout : {&c.q_layout, &c.k_layout, &c.v_layout}) {
    if (*layout == Layout::misaligned || *layout == Layout::expanded) *layout = Layout::dense;
  }
  c.head_dim = (c.head_dim + 7) / 8 * 8;
  c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;
  return c;
}

Status run(const Tensors& tensors, Direction direction) {
  if (direction == Direction::forward) return run_call<Forward>(tensors.forward_call(), forward);
  return run_call<Backward>(tensors.backward_call(), backward);
}

Verdict judge(const Case& c) {
  Verdict verdict;
  verdict.settings = c;
  Tensors tensors(c);
  for (const Status& status :
       {validate(tensors.forward_call()).status(), validate(tensors.backward_call()).status()}) {
    if (!status.ok()) {
      verdict.failures.push_back("the call is not valid: " + status.message());
      return verdict;
    }
  }
  const Expected expected = expect(tensors);
  if (!runs(tensors, Direction::forward, verdict)) return verdict;
  compare(tensors, expected, Direction::forward, verdict);

  // Backward needs an lse even where the case has forward without one.
  if (!c.lse) {
    tensors.settings.lse = true;
    if (!runs(tensors, Direction::forward, verdict)) return verdict;
  }
  tensors.o.freeze();
  tensors.lse.freeze();
  if (!runs(tensors, Direction::backward, verdict)) return verdict;
  compare(tensors, expected, Direction::backward, verdict);
  if (!tensors.o.unchanged()) verdict.failures.emplace_back("o: backward changed it");
  if (!tensors.lse.unchanged()) verdict.failures.emplace_back("lse: backward changed it");
  return verdict;
}

std::string Verdict::to_string() const {
  std::string text = (ok() ? "ok" : "FAILED") + std::string(kernel.empty() ? "" : " by " + kernel) + "\n";
  for (const std::string& failure : failures) text += "  " + failure + "\n";
  for (const Score& score : scores) {
    text += "  " + score.tensor + ": error " + number(score.error) + ", plain " + number(score.plain_error) +
            ", tolerance " + number(score.tolerance) + "\n";
  }
  return text + "  tessera verify --case '" + verify::to_string(settings) + "'\n";
}

}  // namespace tessera::verify
