// The list of kernels, and the one place that answers which of them runs.
//
// Dispatch asks the kernels in order and takes the first without a reason to refuse. The same reasons make
// the error message and explain()'s list.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/kernel.h"

namespace tessera {

// Every kernel of every backend, the preferred first.
[[nodiscard]] std::span<const Kernel> all_kernels();

struct Choice {
  Kernel kernel{};
  Plan plan;
};

// Why the kernel does not take the problem on this machine; empty: it does.
[[nodiscard]] std::string refusal(const Kernel& kernel, const Problem& problem);

// The first kernel that fits, or the forced one. The first form has the kernels of all_kernels().
[[nodiscard]] Result<Choice> choose(const Problem& problem, std::string_view forced);
[[nodiscard]] Result<Choice> choose(std::span<const Kernel> kernels, const Problem& problem,
                                    std::string_view forced);

// The name that a call forces: its own option, else the environment's TESSERA_FORCE_KERNEL; empty: none.
[[nodiscard]] std::string forced_kernel(const Options& options);

// Checks the workspace, runs, and remembers the name for last_kernel().
[[nodiscard]] Status run(const Problem& problem, const Choice& choice, const Workspace& workspace);

// Chooses and runs.
[[nodiscard]] Status run(const Problem& problem, std::string_view forced, const Workspace& workspace);
[[nodiscard]] Status run(std::span<const Kernel> kernels, const Problem& problem, std::string_view forced,
                         const Workspace& workspace);

// Chooses, and lets the kernel compile and load what its run will need.
[[nodiscard]] Status prepare_problem(const Problem& problem, std::string_view forced);
[[nodiscard]] Status prepare_problem(std::span<const Kernel> kernels, const Problem& problem,
                                     std::string_view forced);

// The name of the kernel of this thread's last successful run; "" before the first.
[[nodiscard]] const char* last_kernel_name();

// What choose() would say, and what it would cost. A refusal of every kernel is an answer, not an error.
[[nodiscard]] Result<Explanation> explain_problem(const Problem& problem, std::string_view forced);
[[nodiscard]] Result<Explanation> explain_problem(std::span<const Kernel> kernels, const Problem& problem,
                                                  std::string_view forced);

}  // namespace tessera
