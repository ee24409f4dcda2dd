// Text tables, and numbers as people read them.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  void print() const;         // the whole table
  void print_header() const;  // or line by line, as results come in
  void print_row(const std::vector<std::string>& row) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::size_t> width_;
  std::vector<std::vector<std::string>> rows_;
};

[[nodiscard]] std::string fixed(double value, int digits);
[[nodiscard]] std::string bytes_text(double bytes);      // "12.3 MB"
[[nodiscard]] std::string seconds_text(double seconds);  // "12.3 ms"

}  // namespace tessera::cli
