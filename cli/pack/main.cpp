// tessera-pack: compiles the kernels of the list ahead, without a GPU, into one file that the library finds
// beside itself; and says what they cost. A kernel that spills, or of which ptxas warns that it is slow, is
// not packed.
#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/pack/jobs.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "core/threads.h"
#include "cuda/driver/keys.h"
#include "cuda/driver/nvrtc_api.h"
#include "cuda/driver/pack.h"
#include "cuda/driver/ptxas_log.h"
#include "cuda/plan/pack.h"

namespace tessera::cli {
namespace {

struct PackFlags {
  std::vector<std::string> archs = {"sm_80", "sm_86", "sm_89", "sm_90a"};
  std::string out = "tessera.pack";
  std::string match;
  int jobs = usable_cores();
  bool every = false;
  bool fresh = false;
  bool json = false;

  // Other lists than the pack's are only looked at.
  [[nodiscard]] bool writes() const { return match.empty() && !every; }
};

struct Job {
  std::string arch;
  cuda::PackEntry entry;
  bool reused = false;
  Outcome outcome;
  std::vector<std::string> warnings;

  [[nodiscard]] bool is_good() const {
    return outcome.error.empty() && !cuda::is_refused(outcome.cubin.resources, warnings);
  }
};

std::vector<Job> jobs_of(const PackFlags& flags) {
  std::vector<Job> jobs;
  for (const std::string& arch : flags.archs) {
    for (cuda::PackEntry& entry : flags.every ? cuda::every_list(arch) : cuda::pack_list(arch)) {
      if (entry.name.find(flags.match) != std::string::npos)
        jobs.push_back({arch, std::move(entry), false, {}, {}});
    }
  }
  return jobs;
}

// NVRTC's version, asked in a child: this process stays free of the compiler.
std::string version_of_compiler() {
  Outcome answer;
  run_jobs(
      1, 1,
      [](std::size_t) -> Result<cuda::Cubin> {
        const Result<const cuda::NvrtcApi*> compiler = cuda::nvrtc_api();
        if (!compiler.ok()) return compiler.status();
        cuda::Cubin cubin;
        cubin.log = compiler.value()->version_text;
        return cubin;
      },
      [&](std::size_t, Outcome outcome) { answer = std::move(outcome); });
  if (!answer.error.empty()) throw std::runtime_error(answer.error);
  return answer.cubin.log;
}

// What the pack that is there has already: a pack holds good kernels only, and its keys say of what.
void reuse(const PackFlags& flags, const std::string& compiler, std::vector<Job>& jobs) {
  if (flags.fresh || !flags.writes()) return;
  const cuda::Pack old(flags.out);
  if (old.compiler() != compiler) return;
  for (Job& job : jobs) {
    if (auto cubin = old.find(cuda::pack_key(job.entry.text, job.arch))) {
      job.outcome.cubin = std::move(*cubin);
      job.reused = true;
    }
  }
}

int compile_all(const PackFlags& flags, std::vector<Job>& jobs) {
  std::vector<Job*> left;
  for (Job& job : jobs) {
    if (!job.reused) left.push_back(&job);
  }
  const Progress progress(static_cast<int>(left.size()), flags.json);
  int done = 0;
  int bad = 0;
  progress.show(0, 0);
  run_jobs(
      left.size(), flags.jobs,
      [&](std::size_t i) { return cuda::compile(left[i]->entry.name, left[i]->entry.text, left[i]->arch); },
      [&](std::size_t i, Outcome outcome) {
        left[i]->outcome = std::move(outcome);
        left[i]->warnings = cuda::ptxas_warnings(left[i]->outcome.cubin.log);
        bad += left[i]->is_good() ? 0 : 1;
        progress.show(++done, bad);
      });
  progress.clear();
  return static_cast<int>(left.size());
}

void print_table(const std::vector<Job>& jobs) {
  Table table({"kernel", "arch", "registers", "shared", "dynamic", "spills", "stack", "seconds", "warnings"});
  for (const Job& job : jobs) {
    const cuda::Resources& r = job.outcome.cubin.resources;
    const bool failed = !job.outcome.error.empty();
    const auto figure = [&](int value) { return failed ? std::string("-") : std::to_string(value); };
    table.add({job.entry.name, job.arch, figure(r.registers), figure(r.shared_bytes),
               std::to_string(job.entry.dynamic_shared), figure(r.spill_bytes), figure(r.stack_bytes),
               job.reused ? "reused" : fixed(job.outcome.seconds, 2),
               failed ? "FAILED" : std::to_string(job.warnings.size())});
  }
  table.print();
  for (const Job& job : jobs) {
    const std::string name = job.entry.name + " (" + job.arch + ")";
    if (!job.outcome.error.empty()) std::printf("\n%s: %s\n", name.c_str(), job.outcome.error.c_str());
    for (const std::string& warning : job.warnings) std::printf("\n%s: %s\n", name.c_str(), warning.c_str());
    if (job.outcome.error.empty() && !job.is_good())
      std::printf("\n%s: REFUSED, %d bytes of spills\n", name.c_str(),
                  job.outcome.cubin.resources.spill_bytes);
  }
}

nlohmann::json to_json(const Job& job) {
  const cuda::Resources& r = job.outcome.cubin.resources;
  return {{"kernel", job.entry.name},
          {"arch", job.arch},
          {"good", job.is_good()},
          {"registers", r.registers},
          {"shared_bytes", r.shared_bytes},
          {"dynamic_shared_bytes", job.entry.dynamic_shared},
          {"spill_bytes", r.spill_bytes},
          {"stack_bytes", r.stack_bytes},
          {"image_bytes", job.outcome.cubin.image.size()},
          {"reused", job.reused},
          {"seconds", job.outcome.seconds},
          {"warnings", job.warnings},
          {"error", job.outcome.error}};
}

Status write_good(const PackFlags& flags, const std::vector<Job>& jobs, const std::string& compiler) {
  std::vector<cuda::PackedCubin> good;
  for (const Job& job : jobs) {
    if (job.is_good()) good.push_back({cuda::pack_key(job.entry.text, job.arch), job.outcome.cubin});
  }
  return cuda::write_pack(flags.out, good, compiler);
}

int run_pack(const PackFlags& flags) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Job> jobs = jobs_of(flags);
  if (jobs.empty()) throw std::runtime_error("--match: no kernel's name has \"" + flags.match + "\"");
  const std::string compiler = version_of_compiler();
  reuse(flags, compiler, jobs);
  const int compiled = compile_all(flags, jobs);
  const bool write = flags.writes();
  if (write && compiled != 0) write_good(flags, jobs, compiler).or_throw();

  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const auto bad = std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return !job.is_good(); });
  const auto bytes = write ? static_cast<double>(std::filesystem::file_size(flags.out)) : 0.0;
  if (flags.json) {
    nlohmann::json kernels = nlohmann::json::array();
    for (const Job& job : jobs) kernels.push_back(to_json(job));
    const nlohmann::json result = {{"compiler", compiler},    {"kernels", kernels},
                                   {"seconds", took.count()}, {"bad", bad},
                                   {"bytes", bytes},          {"out", write ? flags.out : ""}};
    std::printf("%s\n", result.dump(2).c_str());
  } else {
    print_table(jobs);
    std::printf("\ntessera-pack: %zu kernels, %d compiled by NVRTC %s, %td bad, in %.1f s", jobs.size(),
                compiled, compiler.c_str(), bad, took.count());
    std::printf(write ? ": %s, %s\n" : "; nothing written, as --match or --every was given\n",
                flags.out.c_str(), bytes_text(bytes).c_str());
  }
  return bad == 0 ? 0 : 1;
}

int parse_and_run(int argc, char** argv) {
  PackFlags flags;
  CLI::App app("Compiles Tessera's GPU kernels ahead, into one file beside the library", "tessera-pack");
  app.add_option("--arch", flags.archs, "For which GPUs")->delimiter(',')->capture_default_str();
  app.add_option("--out", flags.out, "The pack; what it has already is not compiled again")
      ->capture_default_str();
  app.add_option("--match", flags.match, "Only kernels whose name has this; writes nothing");
  app.add_flag("--every", flags.every, "All that can be chosen, not only what is packed; writes nothing");
  app.add_option("--jobs", flags.jobs, "Compilations at a time")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_flag("--fresh", flags.fresh, "Compile all again");
  app.add_flag("--json", flags.json, "Print JSON instead of text");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return run_pack(flags);
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  try {
    return tessera::cli::parse_and_run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera-pack: %s\n", error.what());
    return 1;
  }
}
