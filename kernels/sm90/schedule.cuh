// Which tiles of queries a block of threads works on, and which keys they see.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace tessera::sm90 {

// Blocks of keys that some of a warpgroup's queries see, and those that all of them see whole.
struct SeenBlocks {
  int first, past, first_whole, past_whole;
};

struct ForwardWork {
  int b, h;
  SequenceArg sequence;
  int first_query, queries;     // those beyond the sequence are padding
  int first_block, past_block;  // blocks of keys that some query sees
  SeenBlocks own;               // of the warpgroup that receives it

  [[nodiscard]] __device__ bool there() const {
    return first_query >= 0 && first_query < sequence.allocated_q;
  }
};
inline constexpr ForwardWork no_work{.first_query = -1};
static_assert(sizeof(ForwardWork) == 16 * sizeof(int));  // as the plan counts shared memory

// One thread finds a tile's work, others receive it, by way of shared memory. The words come to a lane each
// and are handed round by shuffles: so the compiler knows that a warp's lanes agree on them.
struct WorkWords {
  int word[sizeof(ForwardWork) / sizeof(int)];
};
__device__ __forceinline__ void hand_over(ForwardWork& place, const ForwardWork& work) {
  const auto words = __builtin_bit_cast(WorkWords, work);
  const unsigned address = ptx::shared_address(&place);
#pragma unroll
  for (unsigned i = 0; i < sizeof(words) / sizeof(int); ++i)
    ptx::store(address + i * 4, static_cast<unsigned>(words.word[i]));
}
[[nodiscard]] __device__ __forceinline__ ForwardWork receive(const ForwardWork& place) {
  WorkWords words;
  constexpr int count = sizeof(words) / sizeof(int);
  const int own = ptx::load_word(ptx::shared_address(&place) + (threadIdx.x % 32 % count) * 4);
#pragma unroll
  for (int i = 0; i < count; ++i) words.word[i] = __shfl_sync(~0u, own, i);
  return __builtin_bit_cast(ForwardWork, words);
}

// Packed sequences by their keys, most first: their tiles take longest. Every block of threads sorts them for
// itself.
struct SortedSequences {
  int first_tile[most_sorted];  // of the sequence that stands there
  unsigned char sequence[most_sorted];

  // For memory that is free until the next __syncthreads().
  struct Lengths {
    int keys[most_sorted], tiles[most_sorted];
  };
  // By all threads.
  __device__ __forceinline__ void sort(const AttentionParams& params, int block_m, Lengths& lengths) {
    const int own = static_cast<int>(threadIdx.x), count = params.batch + 1;
    if (own < count) {
      const SequenceArg one = params.sequence(own);
      lengths.keys[own] = one.seqlen_k;
      lengths.tiles[own] = tiles_of(one.allocated_q, block_m);
    }
    __syncthreads();
    if (own < count) {
      int place = 0, tiles = 0;
      for (int i = 0; i < count; ++i) {
        const int more = lengths.keys[i] - lengths.keys[own];
        if (more > 0 || (more == 0 && i < own)) {
          ++place;
          tiles += lengths.tiles[i];
        }
      }
      first_tile[place] = tiles;
      sequence[place] = static_cast<unsigned char>(own);
    }
  }
  // The sequence that has a tile, counted over all of them, and the tile's number from the sequence's end.
  [[nodiscard]] __device__ __forceinline__ TileIndex find(int batch, int tile) const {
    int low = 0, high = batch;  // the last place whose first tile is not behind it
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return {sequence[low], tile - first_tile[low]};
  }
};

// The tiles of one block of threads.
template <int block_m, int block_n, bool grouped>
class Schedule {
 public:
  __device__ Schedule(const Sm90ForwardParams& params, const SortedSequences& sorted)
      : all(params), sequences(sorted), turn{0, blockIdx.x} {}
  [[nodiscard]] __device__ __forceinline__ bool more() const { return turn.unit() < all.order.units; }
  __device__ __forceinline__ void next() { all.order.next(turn, gridDim.x); }
  [[nodiscard]] __device__ __forceinline__ ForwardWork work() const {
    const TileOrder& order = all.order;
    const AttentionParams& params = all.attention;
    const auto [row, head, there] = order.tile(turn);
    ForwardWork work;
    int m_block = static_cast<int>(row);
    if (order.sorted) {
      const auto [b, from_end] = sequences.find(params.batch, static_cast<int>(order.rows - 1 - row));
      work.b = b;
      m_block = from_end;
    } else if (params.packed()) {
      const auto [b, tile] = find_tile(params.cu_seqlens_q, params.batch, params.rows_q, block_m, row);
      work.b = b;
      m_block = tile;
    } else {
      work.b = static_cast<int>(order.heads_of_batch.quotient(head));
    }
    work.h = static_cast<int>(params.packed() ? head : order.heads_of_batch.remainder(head));
    if constexpr (grouped) {
      work.h = work.h * params.group_size + m_block * (block_m / order.head_rows);  // the tile's first
      m_block = 0;
    }
    work.sequence = params.sequence(work.b);
    // Behind the last sequence's tiles it is negative, and so not there.
    if (order.sorted) m_block = tiles_of(work.sequence.allocated_q, block_m) - 1 - m_block;
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
  // Of a tile's, what the queries of one warpgroup see, of `rows` each. Who takes turns takes part in all.
  template <bool turns, int rows>
  [[nodiscard]] __device__ __forceinline__ SeenBlocks seen(const ForwardWork& work, int group) const {
    SeenBlocks own{work.first_block, work.past_block, 0, 0};
    NarrowMask::Range whole{0, work.sequence.seqlen_k};
    if constexpr (grouped) {  // all of its heads have the same queries
      whole = all.mask(work.sequence).keys_of_all({0, work.queries});
    } else if (all.order.masked || work.queries < block_m) {
      // Rows that are not there do not count, as of several heads in a tile they do not: a warp's rows decide
      // together how a block is weighed.
      const NarrowMask mask = all.mask(work.sequence);
      const int first = work.first_query + group * rows;
      const NarrowMask::Range queries{first, min(first + rows, work.first_query + work.queries)};
      whole = mask.keys_of_all(queries);
      if constexpr (!turns) {
        const auto some = mask.keys_of_any(queries);
        if (!some.empty()) own.first = static_cast<unsigned>(some.begin) / block_n;
        own.past = some.empty() ? own.first : (static_cast<unsigned>(some.end) + block_n - 1) / block_n;
      }
    }
    own.first_whole = (static_cast<unsigned>(whole.begin) + block_n - 1) / block_n;
    own.past_whole = static_cast<unsigned>(whole.end) / block_n;
    return own;
  }

 private:
  const Sm90ForwardParams& all;
  const SortedSequences& sequences;
  TileOrder::Turn turn;
};

}  // namespace tessera::sm90
