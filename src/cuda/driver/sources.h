// What embed.cmake makes of the kernels' sources: embedded_sources() of driver.h, and their hash.
#pragma once

#include <string_view>

#include "cuda/driver/driver.h"

namespace tessera::cuda {

// Of every name and text, computed when the library was built.
[[nodiscard]] std::string_view embedded_hash();

}  // namespace tessera::cuda
