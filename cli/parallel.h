// The command's own small thread team: for the peak, for standard attention and for filling buffers. The
// library has its own; these must not lean on what they are compared with.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tessera::cli {

// body(task) for every task below count, tasks handed out one by one.
template <class Body>
void parallel_for(int threads, std::int64_t count, const Body& body) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t task = next++; task < count; task = next++) body(task);
  };
  std::vector<std::jthread> team;
  for (std::int64_t t = 1; t < threads && t < count; ++t) team.emplace_back(work);
  work();
}

}  // namespace tessera::cli
