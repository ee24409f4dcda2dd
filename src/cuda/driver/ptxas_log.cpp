#include "cuda/driver/ptxas_log.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace tessera::cuda {
namespace {

template <class Body>
void for_each_line(std::string_view text, Body body) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    body(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// The number before a unit: 24 of "24 bytes spill stores" for " bytes spill stores". 0: the line has none.
int number_before(std::string_view line, std::string_view unit) {
  const std::size_t end = line.find(unit);
  if (end == std::string_view::npos) return 0;
  std::size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int number = 0;
  std::from_chars(line.data() + begin, line.data() + end, number);
  return number;
}

bool contains(std::string_view line, std::string_view part) {
  return line.find(part) != std::string_view::npos;
}

}  // namespace

Resources parse_resources(std::string_view log) {
  Resources resources;
  for_each_line(log, [&](std::string_view line) {
    resources.registers = std::max(resources.registers, number_before(line, " registers"));
    resources.shared_bytes = std::max(resources.shared_bytes, number_before(line, " bytes smem"));
    resources.stack_bytes = std::max(resources.stack_bytes, number_before(line, " bytes stack frame"));
    resources.spill_bytes +=
        number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
  });
  return resources;
}

std::vector<std::string> ptxas_warnings(std::string_view log) {
  std::vector<std::string> warnings;
  for_each_line(log, [&](std::string_view line) {
    if (contains(line, "warning") || contains(line, "(C7")) warnings.emplace_back(line);
  });
  return warnings;
}

bool is_refused(const Resources& resources, const std::vector<std::string>& warnings) {
  constexpr std::array<std::string_view, 5> grave = {"C7508", "C7510", "C7511", "C7514", "C7515"};
  const auto is_grave = [&](const std::string& line) {
    return std::any_of(grave.begin(), grave.end(),
                       [&](std::string_view number) { return contains(line, number); });
  };
  return resources.spill_bytes != 0 || std::any_of(warnings.begin(), warnings.end(), is_grave);
}

}  // namespace tessera::cuda
