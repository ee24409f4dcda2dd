// Where a subcommand's JSON goes: to the terminal under --json, to the file of --out.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace tessera::cli {

inline void write_result(const nlohmann::json& result, bool json, const std::string& out) {
  const std::string text = result.dump(2) + "\n";
  if (json) std::fputs(text.c_str(), stdout);
  if (out.empty()) return;
  std::ofstream file(out);
  file << text;
  if (!file) throw CLI::FileError("--out: cannot write " + out);
}

}  // namespace tessera::cli
