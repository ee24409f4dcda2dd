// The yardstick of "% of peak": fp32 fused multiply-adds as fast as this machine does them, all threads at
// once.
#pragma once

namespace tessera::cli {

[[nodiscard]] double measure_fma_peak(int threads);  // FLOP/s, the best of several runs
// One run of about this many seconds: what the machine gives just now.
[[nodiscard]] double measure_fma_rate(int threads, double seconds);

}  // namespace tessera::cli
