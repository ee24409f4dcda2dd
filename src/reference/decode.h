// Decode by the oracle: it gathers what the cache holds, rotates q and k_new, appends, and leaves the rest to
// forward's loops. It has its own reading of page_table, cache_batch_idx, leftpad_k and of the positions.
#pragma once

#include <vector>

#include "reference/oracle.h"

namespace tessera::reference {

struct Decoded {
  Outputs outputs, plain_outputs;
  Deviations deviations;             // of o and lse
  std::vector<double> k_new, v_new;  // in their own dense order, as the cache must hold them afterwards
};

// The cache is read as it is before the append, and not written.
[[nodiscard]] Decoded decode(const Problem& problem);

// merge_states: the joint result of two sets of keys.
[[nodiscard]] Outputs merge_states(const Problem& problem);

}  // namespace tessera::reference
