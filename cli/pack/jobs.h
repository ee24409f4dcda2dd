// Many compilations at once, each in a process of its own: a compiler that crashes takes one kernel with it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda/driver/driver.h"

namespace tessera::cli {

struct Outcome {
  std::string error;  // empty: there is a cubin
  cuda::Cubin cubin;
  double seconds = 0;
};

// work(i) for every i below count, at most `jobs` at a time, each in a child; done(i, outcome) here as they
// end, in any order. The caller has one thread, and has not used the compiler.
void run_jobs(std::size_t count, int jobs, const std::function<Result<cuda::Cubin>(std::size_t)>& work,
              const std::function<void(std::size_t, Outcome)>& done);

}  // namespace tessera::cli
