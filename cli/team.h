// Threads that start a measured loop together.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

namespace tessera::cli {

// Seconds that body(thread) takes on so many threads at once. Each takes its own times, for the thread that
// started them may be asleep while they work; from the first begin to the last end counts.
template <class Body>
double seconds_of_team(int threads, const Body& body) {
  using Clock = std::chrono::steady_clock;
  struct alignas(64) Slot {
    Clock::time_point begin, end;
  };
  std::vector<Slot> slots(static_cast<std::size_t>(threads));
  std::barrier start(threads);
  std::vector<std::jthread> team;
  team.reserve(slots.size());
  for (int t = 0; t < threads; ++t) {
    team.emplace_back([&, t] {
      Slot& slot = slots[static_cast<std::size_t>(t)];
      start.arrive_and_wait();
      slot.begin = Clock::now();
      body(t);
      slot.end = Clock::now();
    });
  }
  team.clear();  // joins
  Clock::time_point begin = slots[0].begin, end = slots[0].end;
  for (const Slot& slot : slots) {
    begin = std::min(begin, slot.begin);
    end = std::max(end, slot.end);
  }
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace tessera::cli
