// The subcommands. Each add_*() declares its flags; parsing picks the one to run, main() then runs it, so
// that a bad flag is reported before anything has started.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace tessera::cli {

using Run = std::function<int()>;  // the exit status

void add_info(CLI::App& app, Run& run);
void add_explain(CLI::App& app, Run& run);
void add_verify(CLI::App& app, Run& run);
void add_bench(CLI::App& app, Run& run);
void add_demo(CLI::App& app, Run& run);
void add_measure(CLI::App& app, Run& run);  // hidden: what bench and demo start as a child

inline void add_json(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "Print JSON instead of text");
}

// A subcommand whose flags live in a Flags struct and whose work is body(flags).
template <class Flags>
struct Subcommand {
  CLI::App* app;
  std::shared_ptr<Flags> flags;
};

template <class Flags>
[[nodiscard]] Subcommand<Flags> add_command(CLI::App& app, Run& run, const std::string& name,
                                            const std::string& description, int (*body)(const Flags&)) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(name, description);
  command->callback([flags, body, &run] { run = [flags, body] { return body(*flags); }; });
  return {command, std::move(flags)};
}

}  // namespace tessera::cli
