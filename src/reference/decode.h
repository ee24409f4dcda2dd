// Decode by the oracle: it gathers what the cache holds, rotates q and k_new, appends, and leaves the rest to
// forward's loops. It has its own reading of page_table, cache_batch_idx, leftpad_k and of the positions.
#pragma once

#include <vector>

#include "reference/oracle.h"

namespace tessera::reference {

struct Decoded {
  Outputs outputs, plain_outputs;
  Deviations deviations;             // of o and lse
  std::vector<double> k_new, v_new;  // in their own dense order, as the cache must store them afterwards
};

// The cache is read and not written. Appended::not_yet: it is as it was before the call, and k_new and v_new
// are rounded to its dtype here; there: it is as the call left it, and o follows from what it holds, however
// that was rounded.
enum class Appended : std::uint8_t { not_yet, there };
[[nodiscard]] Decoded decode(const Problem& problem, Appended appended = Appended::not_yet);

// merge_states: the joint result of two sets of keys.
[[nodiscard]] Outputs merge_states(const Problem& problem);

}  // namespace tessera::reference
