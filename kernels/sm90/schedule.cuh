// Which tiles of queries a block of threads works on, and which keys they see.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "ptx/math.cuh"

namespace tessera::sm90 {

struct ForwardWork {
  int b, h;
  SequenceArg sequence;
  int first_query, queries;     // those beyond the sequence are padding
  int first_block, past_block;  // blocks of keys that some query sees

  [[nodiscard]] __device__ bool there() const {
    return first_query >= 0 && first_query < sequence.allocated_q;
  }
};

// All tiles in one order: the last of a sequence first, for under a causal mask they see most, and
// order.together heads side by side. They are dealt out to the blocks of threads back and forth, so that who
// had a longer one gets a shorter one next.
template <int block_m, int block_n>
class Schedule {
 public:
  __device__ explicit Schedule(const Sm90ForwardParams& all) : params(all.attention), order(all.order) {}
  [[nodiscard]] __device__ __forceinline__ bool more() const { return index() < order.rows * order.heads; }
  __device__ __forceinline__ void next() { ++round; }

  [[nodiscard]] __device__ __forceinline__ ForwardWork work() const {
    const unsigned section = index() / (order.rows * order.together);
    const unsigned rest = index() - section * order.rows * order.together;
    const unsigned here = min(order.together, order.heads - section * order.together);
    const unsigned row = order.rows - 1 - rest / here, head = section * order.together + rest % here;
    ForwardWork work;
    int m_block = static_cast<int>(row);
    if (params.packed()) {
      const auto [b, tile] = find_tile(params.cu_seqlens_q, params.batch, params.rows_q, block_m, row);
      work.b = b;
      m_block = tile;
    } else {
      work.b = static_cast<int>(head / params.num_heads_q);
    }
    work.h = static_cast<int>(params.packed() ? head : head % params.num_heads_q);
    work.sequence = params.sequence(work.b);
    work.first_query = m_block * block_m;
    work.queries = max(0, min(work.sequence.seqlen_q - work.first_query, block_m));
    const Range keys =
        params.mask(work.sequence).keys_of_any({work.first_query, work.first_query + work.queries});
    work.first_block = static_cast<int>(keys.begin / block_n);
    work.past_block = keys.empty() ? work.first_block : static_cast<int>((keys.end + block_n - 1) / block_n);
    return work;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ unsigned index() const {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  const AttentionParams& params;
  const TileOrder& order;
  unsigned round = 0;
};

}  // namespace tessera::sm90
