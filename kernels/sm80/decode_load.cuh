// What decode brings from memory: a tile's queries, and which keys each warp has and how they come to it.
//
// A key's place is looked up by one lane, a step before the copy asks for it: a page may have any size.
#pragma once

#include "core/attention_config.h"
#include "core/decode_params.h"
#include "ptx/launch.cuh"
#include "tile/copy.cuh"
#include "tile/fragments.cuh"
#include "tile/states.cuh"

namespace tessera::sm80 {

// Of k or v, `cols` numbers wide. A tile of bytes is one of half as many 16-bit columns.
template <DecodeConfig C, int cols>
using KeyTile = tile::SharedTile<C.keys, cols * C.number_bytes() / 2>;
// ldmatrix reads 16 rows.
template <DecodeConfig C>
using QueryTile = tile::SharedTile<(C.block_m < 16 ? 16 : C.block_m), C.head_dim>;

// Where the key of a lane lies; block -1: there is none.
struct KeyPlace {
  int block, slot;
};

// A number of the cache.
template <bool narrow>
struct CacheNumber {
  using Bits = tile::HalfBits;
};
template <>
struct CacheNumber<true> {
  using Bits = unsigned char;
};

// Sixteen bytes one by one, those from valid on as zeros.
[[nodiscard]] __device__ inline uint4 gather_bytes(const unsigned char* from, int valid) {
  unsigned words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < valid) words[i / 4] |= static_cast<unsigned>(from[i]) << (8 * (i % 4));
  }
  return {words[0], words[1], words[2], words[3]};
}

// Copies C.keys rows of k or v to a buffer of the warp.
template <DecodeConfig C, int cols>
struct KeyCopy {
  using Tile = KeyTile<C, cols>;
  using Bits = typename CacheNumber<C.narrow()>::Bits;
  static constexpr int group = (Tile::pieces & -Tile::pieces) < 32 ? Tile::pieces & -Tile::pieces : 32;
  static constexpr int groups = Tile::pieces / group, row_step = 32 / group;
  static_assert(C.keys % row_step == 0);
  // Where there are registers for them. ptxas 13.0 loses the uniform register of a copy with a hint whose
  // address in shared memory is a uniform one and the lane's share: [R + UR0], desc[UR1], an illegal
  // instruction. On Hopper these are rows of 32 pieces, on Blackwell others, too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr bool hints = false;
#else
  static constexpr bool hints = C.block_m * C.head_dim_v <= 2048 && row_step > 1;
#endif

  // Paged: the head's first row. Contiguous: the lane's first row of the next step. Both at its columns.
  const Bits* from;
  long long batch, seq;
  int valid_cols;  // from the lane's on
  // Where its first piece goes in a tile: (address + lane_at) ^ lane_bits. Not one sum, for ptxas's sake: see
  // hints.
  unsigned lane_at, lane_bits;

  // first: of a contiguous cache the first key that will be asked for.
  __device__ KeyCopy(const RowsArg& rows, int head, int width, bool paged, const KeyPlace& first)
      : batch(rows.batch), seq(rows.seq) {
    const int col = lane_piece() * (16 / C.number_bytes());
    from = static_cast<const Bits*>(rows.data) + head * rows.head + col;
    if (!paged) from += first.block * batch + (0LL + first.slot + lane_row()) * seq;
    valid_cols = width - col;
    constexpr int mixed = Tile::cols % 64 == 0 ? 7 : 3;  // the bits of a piece that its row changes
    lane_at = ptx::opaque(lane_row() * Tile::row_bytes + ((lane_piece() & ~mixed) << 4));
    lane_bits = ptx::opaque(((lane_piece() & mixed) ^ Tile::permutation(lane_row())) << 4);
  }
  static __device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / group; }
  static __device__ __forceinline__ int lane_piece() { return threadIdx.x % group; }

  // The next step's. paged: each row by its lane's place; else the first `rows` are there.
  __device__ __forceinline__ void operator()(Tile& to, bool paged, const KeyPlace& place, int rows) {
    const unsigned address = ptx::shared_address(to.data) + lane_at;
    const auto copy = [&](int i, const Bits* source, bool there) {
      // Rows i * row_step and the lane's have no bit in common, nor have pieces g * group and the lane's.
      const unsigned target =
          (address ^ lane_bits ^ Tile::permutation(i * row_step) << 4) + i * row_step * Tile::row_bytes;
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        const int col = g * group * (16 / C.number_bytes()), valid = there ? valid_cols - col : 0;
        if constexpr (C.aligned && hints) {
          ptx::copy_async(target + g * group * 16, source + col, valid > 0 ? 16 : 0, ptx::read_once());
        } else if constexpr (C.aligned) {
          ptx::copy_async(target + g * group * 16, source + col, valid > 0 ? 16 : 0);
        } else if constexpr (C.narrow()) {
          ptx::store(target + g * group * 16, gather_bytes(source + col, valid));
        } else {
          ptx::store(target + g * group * 16, tile::gather<C.type>({source, 0, false}, col, valid));
        }
      }
    };
    if (paged) {
#pragma unroll
      for (int i = 0; i < C.keys / row_step; ++i) {
        const int block = __shfl_sync(~0u, place.block, lane_row() + i * row_step);
        const int slot = __shfl_sync(~0u, place.slot, lane_row() + i * row_step);
        copy(i, block < 0 ? from : from + (block * batch + slot * seq), block >= 0);
      }
    } else {
      const int lane_rows = rows - lane_row();
#pragma unroll
      for (int i = 0; i < C.keys / row_step; ++i) {
        copy(i, from, i * row_step < lane_rows);
        from += row_step * seq;
      }
    }
  }
};

// The keys of a warp: `parts` parts of `part_keys` keys, a multiple of C.keys, from `first` on; of them those
// from begin to end - 1.
struct WarpKeys {
  int first, part_keys, parts;
  int begin, end;
};

// What a block has to do, as the lengths are now.
struct DecodeWork {
  tile::DecodeTile tile;
  int split;
  Mask mask;
  Range seen;  // by any query of the sequence
  DecodeSplits splits;
  DecodeBlocks blocks;  // of the tile
  int row;              // of the cache, unless that is paged

  __device__ __forceinline__ explicit DecodeWork(const DecodeParams& params)
      : tile(tile::tile_of_block(params)),
        split(params.most_splits.remainder(ptx::block_index())),
        mask(params.mask(tile.sequence)),
        seen(mask.keys_of_any({0, tile.sequence.seqlen_q})),
        splits(params.splits(tile.sequence.seqlen_q, static_cast<int>(seen.size()))),
        blocks(params.blocks_of(splits)),
        row(params.page_table == nullptr && tile.b < params.attention.batch ? params.slot(tile.b, 0).block
                                                                            : 0) {}
  // Whether something that this was made of is another now. Not for packed queries.
  [[nodiscard]] __device__ __forceinline__ bool changed(const DecodeParams& params) const {
    const DecodeSequence now = params.sequence(tile.b);
    return now.before != tile.sequence.before || now.k_begin != tile.sequence.k_begin ||
           (params.page_table == nullptr && params.slot(tile.b, 0).block != row);
  }
  [[nodiscard]] __device__ __forceinline__ bool none() const {
    return tile.queries == 0 || split >= blocks.count;
  }
  // Of the block's warps those that have parts.
  [[nodiscard]] __device__ __forceinline__ int warps(int all) const {
    return min(all, (splits.count - split * all * blocks.parts + blocks.parts - 1) / blocks.parts);
  }
  // The warp's keys that some query of the tile sees.
  [[nodiscard]] __device__ __forceinline__ WarpKeys keys(int all_warps) const {
    const int queries = min(tile.queries, max(0, tile.sequence.seqlen_q - tile.first_query));
    const Range own = mask.keys_of_any({tile.first_query, tile.first_query + queries});
    const int part = (split * all_warps + ptx::warp_index()) * blocks.parts;
    WarpKeys keys;
    keys.part_keys = splits.keys;
    keys.parts = min(blocks.parts, splits.count - part);
    const long long from = seen.begin + 1LL * part * splits.keys;
    const long long past = from + 1LL * max(keys.parts, 0) * splits.keys;
    keys.first = static_cast<int>(min(from, seen.end));
    keys.begin = static_cast<int>(max(own.begin, from));
    keys.end = static_cast<int>(min(own.end, min(seen.end, past)));
    return keys;
  }
};

// A warp's keys on their way to its ring of buffers.
template <DecodeConfig C>
struct KeyRing {
  struct Step {
    KeyTile<C, C.head_dim> k;
    KeyTile<C, C.head_dim_v> v;
  };

  WarpKeys keys;
  // Steps count from the warp's first key on; those in front of begin are left out.
  int first_step, last_step;
  KeyPlace next;  // of the lane's key of the step that is asked for next
  KeyCopy<C, C.head_dim> copy_k;
  KeyCopy<C, C.head_dim_v> copy_v;
  int filling = 0;  // the buffer that is filled next

  __device__ __forceinline__ KeyRing(const DecodeParams& params, const DecodeWork& work)
      : keys(work.keys(C.warps)),
        first_step(keys.begin < keys.end ? (keys.begin - keys.first) / C.keys : 0),
        last_step(keys.begin < keys.end ? (keys.end - keys.first + C.keys - 1) / C.keys : 0),
        next(place_of(params, work, first_step)),
        copy_k(params.attention.k, work.tile.head_k, params.attention.head_dim, paged(params), next),
        copy_v(params.attention.v, work.tile.head_k, params.attention.head_dim_v, paged(params), next) {}

  static __device__ __forceinline__ bool paged(const DecodeParams& params) {
    return params.page_table != nullptr;
  }
  // Contiguous: of the step's first key.
  [[nodiscard]] __device__ __forceinline__ KeyPlace place_of(const DecodeParams& params,
                                                             const DecodeWork& work, int step) const {
    const int key = keys.first + step * C.keys, slot = work.tile.sequence.k_begin + key;
    if (!paged(params)) return {work.row, slot};
    const int lane = threadIdx.x % C.keys;
    if (key + lane >= keys.end) return {-1, 0};
    const auto [block, at] = params.slot(work.tile.b, slot + lane);
    return {block, at};
  }
  // Asks for a step that comes next, if it exists.
  __device__ __forceinline__ void load(const DecodeParams& params, const DecodeWork& work,
                                       Step (&ring)[C.stages], int step) {
    if (step < last_step) {
      const int rows = keys.end - keys.first - step * C.keys;
      copy_k(ring[filling].k, paged(params), next, rows);
      copy_v(ring[filling].v, paged(params), next, rows);
      filling = filling + 1 == C.stages ? 0 : filling + 1;
    }
    if (paged(params)) next = place_of(params, work, step + 1);
  }
};

// Before the wait for earlier kernels: the keys a warp will begin with are sent for, while memory has little
// to do. Lengths and pages may be about to change: then that was for nothing. No key is read here. A block
// that begins when others have ended does not wait, and has nothing to gain.
template <DecodeConfig C, bool paged>
__device__ __forceinline__ void ask_early(const DecodeParams& params, const DecodeWork& work,
                                          const WarpKeys& keys) {
  const AttentionParams& a = params.attention;
  if (!C.asks_early() || ptx::block_index() >= params.at_once || keys.begin >= keys.end) return;
  const int first = keys.begin - (keys.begin - keys.first) % C.keys;
  const auto ask = [&](const RowsArg& rows, const DecodeParams::Slot& at, int width) {
    const auto* row = static_cast<const typename CacheNumber<C.narrow()>::Bits*>(rows.data) +
                      work.tile.head_k * rows.head + (at.block * rows.batch + at.slot * rows.seq);
    for (int col = 0; col < width; col += 128 / C.number_bytes()) ptx::prefetch(row + col);  // lines
  };
  for (int i = threadIdx.x % 32; i < (C.stages - 1) * C.keys && first + i < keys.end; i += 32) {
    const int key = work.tile.sequence.k_begin + first + i;
    const DecodeParams::Slot at =
        paged ? params.slot(work.tile.b, key, true) : DecodeParams::Slot{work.row, key};
    ask(a.k, at, a.head_dim);
    ask(a.v, at, a.head_dim_v);
  }
}

// The tile of q, rotated; rows that are not there are zeros.
template <DecodeConfig C>
__device__ __forceinline__ void load_q(const DecodeParams& params, const tile::DecodeTile& tile,
                                       QueryTile<C>& q) {
  constexpr int threads = C.warps * 32, pieces = C.head_dim / 8;
  const AttentionParams& a = params.attention;
#pragma unroll 1
  for (int i = threadIdx.x; i < C.block_m * pieces; i += threads) {
    const int r = i / pieces, col = i % pieces * 8;
    const auto [query, h, there] = tile.row(params, r);
    const int valid = there ? a.head_dim - col : 0;
    const long long row = tile.b * a.q.batch + (0LL + tile.sequence.q_begin + query) * a.q.seq + h * a.q.head;
    const unsigned to = ptx::shared_address(q.at(r, col / 8));
    const auto* from = static_cast<const tile::HalfBits*>(a.q.data) + (there ? row : 0);
    if (params.rotary_dim > col && valid > 0) {
      const int position = params.query_position(tile.sequence, query);
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[e] = e < valid ? tile::turned<C.type>(params, a.q, row, col + e, position) : 0.0f;
      ptx::store(to, uint4{ptx::pack<C.type>(x[0], x[1]), ptx::pack<C.type>(x[2], x[3]),
                           ptx::pack<C.type>(x[4], x[5]), ptx::pack<C.type>(x[6], x[7])});
    } else if constexpr (C.aligned) {
      ptx::copy_async(to, valid > 0 ? from + col : from, valid > 0 ? 16 : 0);
    } else {
      ptx::store(to, tile::gather<C.type>({from, 0, false}, col, valid));
    }
  }
}

// For 8-bit keys: as float16, each row times a power of two, so that the largest of its numbers is below 2^14
// and none that counts is lost. units[row].x gets what undoes it. A warp has a row.
template <DecodeConfig C>
__device__ __forceinline__ void load_narrow_q(const DecodeParams& params, const tile::DecodeTile& tile,
                                              QueryTile<C>& q, float2* units) {
  const AttentionParams& a = params.attention;
  const int lane = threadIdx.x % 32, col = lane * 8;
  const int first = col / 16 * 16 + col / 8 % 2 * 2;  // and the next, and two of each four from there on
#pragma unroll 2
  for (int r = threadIdx.x / 32; r < C.block_m; r += C.warps) {
    const auto [query, h, there] = tile.row(params, r);
    const long long row = tile.b * a.q.batch + (0LL + tile.sequence.q_begin + query) * a.q.seq + h * a.q.head;
    const int position = params.rotary_dim > 0 ? params.query_position(tile.sequence, query) : 0;
    float x[8], most = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int c = first + e / 2 * 4 + e % 2;
      x[e] = there && c < a.head_dim ? tile::turned<C.type>(params, a.q, row, c, position) : 0.0f;
      most = fmaxf(most, fabsf(x[e]));
    }
    for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
    const int up = 13 - max(exponent, -100);
    const float by = __uint_as_float(static_cast<unsigned>(127 + up) << 23);
    if (col < C.head_dim) {
      const auto pack = [&](int e) { return ptx::pack<Half::float16>(x[e] * by, x[e + 1] * by); };
      ptx::store(ptx::shared_address(q.at(r, lane)), uint4{pack(0), pack(2), pack(4), pack(6)});
    }
    if (lane == 0) units[r].x = __uint_as_float(static_cast<unsigned>(127 - up) << 23);
  }
}

}  // namespace tessera::sm80
