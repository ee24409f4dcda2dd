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
  __device__ explicit Schedule(const Sm90ForwardParams& all) : params(all.attention), order(all.order) {}
  [[nodiscard]] __device__ __forceinline__ bool more() const { return unit() < order.units(); }
  __device__ __forceinline__ void next() { ++round; }
  // The same, from where the compiler cannot tell: what work() gave need not be kept.
  [[nodiscard]] __device__ __forceinline__ ForwardWork work_again() const {
    Schedule same = *this;
    same.round = ptx::opaque(round);
    return same.work();
  }

  [[nodiscard]] __device__ __forceinline__ ForwardWork work() const {
    const unsigned outer = order.inner.quotient(unit()), inner = order.inner.remainder(unit());
    const unsigned head = order.by_rows ? inner : outer, place = order.by_rows ? outer : inner;
    const bool second = order.paired && round % 2 == 1;
    const unsigned row = second ? place : order.rows - 1 - place;
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
    // Of an odd number of tiles the one in the middle has no partner.
    work.first_query = second && 2 * place + 1 == order.rows ? -1 : m_block * block_m;
    work.queries = max(0, min(work.sequence.seqlen_q - work.first_query, block_m));
    // The mask's arithmetic takes a while, and short tiles do not.
    Range keys{0, work.queries > 0 ? work.sequence.seqlen_k : 0};
    if (order.masked)
      keys = params.mask(work.sequence).keys_of_any({work.first_query, work.first_query + work.queries});
    // Keys are below 2^31.
    work.first_block = static_cast<unsigned>(keys.begin) / block_n;
    work.past_block =
        keys.empty() ? work.first_block : (static_cast<unsigned>(keys.end) + block_n - 1) / block_n;
    return work;
  }

 private:
  // From turn to turn the blocks of threads change places by a few: where the units of a head divide their
  // number, the same ones would get the small units otherwise.
  [[nodiscard]] __device__ __forceinline__ unsigned unit() const {
    const unsigned turn = order.paired ? round / 2 : round, place = blockIdx.x + turn * 7 % gridDim.x;
    return turn * gridDim.x + (place < gridDim.x ? place : place - gridDim.x);
  }

  const AttentionParams& params;
  const TileOrder& order;
  unsigned round = 0;
};

}  // namespace tessera::sm90
