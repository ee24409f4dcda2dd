#include "cli/table.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace tessera::cli {
namespace {

constexpr std::size_t min_width = 8;

struct Unit {
  double size;
  const char* name;
};

template <std::size_t N>
std::string with_unit(double value, const std::array<Unit, N>& units) {
  const auto fits = std::find_if(units.begin(), units.end(), [&](const Unit& u) { return value >= u.size; });
  const Unit& unit = fits == units.end() ? units.back() : *fits;
  const double scaled = value / unit.size;
  return fixed(scaled, scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2) + " " + unit.name;
}

}  // namespace

Table::Table(std::vector<std::string> header) : header_(std::move(header)) {
  for (const std::string& cell : header_) width_.push_back(std::max(min_width, cell.size()));
}

void Table::add(std::vector<std::string> row) {
  for (std::size_t i = 0; i < row.size(); ++i) width_[i] = std::max(width_[i], row[i].size());
  rows_.push_back(std::move(row));
}

void Table::print_row(const std::vector<std::string>& row) const {
  std::string line;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::size_t pad = width_[i] - std::min(width_[i], row[i].size());
    // The first column is text: to the left. Figures: to the right.
    line += i == 0 ? row[i] + std::string(pad, ' ') : "  " + std::string(pad, ' ') + row[i];
  }
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void Table::print_header() const {
  print_row(header_);
  std::vector<std::string> rule;
  rule.reserve(width_.size());
  for (const std::size_t width : width_) rule.emplace_back(width, '-');
  print_row(rule);
}

void Table::print() const {
  print_header();
  for (const auto& row : rows_) print_row(row);
}

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string bytes_text(double bytes) {
  static constexpr std::array<Unit, 4> units = {{{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}, {1, "B"}}};
  return with_unit(bytes, units);
}

std::string seconds_text(double seconds) {
  static constexpr std::array<Unit, 3> units = {{{1, "s"}, {1e-3, "ms"}, {1e-6, "us"}}};
  return with_unit(seconds, units);
}

}  // namespace tessera::cli
