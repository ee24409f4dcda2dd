// How many threads a call may use when it does not say.
#pragma once

#include "tessera/tessera.hpp"

namespace tessera {

inline constexpr int max_threads = 4096;

// The cores this process may run on: fewer than the machine has, under taskset or in a container.
[[nodiscard]] int usable_cores();

// TESSERA_NUM_THREADS, or if that is not set, or empty, every usable core. An error if it is no number from 1
// to max_threads.
[[nodiscard]] Result<int> default_threads();

}  // namespace tessera
