// The yardstick of decode: memory that is read in a plain loop, as fast as this machine does it, all threads
// at once.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::cli {

struct Span {
  const void* data;
  std::size_t bytes;
};

// Bytes/s of one pass over the spans. Threads take pieces as they are free, as they take decode's tasks: one
// that the host holds up does not hold up the others.
[[nodiscard]] double measure_read_rate(int threads, const std::vector<Span>& spans);

}  // namespace tessera::cli
