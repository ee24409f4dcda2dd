// The CPU backend's one door.
#pragma once

#include <span>

#include "core/kernel.h"

namespace tessera::cpu {

[[nodiscard]] std::span<const Kernel> kernels();

}  // namespace tessera::cpu
