// What a backend offers to dispatch: one Kernel a name, in the order of preference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/problem.h"

namespace tessera {

// What a kernel would do with a problem. Pure: the same problem and machine give the same plan.
struct Plan {
  std::int64_t block_m = 0, block_n = 0;
  int threads = 1;
  std::size_t workspace = 0;  // bytes
};

struct Kernel {
  const char* name;
  const char* description;
  // Why this machine cannot run it at all; empty: it can.
  std::string (*unavailable)();
  // Why it does not take this problem (on a machine that can run it); empty: it does.
  std::string (*why_not)(const Problem&);
  Plan (*plan)(const Problem&);
  // workspace has plan(problem).workspace bytes, at any address (a GPU's: at a multiple of 256).
  Status (*run)(const Problem&, const Plan&, void* workspace);
  // Compiles and loads what run() needs; null: there is nothing to do.
  Status (*prepare)(const Problem&, const Plan&) = nullptr;
  // Adds to an explanation what loading the kernel tells; null: there is nothing to add.
  void (*describe)(const Problem&, Explanation&) = nullptr;
  const char* device = "cpu";  // where its tensors lie: "cpu" or "cuda"
};

}  // namespace tessera
