#include "core/threads.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

namespace tessera {

int usable_cores() {
  static const int cores = [] {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  }();
  return cores;
}

Result<int> default_threads() {
  const char* given = std::getenv("TESSERA_NUM_THREADS");  // NOLINT(concurrency-mt-unsafe): only read
  const std::string_view text(given == nullptr ? "" : given);
  if (text.empty()) return usable_cores();
  int threads = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
  if (error == std::errc() && end == text.data() + text.size() && threads >= 1 && threads <= max_threads)
    return threads;
  return Status(Code::invalid_argument, "TESSERA_NUM_THREADS: \"" + std::string(text) + "\", expected 1 to " +
                                            std::to_string(max_threads));
}

}  // namespace tessera
