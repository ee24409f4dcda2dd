#include "cli/memory.h"

#include <malloc.h>

#include <fstream>
#include <sstream>
#include <string>

namespace tessera::cli {
namespace {

std::int64_t status_field(const std::string& key) {
  std::ifstream lines("/proc/self/status");
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    std::istringstream fields(line.substr(key.size()));
    std::int64_t kilobytes = 0;
    fields >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

std::int64_t resident() { return status_field("VmRSS:"); }

// Not getrusage: its ru_maxrss survives exec, so a child would report its parent's peak.
std::int64_t peak_resident() { return status_field("VmHWM:"); }

void reset_peak_resident() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";
}

}  // namespace tessera::cli
