// tessera demo: time and peak memory against sequence length, for Tessera and for standard attention. Each
// point is measured in a process of its own.
#include <cstdio>

#include "cli/call.h"
#include "cli/child.h"
#include "cli/command.h"
#include "cli/machine.h"
#include "cli/result.h"
#include "cli/standard_attention.h"
#include "cli/table.h"

namespace tessera::cli {
namespace {

struct DemoFlags {
  std::int64_t heads = 4, head_dim = 64;
  std::int64_t min_seqlen = 512, max_seqlen = 16384;
  std::int64_t max_standard = 8192;  // beyond, standard attention would take the demo's whole time
  int threads = 0;
  std::string out;
  bool json = false;
};

struct Pair {
  Measurement tessera;
  std::optional<Measurement> standard;
};

CallFlags call_of(const DemoFlags& flags, std::int64_t seqlen) {
  CallFlags call;
  call.shape.seqlen = seqlen;
  call.shape.heads = flags.heads;
  call.shape.head_dim = flags.head_dim;
  call.options.threads = flags.threads;
  return call;
}

std::int64_t standard_bytes(const DemoFlags& flags, std::int64_t seqlen, Direction direction) {
  const auto square = StandardAttention::square_bytes({1, seqlen, flags.heads, flags.head_dim});
  return direction == Direction::forward ? square : 2 * square;
}

Pair measure_pair(const DemoFlags& flags, std::int64_t seqlen, Direction direction) {
  const CallFlags call = call_of(flags, seqlen);
  Pair pair;
  pair.tessera = measure_in_child(Implementation::tessera, direction, call);
  const bool fits = 2 * standard_bytes(flags, seqlen, direction) < available_memory();
  if (fits && seqlen <= flags.max_standard) {
    pair.standard = measure_in_child(Implementation::standard, direction, call);
  }
  return pair;
}

const Table& demo_table() {
  static const Table table({"direction", "seqlen", "Tessera time", "standard time", "speed-up",
                            "Tessera memory", "standard memory"});
  return table;
}

void print_pair(const DemoFlags& flags, std::int64_t seqlen, Direction direction, const Pair& pair) {
  const std::string would_need =
      "(" + bytes_text(static_cast<double>(standard_bytes(flags, seqlen, direction))) + ")";
  demo_table().print_row(
      {name_of(direction), std::to_string(seqlen), seconds_text(pair.tessera.seconds),
       pair.standard ? seconds_text(pair.standard->seconds) : "-",
       pair.standard ? fixed(pair.standard->seconds / pair.tessera.seconds, 2) + "x" : "-",
       bytes_text(static_cast<double>(pair.tessera.extra_bytes)),
       pair.standard ? bytes_text(static_cast<double>(pair.standard->extra_bytes)) : would_need});
}

nlohmann::json measure_all(const DemoFlags& flags) {
  nlohmann::json points = nlohmann::json::array();
  if (!flags.json) demo_table().print_header();
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    for (std::int64_t seqlen = flags.min_seqlen; seqlen <= flags.max_seqlen; seqlen *= 2) {
      const Pair pair = measure_pair(flags, seqlen, direction);
      if (!flags.json) print_pair(flags, seqlen, direction, pair);
      nlohmann::json point = {{"direction", name_of(direction)},
                              {"seqlen", seqlen},
                              {"standard_bytes", standard_bytes(flags, seqlen, direction)},
                              {"tessera", pair.tessera}};
      if (pair.standard) point["standard"] = *pair.standard;
      points.push_back(std::move(point));
    }
  }
  return points;
}

int run_demo(const DemoFlags& flags) {
  const int threads = resolve_threads(flags.threads);
  if (!flags.json) {
    std::printf(
        "Exact attention, fp32, %lld heads of %lld, %d threads. Memory: peak above inputs and outputs;\n"
        "standard attention materialises seqlen x seqlen a head, in brackets what it would have needed.\n\n",
        static_cast<long long>(flags.heads), static_cast<long long>(flags.head_dim), threads);
  }
  const nlohmann::json result = {{"machine", machine(threads)},
                                 {"heads", flags.heads},
                                 {"head_dim", flags.head_dim},
                                 {"points", measure_all(flags)}};
  write_result(result, flags.json, flags.out);
  return 0;
}

}  // namespace

void add_demo(CLI::App& app, Run& run) {
  const auto [command, flags] = add_command<DemoFlags>(
      app, run, "demo", "Time and peak memory against sequence length, beside standard attention", run_demo);
  command->add_option("--heads", flags->heads, "Heads")->check(CLI::Range(1, 1024))->capture_default_str();
  command->add_option("--head-dim", flags->head_dim, "Head dimension")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  command->add_option("--min-seqlen", flags->min_seqlen, "The shortest; it doubles from there")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--max-seqlen", flags->max_seqlen, "The longest")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--max-standard", flags->max_standard, "The longest for standard attention")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--out", flags->out, "Also write the JSON to this file");
  add_threads(*command, flags->threads);
  add_json(*command, flags->json);
}

}  // namespace tessera::cli
