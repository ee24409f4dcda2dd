// The GPU backend's one door.
#pragma once

#include <span>

#include "core/kernel.h"

namespace tessera::cuda {

[[nodiscard]] std::span<const Kernel> kernels();

}  // namespace tessera::cuda
