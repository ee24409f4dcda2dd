// What ptxas says about a kernel.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver/driver.h"

namespace tessera::cuda {

// Of the one kernel that the log of ptxas -v is about; functions that it calls without inlining count as its
// own.
[[nodiscard]] Resources parse_resources(std::string_view log);

// The lines that warn, and those with a number (C7510): wgmma made serial, setmaxnreg ignored.
[[nodiscard]] std::vector<std::string> ptxas_warnings(std::string_view log);

// Whether a kernel with this log must not ship: spills, or a warning that costs most of its speed.
[[nodiscard]] bool is_refused(const Resources& resources, const std::vector<std::string>& warnings);

}  // namespace tessera::cuda
