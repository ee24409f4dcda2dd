// Which tiles of queries a block of threads works on, and which keys they see.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

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

// The tiles of one block of threads.
template <int block_m, int block_n>
class Schedule {
 public:
  __device__ explicit Schedule(const Sm90ForwardParams& params) : all(params), turn{0, blockIdx.x} {}
  [[nodiscard]] __device__ __forceinline__ bool more() const { return turn.unit() < all.order.units(); }
  __device__ __forceinline__ void next() { all.order.next(turn, gridDim.x); }
  // The same, from where the compiler cannot tell: what work() gave need not be kept.
  [[nodiscard]] __device__ __forceinline__ ForwardWork work_again() const {
    Schedule same = *this;
    same.turn.before = ptx::opaque(turn.before);
    return same.work();
  }

  [[nodiscard]] __device__ __forceinline__ ForwardWork work() const {
    const TileOrder& order = all.order;
    const AttentionParams& params = all.attention;
    const auto [row, head, there] = order.tile(turn);
    ForwardWork work;
    int m_block = static_cast<int>(row);
    if (params.packed()) {
      const auto [b, tile] = find_tile(params.cu_seqlens_q, params.batch, params.rows_q, block_m, row);
      work.b = b;
      m_block = tile;
    } else {
      work.b = static_cast<int>(order.num_heads_q.quotient(head));
    }
    work.h = static_cast<int>(params.packed() ? head : order.num_heads_q.remainder(head));
    work.sequence = params.sequence(work.b);
    work.first_query = there ? m_block * block_m : -1;
    work.queries = max(0, min(work.sequence.seqlen_q - work.first_query, block_m));
    // The mask's arithmetic takes a while, and short tiles do not.
    NarrowMask::Range keys{0, work.queries > 0 ? work.sequence.seqlen_k : 0};
    if (order.masked)
      keys = all.mask(work.sequence).keys_of_any({work.first_query, work.first_query + work.queries});
    work.first_block = static_cast<unsigned>(keys.begin) / block_n;
    work.past_block =
        keys.empty() ? work.first_block : (static_cast<unsigned>(keys.end) + block_n - 1) / block_n;
    return work;
  }

 private:
  const Sm90ForwardParams& all;
  TileOrder::Turn turn;
};

}  // namespace tessera::sm90
