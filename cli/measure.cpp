// tessera measure (hidden): time and peak memory of one call, in this process, as JSON.
#include <algorithm>
#include <cstdio>
#include <functional>

#include "cli/call.h"
#include "cli/child.h"
#include "cli/command.h"
#include "cli/machine.h"
#include "cli/memory.h"
#include "cli/standard_attention.h"
#include "cli/timing.h"

namespace tessera::cli {
namespace {

struct MeasureFlags {
  CallFlags call;
  Implementation implementation = Implementation::tessera;
  Direction direction = Direction::forward;
};

// The first call is the one whose memory counts, later ones give the time: the first also pays for pages that
// are touched for the first time. Unless it is very long, when that no longer shows. Everything resident
// before `prepare` is inputs and outputs; what `prepare` leaves (standard attention's P) counts as extra.
Measurement measure(std::size_t tensor_bytes, const std::function<void()>& prepare,
                    const std::function<void()>& call) {
  const std::int64_t baseline = resident();
  prepare();
  reset_peak_resident();
  const double first = seconds_of(call);
  const std::int64_t extra = std::max<std::int64_t>(0, peak_resident() - baseline);
  double seconds = first;
  if (first < 4.0) {
    const TimingPolicy policy = {
        .min_seconds = 0.2, .min_repeats = first < 1.0 ? 3 : 1, .max_repeats = 50, .warmups = 0};
    seconds = time_repeated(policy, [&](int) { call(); }).median;
  }
  return {seconds, extra, static_cast<std::int64_t>(tensor_bytes)};
}

Measurement measure_tessera(const MeasureFlags& flags, Call& call) {
  if (flags.direction == Direction::forward) {
    return measure(
        call.bytes(), [] {}, [&] { call.forward(); });
  }
  return measure(
      call.bytes(), [&] { call.forward(); }, [&] { call.backward(); });
}

Measurement measure_standard(const MeasureFlags& flags, Call& call) {
  const ShapeFlags& shape = flags.call.shape;
  if (shape.dtype != DType::float32)
    throw CLI::ValidationError("--dtype", "standard attention has fp32 only");
  StandardAttention standard({shape.batch, shape.seqlen, shape.heads, shape.head_dim},
                             resolve_threads(flags.call.options.threads));
  const Backward& t = call.backward_call();
  const auto at = [](const Tensor& tensor) { return static_cast<float*>(tensor.data); };
  const auto forward = [&] { standard.forward(at(t.q), at(t.k), at(t.v), at(t.o)); };
  if (flags.direction == Direction::forward)
    return measure(
        call.bytes(), [] {}, forward);
  return measure(call.bytes(), forward, [&] {
    standard.backward(at(t.q), at(t.k), at(t.v), at(t.o), at(t.dout), at(t.dq), at(t.dk), at(t.dv));
  });
}

int run_measure(const MeasureFlags& flags) {
  Call call(flags.call, Store::Kind::real);
  const Measurement result = flags.implementation == Implementation::tessera ? measure_tessera(flags, call)
                                                                             : measure_standard(flags, call);
  std::printf("%s\n", nlohmann::json(result).dump().c_str());
  return 0;
}

}  // namespace

void add_measure(CLI::App& app, Run& run) {
  const auto [command, flags] = add_command<MeasureFlags>(app, run, "measure", "", run_measure);
  command->group("");  // not in the help
  const std::map<std::string, Implementation> implementations = {{"tessera", Implementation::tessera},
                                                                 {"standard", Implementation::standard}};
  const std::map<std::string, Direction> directions = {{"forward", Direction::forward},
                                                       {"backward", Direction::backward}};
  command->add_option("--implementation", flags->implementation)
      ->transform(CLI::CheckedTransformer(implementations));
  command->add_option("--direction", flags->direction)->transform(CLI::CheckedTransformer(directions));
  add_shape(*command, flags->call.shape);
  add_options(*command, flags->call.options);
}

}  // namespace tessera::cli
