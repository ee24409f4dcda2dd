#include "dispatch/dispatch.h"

#include <cstdlib>
#include <vector>

#include "cpu/kernels.h"
#if defined(TESSERA_CUDA)
#include "cuda/launch/kernels.h"
#endif

namespace tessera {
namespace {

thread_local const char* last_name = "";

const Kernel* find(std::span<const Kernel> kernels, std::string_view name) {
  for (const Kernel& kernel : kernels) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

Status unknown_name(std::span<const Kernel> kernels, std::string_view name) {
  std::string message = "kernel: " + std::string(name) + ", expected one of";
  const char* separator = " ";
  for (const Kernel& kernel : kernels) {
    message += separator;
    message += kernel.name;
    separator = ", ";
  }
  if (kernels.empty()) message += " none: this build has no kernels";
  return {Code::invalid_argument, std::move(message)};
}

Result<Choice> choose_forced(std::span<const Kernel> kernels, const Problem& problem, std::string_view name) {
  const Kernel* kernel = find(kernels, name);
  if (kernel == nullptr) return unknown_name(kernels, name);
  const std::string reason = refusal(*kernel, problem);
  if (!reason.empty()) {
    return Status(Code::unsupported, "kernel: " + std::string(name) + ", which refuses this call: " + reason);
  }
  return Choice{*kernel, kernel->plan(problem)};
}

Status check_workspace(const Workspace& workspace, std::size_t need) {
  const auto invalid = [](std::string message) { return Status(Code::invalid_argument, std::move(message)); };
  if (need == 0) return {};
  if (workspace.data == nullptr)
    return invalid("workspace: null, expected " + std::to_string(need) + " bytes");
  if (workspace.bytes < need) {
    return invalid("workspace: " + std::to_string(workspace.bytes) + " bytes, expected at least " +
                   std::to_string(need));
  }
  return {};
}

}  // namespace

std::span<const Kernel> all_kernels() {
  static const std::vector<Kernel> list = [] {
    std::vector<Kernel> all;
#if defined(TESSERA_CUDA)
    const std::span<const Kernel> cuda = cuda::kernels();
    all.insert(all.end(), cuda.begin(), cuda.end());
#endif
    const std::span<const Kernel> cpu = cpu::kernels();
    all.insert(all.end(), cpu.begin(), cpu.end());
    return all;
  }();
  return list;
}

std::string refusal(const Kernel& kernel, const Problem& problem) {
  std::string reason = kernel.unavailable();
  return reason.empty() ? kernel.why_not(problem) : reason;
}

Result<Choice> choose(std::span<const Kernel> kernels, const Problem& problem, std::string_view forced) {
  if (!forced.empty()) return choose_forced(kernels, problem, forced);
  // Those of another device would refuse: asking them takes time, and only an error needs their words.
  const std::string_view device = problem.on_host() ? "cpu" : "cuda";
  for (const Kernel& kernel : kernels) {
    if (kernel.device == device && refusal(kernel, problem).empty())
      return Choice{kernel, kernel.plan(problem)};
  }
  std::string reasons;
  for (const Kernel& kernel : kernels) {
    reasons += (reasons.empty() ? "" : "; ") + std::string(kernel.name) + ": " + refusal(kernel, problem);
  }
  if (reasons.empty()) reasons = "this build has no kernels";
  return Status(Code::unsupported, "no kernel takes this call: " + reasons);
}

Result<Choice> choose(const Problem& problem, std::string_view forced) {
  return choose(all_kernels(), problem, forced);
}

std::string forced_kernel(const Options& options) {
  if (!options.kernel.empty()) return options.kernel;
  const char* name = std::getenv("TESSERA_FORCE_KERNEL");  // NOLINT(concurrency-mt-unsafe): only read
  return name == nullptr ? "" : name;
}

Status run(std::span<const Kernel> kernels, const Problem& problem, std::string_view forced,
           const Workspace& workspace) {
  const Result<Choice> choice = choose(kernels, problem, forced);
  return choice.ok() ? run(problem, choice.value(), workspace) : choice.status();
}

Status run(const Problem& problem, const Choice& choice, const Workspace& workspace) {
  const auto& [kernel, plan] = choice;
  if (Status status = check_workspace(workspace, plan.workspace); !status.ok()) return status;
  Status status = kernel.run(problem, plan, workspace.data);
  if (status.ok()) last_name = kernel.name;
  return status;
}

Status run(const Problem& problem, std::string_view forced, const Workspace& workspace) {
  return run(all_kernels(), problem, forced, workspace);
}

Status prepare_problem(std::span<const Kernel> kernels, const Problem& problem, std::string_view forced) {
  const Result<Choice> choice = choose(kernels, problem, forced);
  if (!choice.ok()) return choice.status();
  const auto& [kernel, plan] = choice.value();
  return kernel.prepare == nullptr ? Status() : kernel.prepare(problem, plan);
}

Status prepare_problem(const Problem& problem, std::string_view forced) {
  return prepare_problem(all_kernels(), problem, forced);
}

const char* last_kernel_name() { return last_name; }

}  // namespace tessera
