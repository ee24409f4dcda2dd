// tessera verify: random cases of all options against the oracle. Everything follows from the seed, and a
// case that fails prints the line that repeats it alone.
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "cli/timing.h"
#include "verify/judge.h"

namespace tessera::cli {
namespace {

struct VerifyFlags {
  int cases = 200;
  std::uint64_t seed = 1;
  std::string kernel;
  int threads = 0;
  std::string only;  // one case, as a failure printed it
  bool json = false;
};

std::string repeat_line(const verify::Case& c) {
  return "tessera verify --case '" + verify::to_string(c) + "'";
}

nlohmann::json to_json(const verify::Verdict& verdict) {
  nlohmann::json scores = nlohmann::json::array();
  for (const verify::Score& score : verdict.scores) {
    scores.push_back({{"tensor", score.tensor},
                      {"error", score.error},
                      {"plain_error", score.plain_error},
                      {"tolerance", score.tolerance}});
  }
  return {{"case", verify::to_string(verdict.settings)},
          {"kernel", verdict.kernel},
          {"ok", verdict.ok()},
          {"failures", verdict.failures},
          {"scores", scores},
          {"repeat", repeat_line(verdict.settings)}};
}

std::vector<verify::Case> cases_of(const VerifyFlags& flags) {
  std::vector<verify::Case> cases;
  if (!flags.only.empty()) {
    const auto parsed = verify::parse_case(flags.only);
    if (!parsed) throw CLI::ValidationError("--case", "not a case as a failure prints it: " + flags.only);
    cases.push_back(*parsed);
  } else {
    std::mt19937_64 random(flags.seed);
    for (int i = 0; i < flags.cases; ++i) cases.push_back(verify::random_case(random));
  }
  for (verify::Case& c : cases) {
    if (!flags.kernel.empty()) c = verify::forced(c, flags.kernel);
    if (flags.threads != 0) c.threads = flags.threads;
  }
  return cases;
}

// A forced kernel that this machine lacks would fail every case: say it once, and name the flag.
void check_kernel(const std::string& name) {
  if (name.empty()) return;
  std::string known;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.name == name) {
      if (kernel.available) return;
      throw CLI::ValidationError("--kernel", name + " cannot run here: " + kernel.why_not);
    }
    known += (known.empty() ? "" : ", ") + kernel.name;
  }
  throw CLI::ValidationError("--kernel", name + " is none of " + known);
}

struct Tally {
  int passed = 0;
  std::map<std::string, int> by_kernel;
  std::vector<verify::Verdict> failed;
};

Tally judge_all(const std::vector<verify::Case>& cases, bool json) {
  Tally tally;
  const Progress progress(static_cast<int>(cases.size()), json);
  int done = 0;
  for (const verify::Case& c : cases) {
    progress.show(done++, static_cast<int>(tally.failed.size()));
    verify::Verdict verdict = verify::judge(c);
    ++tally.by_kernel[verdict.kernel.empty() ? "none" : verdict.kernel];
    if (verdict.ok()) {
      ++tally.passed;
      continue;
    }
    progress.clear();
    if (!json) std::printf("FAILED\n%s\nrepeat: %s\n\n", verdict.to_string().c_str(), repeat_line(c).c_str());
    tally.failed.push_back(std::move(verdict));
  }
  progress.clear();
  return tally;
}

void print_json(const VerifyFlags& flags, const Tally& tally, double seconds) {
  nlohmann::json failed = nlohmann::json::array();
  for (const verify::Verdict& verdict : tally.failed) failed.push_back(to_json(verdict));
  const nlohmann::json result = {{"seed", flags.seed},
                                 {"passed", tally.passed},
                                 {"failed", failed},
                                 {"kernels", tally.by_kernel},
                                 {"seconds", seconds}};
  std::printf("%s\n", result.dump(2).c_str());
}

int run_verify(const VerifyFlags& flags) {
  check_kernel(flags.kernel);
  const std::vector<verify::Case> cases = cases_of(flags);
  Tally tally;
  const double seconds = seconds_of([&] { tally = judge_all(cases, flags.json); });
  if (flags.json) {
    print_json(flags, tally, seconds);
  } else {
    std::string ran;
    for (const auto& [kernel, count] : tally.by_kernel) ran += " " + kernel + ":" + std::to_string(count);
    std::printf("verify: %d passed, %zu failed, in %.1f s (seed %llu; kernels%s)\n", tally.passed,
                tally.failed.size(), seconds, static_cast<unsigned long long>(flags.seed), ran.c_str());
  }
  return tally.failed.empty() ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, Run& run) {
  const auto [command, flags] = add_command<VerifyFlags>(
      app, run, "verify", "Random cases of every option, forward and backward, against the fp64 oracle",
      run_verify);
  command->add_option("--cases", flags->cases, "How many")
      ->check(CLI::Range(1, 100'000'000))
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "The same seed draws the same cases")->capture_default_str();
  command->add_option("--case", flags->only, "One case alone, as a failure printed it");
  add_kernel(*command, flags->kernel);
  add_threads(*command, flags->threads);
  add_json(*command, flags->json);
}

}  // namespace tessera::cli
