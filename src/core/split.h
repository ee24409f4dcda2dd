// Into which parts decode cuts the keys of a sequence. DecodeParams::splits is the same in 32 bits, for a
// GPU, and a test holds it against this (tests/cuda/decode_plan_test.cpp). It depends on that sequence and
// the call's options alone, never on the batch or the machine's load, so that a sequence's result does not
// either.
#pragma once

#include "core/host_device.h"

namespace tessera {

struct Splits {
  long long keys = 1;   // of a part; the last may have fewer
  long long count = 1;  // at least 1

  // What a kernel brings: its parts are multiples of `unit` keys, and automatic ones have at least `fewest`
  // keys (a multiple of unit) and are at most `most` in number.
  struct Rule {
    long long unit = 1, fewest = 1, most = 1;
  };

  // Of seqlen_k keys; num_splits 0: automatic.
  [[nodiscard]] static TESSERA_HD constexpr Splits of(long long seqlen_k, long long num_splits, Rule rule) {
    const long long parts = num_splits > 0 ? num_splits : rule.most;
    long long keys = up(up(seqlen_k, parts) / parts, rule.unit);
    const long long fewest = num_splits > 0 ? rule.unit : rule.fewest;
    if (keys < fewest) keys = fewest;
    const long long count = up(seqlen_k, keys) / keys;
    return {keys, count < 1 ? 1 : count};
  }
  // No sequence of at most seqlen_k keys has more parts.
  [[nodiscard]] static TESSERA_HD constexpr long long most(long long seqlen_k, long long num_splits,
                                                           Rule rule) {
    const long long parts = num_splits > 0 ? num_splits : rule.most;
    const long long fewest = num_splits > 0 ? rule.unit : rule.fewest;
    const long long full = up(seqlen_k, fewest) / fewest;
    return full < 1 ? 1 : full < parts ? full : parts;
  }

 private:
  static TESSERA_HD constexpr long long up(long long n, long long unit) {
    return (n + unit - 1) / unit * unit;
  }
};

}  // namespace tessera
