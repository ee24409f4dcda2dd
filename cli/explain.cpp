// tessera explain: which kernel would run a call, with what tiles and at what cost, and why the others
// refuse.
#include <cstdio>
#include <string>

#include "cli/call.h"
#include "cli/command.h"

namespace tessera::cli {
namespace {

struct ExplainFlags {
  CallFlags call;
  bool backward = false;
  bool json = false;
};

int run_explain(const ExplainFlags& flags) {
  const Call call(flags.call, Store::Kind::phantom);
  const Explanation explanation =
      (flags.backward ? explain(call.backward_call()) : explain(call.forward_call())).or_throw();
  std::string text = flags.json ? explanation.to_json() : explanation.to_string();
  if (!text.ends_with('\n')) text += '\n';
  std::fputs(text.c_str(), stdout);
  return explanation.kernel.empty() ? 1 : 0;
}

}  // namespace

void add_explain(CLI::App& app, Run& run) {
  const auto [command, flags] =
      add_command<ExplainFlags>(app, run, "explain", "What would run a call, and why", run_explain);
  add_shape(*command, flags->call.shape);
  add_options(*command, flags->call.options);
  command->add_flag("--backward", flags->backward, "The gradients' call");
  add_json(*command, flags->json);
}

}  // namespace tessera::cli
