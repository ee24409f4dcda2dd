// tessera bench: the grid head_dim x causal x seqlen at a fixed number of tokens and a fixed hidden size,
// forward and backward, with the machine's FMA peak measured beside it; decode's rows (decode_bench.h); then
// the figures of figures.h.
#include <cstdio>

#include "cli/call.h"
#include "cli/command.h"
#include "cli/decode_bench.h"
#include "cli/figures.h"
#include "cli/fma_peak.h"
#include "cli/machine.h"
#include "cli/result.h"
#include "cli/table.h"

namespace tessera::cli {
namespace {

struct BenchFlags {
  std::vector<DType> dtypes;  // none: fp32 and bf16, decode fp16 too
  std::vector<std::int64_t> head_dims = {64, 128, 256};
  std::vector<std::int64_t> seqlens = {512, 1024, 2048, 4096};
  std::int64_t tokens = 4096, hidden = 512;
  double min_time = 0.3;
  std::string kernel;
  int threads = 0;
  bool quick = false, no_figures = false, no_grid = false, no_decode = false;
  std::string out;
  bool json = false;
};

struct Cell {
  CallFlags call;
  Direction direction = Direction::forward;
};

std::vector<DType> dtypes_or(const BenchFlags& flags, const std::vector<DType>& dtypes) {
  return flags.dtypes.empty() ? dtypes : flags.dtypes;
}

std::vector<Cell> grid(const BenchFlags& flags) {
  std::vector<Cell> cells;
  CallFlags call;
  call.options.kernel = flags.kernel;
  call.options.threads = flags.threads;
  for (const DType dtype : dtypes_or(flags, {DType::float32, DType::bfloat16})) {
    for (const std::int64_t head_dim : flags.head_dims) {
      for (const bool causal : {false, true}) {
        for (const std::int64_t seqlen : flags.seqlens) {
          call.shape.dtype = dtype;
          call.shape.head_dim = head_dim;
          call.shape.heads = std::max<std::int64_t>(1, flags.hidden / head_dim);
          call.shape.seqlen = seqlen;
          call.shape.batch = std::max<std::int64_t>(1, flags.tokens / seqlen);
          call.options.causal = causal;
          cells.push_back({call, Direction::forward});
          cells.push_back({call, Direction::backward});
        }
      }
    }
  }
  return cells;
}

nlohmann::json measure_cell(const Cell& cell, const BenchFlags& flags, double peak) {
  const TimingPolicy policy = {.min_seconds = flags.quick ? 0.0 : flags.min_time, .min_repeats = 3};
  const Timing timing = time_call(cell.call, cell.direction, policy);
  const double rate = nominal_flops(cell.call, cell.direction) / timing.median;
  const ShapeFlags& shape = cell.call.shape;
  return {{"dtype", short_name(shape.dtype)},
          {"direction", name_of(cell.direction)},
          {"head_dim", shape.head_dim},
          {"causal", cell.call.options.causal},
          {"seqlen", shape.seqlen},
          {"batch", shape.batch},
          {"heads", shape.heads},
          {"seconds", timing.median},
          {"seconds_p10", timing.p10},
          {"seconds_p90", timing.p90},
          {"repeats", timing.repeats},
          {"gflops", rate / 1e9},
          {"percent_of_peak", 100 * rate / peak},
          {"kernel", last_kernel()}};
}

const Table& cell_table() {
  static const Table table({"dtype", "direction", "head_dim", "causal", "seqlen", "batch", "heads", "   time",
                            "GFLOP/s", "% of peak", "kernel    "});
  return table;
}

void print_cell(const nlohmann::json& cell) {
  const auto integer = [&](const char* key) { return std::to_string(cell[key].get<std::int64_t>()); };
  cell_table().print_row({cell["dtype"], cell["direction"], integer("head_dim"),
                          cell["causal"].get<bool>() ? "yes" : "no", integer("seqlen"), integer("batch"),
                          integer("heads"), seconds_text(cell["seconds"]), fixed(cell["gflops"], 1),
                          fixed(cell["percent_of_peak"], 1), cell["kernel"]});
}

void print_figures(const std::vector<Figure>& figures) {
  Table table({"figure", "measured", "wanted", "met"});
  for (const Figure& f : figures) {
    const int digits = f.unit == "x" ? 3 : 1;
    table.add({f.name, fixed(f.value, digits) + " " + f.unit,
               (f.at_least ? ">= " : "<= ") + fixed(f.limit, digits == 3 ? 2 : 1) + " " + f.unit,
               f.met() ? "yes" : "NO"});
  }
  std::printf("\n");
  table.print();
}

nlohmann::json measure_grid(const BenchFlags& flags, double peak) {
  nlohmann::json cells = nlohmann::json::array();
  if (!flags.json) cell_table().print_header();
  for (const Cell& cell : grid(flags)) {
    cells.push_back(measure_cell(cell, flags, peak));
    if (!flags.json) print_cell(cells.back());
  }
  return cells;
}

int run_bench(const BenchFlags& flags) {
  const int threads = resolve_threads(flags.threads);
  const double peak = measure_fma_peak(threads);
  nlohmann::json result = {{"machine", machine(threads)}, {"peak_gflops", peak / 1e9}};
  if (!flags.json) {
    std::printf("%s, %d threads, fp32 FMA peak %.1f GFLOP/s (measured)\n\n", cpu_model().c_str(), threads,
                peak / 1e9);
  }
  if (!flags.no_grid) result["cells"] = measure_grid(flags, peak);
  std::vector<Figure> figures;
  if (!flags.no_decode) {
    if (!flags.no_grid && !flags.json) std::printf("\n");
    const auto dtypes = dtypes_or(flags, {DType::float32, DType::float16, DType::bfloat16});
    const auto rows =
        measure_decode({dtypes, flags.kernel, flags.threads, flags.min_time, flags.quick, !flags.json});
    result["decode"] = rows;
    figures = decode_figures(rows);
  }
  if (!flags.no_figures) {
    const auto others = measure_figures({flags.kernel, flags.threads, flags.quick});
    figures.insert(figures.end(), others.begin(), others.end());
  }
  result["figures"] = figures;
  if (!flags.json && !figures.empty()) print_figures(figures);
  write_result(result, flags.json, flags.out);
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  const auto [command, flags] = add_command<BenchFlags>(
      app, run, "bench", "Time a grid of calls against the machine's peak", run_bench);
  command
      ->add_option("--dtype", flags->dtypes,
                   "fp32, bf16, fp16; several with commas (default fp32,bf16; decode fp16 too)")
      ->delimiter(',')
      ->transform(dtype_name())
      ->type_name("DTYPE");
  command->add_option("--head-dim", flags->head_dims, "Several with commas (default 64,128,256)")
      ->delimiter(',')
      ->check(CLI::Range(1, 256));
  command->add_option("--seqlen", flags->seqlens, "Several with commas (default 512,1024,2048,4096)")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("--tokens", flags->tokens, "batch * seqlen")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--hidden", flags->hidden, "heads * head_dim")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--min-time", flags->min_time, "Seconds a cell is measured for, at least")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--quick", flags->quick, "Three calls a cell; the figures at smaller sizes");
  command->add_flag("--no-grid", flags->no_grid, "Without the grid of forward and backward");
  command->add_flag("--no-decode", flags->no_decode, "Without decode");
  command->add_flag("--no-figures", flags->no_figures, "Without the figures of forward and backward");
  command->add_option("--out", flags->out, "Also write the JSON to this file");
  add_kernel(*command, flags->kernel);
  add_threads(*command, flags->threads);
  add_json(*command, flags->json);
}

}  // namespace tessera::cli
