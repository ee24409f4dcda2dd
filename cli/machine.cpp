#include "cli/machine.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <system_error>

#include "core/threads.h"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

// The text behind "key : " in a file of such lines; empty if there is none.
std::string value_of(const char* file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    const auto colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  if (!pipe) return "";
  std::array<char, 256> line{};
  if (std::fgets(line.data(), static_cast<int>(line.size()), pipe.get()) == nullptr) return "";
  std::string text(line.data());
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

// Of the tree this binary lies in, if it lies in one.
std::string commit() {
  std::error_code error;
  const std::string folder = std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
  if (error || folder.find('\'') != std::string::npos) return "unknown";
  const std::string text =
      output_of("git -C '" + folder + "' describe --always --dirty --abbrev=12 2>/dev/null");
  return text.empty() ? "unknown" : text;
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

}  // namespace

std::string cpu_model() {
  const std::string model = value_of("/proc/cpuinfo", "model name");
  return model.empty() ? "unknown" : model;
}

int resolve_threads(int threads) { return threads > 0 ? threads : default_threads().or_throw(); }

std::int64_t available_memory() {
  std::istringstream text(value_of("/proc/meminfo", "MemAvailable"));
  std::int64_t kilobytes = 0;
  text >> kilobytes;
  return kilobytes * 1024;
}

std::int64_t last_level_cache() {
  std::map<std::string, std::int64_t> parts;  // by who shares them
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/devices/system/cpu", error)) {
    const std::filesystem::path part = entry.path() / "cache" / "index3";
    std::ifstream size_file(part / "size"), shared_file(part / "shared_cpu_list");
    std::int64_t kilobytes = 0;
    std::string shared;
    if (size_file >> kilobytes && std::getline(shared_file, shared)) parts[shared] = kilobytes * 1024;
  }
  std::int64_t bytes = 0;
  for (const auto& [shared, size] : parts) bytes += size;
  return bytes;
}

nlohmann::json machine(int threads) {
  return {{"cpu", cpu_model()},
          {"threads", threads},
          {"version", version()},
          {"commit", commit()},
          {"date", now()}};
}

}  // namespace tessera::cli
