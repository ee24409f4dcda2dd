#include "cli/figures.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "cli/call.h"
#include "cli/child.h"
#include "cli/fma_peak.h"
#include "cli/machine.h"

namespace tessera::cli {
namespace {

constexpr std::size_t rotation_bytes = 96u << 20;  // more than the last-level cache of most machines

CallFlags call_of(const FigureFlags& flags, std::int64_t seqlen, std::int64_t heads, std::int64_t head_dim) {
  CallFlags call;
  call.shape.seqlen = seqlen;
  call.shape.heads = heads;
  call.shape.head_dim = head_dim;
  call.options.kernel = flags.kernel;
  call.options.threads = flags.threads;
  return call;
}

void announce(const char* what) {
  if (isatty(STDERR_FILENO) != 0) std::fprintf(stderr, "measuring %s ...\033[K\r", what);
}

// Head_dim 128, seqlen 4096: share of peak, and what causal saves. The peak is measured anew before every
// call: a machine that is shared does not give the same all the time.
void add_peak_figures(const FigureFlags& flags, std::vector<Figure>& figures) {
  announce("the share of peak");
  const std::int64_t seqlen = flags.quick ? 1024 : 4096;
  const std::string where = "fp32 d128 seqlen " + std::to_string(seqlen);
  const TimingPolicy policy = {.min_seconds = flags.quick ? 0.1 : 1.5};
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    const std::string name = std::string(name_of(direction)) + " " + where;
    CallFlags call = call_of(flags, seqlen, 4, 128);
    std::vector<double> peaks;
    TimingPolicy in_turns = policy;
    in_turns.before = [&] { peaks.push_back(measure_fma_rate(resolve_threads(flags.threads), 0.05)); };
    const double dense = time_call(call, direction, in_turns).median;
    const double share = nominal_flops(call, direction) / dense / median_of(peaks);
    figures.push_back(
        {name + ", of peak", 100 * share, true, direction == Direction::forward ? 60.0 : 50.0, "%"});
    call.options.causal = true;
    const double causal = time_call(call, direction, policy).median;
    figures.push_back({name + ", causal / dense", causal / dense, false, 0.6, "x"});
  }
}

// A window does the window's share of the work.
void add_window_figures(const FigureFlags& flags, std::vector<Figure>& figures) {
  announce("windows");
  const std::int64_t seqlen = flags.quick ? 4096 : 16384;
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    CallFlags call = call_of(flags, seqlen, 2, 64);
    const TimingPolicy few = {.min_seconds = 0, .min_repeats = 2, .max_repeats = 2, .warmups = 0};
    const double dense = time_call(call, direction, few).median;
    call.options.window_left = 256;
    for (const std::int64_t right : {0, 256}) {
      call.options.window_right = right;
      const double windowed = time_call(call, direction, {.min_seconds = 0.3}).median;
      figures.push_back({std::string(name_of(direction)) + " fp32 d64 seqlen " + std::to_string(seqlen) +
                             ", window (256, " + std::to_string(right) + ") / dense",
                         windowed / dense, false, flags.quick ? 0.2 : 0.05, "x"});
    }
  }
}

// Peak resident memory above inputs and outputs, in a process of its own. The window keeps it short; what is
// allocated is that of the full call, but for the smaller tiles of backward (some 100 KB a thread).
void add_memory_figures(const FigureFlags& flags, std::vector<Figure>& figures) {
  announce("memory");
  const std::int64_t seqlen = flags.quick ? 8192 : 65536;
  CallFlags call = call_of(flags, seqlen, 8, 64);
  call.options.window_left = 64;
  call.options.window_right = 64;
  const double gradients = 3.0 * static_cast<double>(seqlen) * 8 * 64 * 4 / 1e6;  // dq, dk, dv in fp32
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    call.shape.dtype = dtype;
    for (const Direction direction : {Direction::forward, Direction::backward}) {
      const Measurement m = measure_in_child(Implementation::tessera, direction, call);
      figures.push_back({std::string(name_of(direction)) + " " + short_name(dtype) + " d64 8 heads seqlen " +
                             std::to_string(seqlen) + " (window 64), extra memory",
                         static_cast<double>(m.extra_bytes) / 1e6, false,
                         direction == Direction::forward ? 16.0 : gradients + 16.0, "MB"});
    }
  }
}

}  // namespace

void to_json(nlohmann::json& json, const Figure& figure) {
  json = {{"name", figure.name},   {"value", figure.value},
          {"limit", figure.limit}, {"comparison", figure.at_least ? ">=" : "<="},
          {"unit", figure.unit},   {"met", figure.met()}};
}

Timing time_call(const CallFlags& flags, Direction direction, const TimingPolicy& policy) {
  std::vector<Call> calls;
  do {
    Call& call = calls.emplace_back(flags, Store::Kind::real);
    call.reserve(direction);
    if (direction == Direction::backward) call.forward();
  } while (calls.size() < 2 || (calls.size() < 8 && calls.size() * calls.front().bytes() < rotation_bytes));
  return time_repeated(policy, [&](int turn) {
    Call& call = calls[static_cast<std::size_t>(turn) % calls.size()];
    if (direction == Direction::forward) {
      call.forward();
    } else {
      call.backward();
    }
  });
}

std::vector<Figure> measure_figures(const FigureFlags& flags) {
  std::vector<Figure> figures;
  add_peak_figures(flags, figures);
  add_window_figures(flags, figures);
  add_memory_figures(flags, figures);
  announce("done");
  return figures;
}

}  // namespace tessera::cli
