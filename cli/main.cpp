// The tessera command: what runs here, why, whether it is right, and how fast it is.
#include <cstdio>
#include <exception>

#include "cli/command.h"
#include "tessera/tessera.hpp"

namespace {

int run_command(int argc, char** argv) {
  CLI::App app("Tessera: exact attention, tile by tile", "tessera");
  app.set_version_flag("--version", tessera::version());
  app.require_subcommand(1);

  tessera::cli::Run run;
  tessera::cli::add_info(app, run);
  tessera::cli::add_explain(app, run);
  tessera::cli::add_verify(app, run);
  tessera::cli::add_bench(app, run);
  tessera::cli::add_demo(app, run);
  tessera::cli::add_measure(app, run);

  try {
    app.parse(argc, argv);
    return run();
  } catch (const CLI::ParseError& error) {  // also thrown by run() for flags that contradict each other
    return app.exit(error);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run_command(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return 1;
  }
}
