#include "cli/child.h"

#include <array>
#include <cstdio>
#include <filesystem>
#include <stdexcept>

#include "cli/call.h"

namespace tessera::cli {
namespace {

std::string quoted(const std::string& text) {
  if (text.find('\'') != std::string::npos) throw std::runtime_error("cannot quote for the shell: " + text);
  return "'" + text + "'";
}

std::string command_line(Implementation implementation, Direction direction, const CallFlags& flags) {
  const ShapeFlags& shape = flags.shape;
  const OptionFlags& options = flags.options;
  std::string line = quoted(std::filesystem::read_symlink("/proc/self/exe").string()) + " measure";
  const auto add = [&](const char* flag, const std::string& value) {
    line += std::string(" ") + flag + " " + value;
  };
  add("--implementation", name_of(implementation));
  add("--direction", name_of(direction));
  add("--batch", std::to_string(shape.batch));
  add("--seqlen", std::to_string(shape.seqlen));
  add("--heads", std::to_string(shape.heads));
  add("--head-dim", std::to_string(shape.head_dim));
  add("--dtype", short_name(shape.dtype));
  add("--threads", std::to_string(options.threads));
  if (options.causal) line += " --causal";
  if (options.window_left) add("--window-left", std::to_string(*options.window_left));
  if (options.window_right) add("--window-right", std::to_string(*options.window_right));
  if (!options.kernel.empty()) add("--kernel", quoted(options.kernel));
  return line;
}

}  // namespace

const char* name_of(Implementation implementation) {
  return implementation == Implementation::tessera ? "tessera" : "standard";
}

Measurement measure_in_child(Implementation implementation, Direction direction, const CallFlags& flags) {
  const std::string line = command_line(implementation, direction, flags);
  FILE* pipe = popen(line.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot start " + line);
  std::string text;
  std::array<char, 4096> part{};
  while (std::fgets(part.data(), static_cast<int>(part.size()), pipe) != nullptr) text += part.data();
  if (pclose(pipe) != 0) throw std::runtime_error("failed: " + line);
  return nlohmann::json::parse(text).get<Measurement>();
}

void to_json(nlohmann::json& json, const Measurement& measurement) {
  json = {{"seconds", measurement.seconds},
          {"extra_bytes", measurement.extra_bytes},
          {"tensor_bytes", measurement.tensor_bytes}};
}

void from_json(const nlohmann::json& json, Measurement& measurement) {
  json.at("seconds").get_to(measurement.seconds);
  json.at("extra_bytes").get_to(measurement.extra_bytes);
  json.at("tensor_bytes").get_to(measurement.tensor_bytes);
}

}  // namespace tessera::cli
