// The arguments of merge_states on a GPU, as launch fills them and device code reads them.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"

namespace tessera {

// o and lse of some keys. Each o has a dtype of its own.
struct StateArg {
  RowsArg o;
  Half type;  // unless o is wide
  RowsArg lse;
};

struct MergeParams {
  StateArg a, b, all;
  long long rows;  // of all heads and batches
  int rows_q, num_heads, head_dim_v;
};

}  // namespace tessera
