// Resident memory of this process, in bytes (Linux; 0 elsewhere).
#pragma once

#include <cstdint>

namespace tessera::cli {

[[nodiscard]] std::int64_t resident();
[[nodiscard]] std::int64_t peak_resident();
// Starts the peak anew from what is resident now. Where the kernel does not allow it the peak stays, which
// can only make a figure worse.
void reset_peak_resident();

}  // namespace tessera::cli
