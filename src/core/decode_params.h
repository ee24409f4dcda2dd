// The arguments of the GPU kernels of decode, as launch fills them and device code reads them.
#pragma once

#include "core/attention_config.h"
#include "core/attention_params.h"

namespace tessera {

// cos or sin: row `position`, rotary_dim / 2 of them.
struct AnglesArg {
  const void* data;
  long long row;  // stride
  bool wide;
};

// What a key head's stored numbers are to be multiplied by: 1 where there is none.
struct ScaleArg {
  const float* data;
  long long stride;

  [[nodiscard]] TESSERA_HD float of(int head_k) const {
    return data == nullptr ? 1.0f : data[head_k * stride];
  }
};

// One sequence of the batch, as Sequence in core/problem.h. Its key j is in slot k_begin + j.
struct DecodeSequence {
  int q_begin, allocated_q, seqlen_q;  // rows from seqlen_q on belong to no sequence: padding
  int k_begin, seqlen_k;
  int before;  // slots in use before the append
  int new_begin, seqlen_new;
};

// The parts of a sequence's keys, as core/split.h has them, in 32 bits: each is one warp's at a time.
struct DecodeSplits {
  int keys, count;
};
// How a sequence's parts are dealt out: to `count` blocks of threads, `parts` neighbours to each of a block's
// warps, a power of two.
struct DecodeBlocks {
  int parts, count;
};

// The index-th queries of a sequence (a packed one's may lie behind its rows, or before), by some of the
// heads that share a key head.
struct DecodeTileIndex {
  int b, index, head_tile;
};

// Work is cut into tiles of `queries` queries by `heads` of the query heads that share a key head, and those
// by parts of the keys: block (tile * head_tiles_k + head tile) * most_splits + split.
struct DecodeParams {
  AttentionParams attention;  // k and v are the cache, cu_seqlens_k those of k_new, bias and dropout are none

  const int* seqlens;
  const int* page_table;  // null: contiguous
  long long page_table_row;
  Divisor page_size;
  int blocks;  // pages, or rows of the cache
  const int *batch_idx, *leftpad;
  Stored stored;
  ScaleArg k_scale, v_scale;
  RowsArg k_new, v_new;
  int rows_new;
  AnglesArg cos, sin;
  int positions;   // rows of cos and sin
  int rotary_dim;  // 0: nothing turns
  bool interleaved;
  bool ordered;  // query i stands i positions behind the first; else all stand where it does

  int max_seqlen_k;
  int queries, heads;    // of a tile
  Divisor tile_heads;    // by `heads`
  Divisor head_tiles;    // of a key head
  Divisor head_tiles_k;  // of all key heads
  Divisor tiles;         // of a sequence, unless packed
  Divisor parts;         // num_splits, or how many there are at most by themselves
  int split_unit;
  int split_fewest, split_fewest_joined;  // of a sequence of up to joined_queries
  int joined_queries;
  int split_queries;    // a sequence of more is one block's
  int warps;            // of a block
  unsigned at_once;     // blocks that a GPU has room for: later ones begin when others have ended
  Divisor most_splits;  // blocks of a tile
  static constexpr int most_blocks = 128;
  // The workspace, of sequences of several splits: split s of row r of a tile is row
  // (partial tile * most_splits + s) * partial_rows + r. state: reference and sum.
  Divisor split_tiles;  // of a sequence of split_queries
  bool partial_as_all;  // each tile has a place: a packed batch's that are fewer than those
  int partial_rows, partial_cols;
  float *o_partial, *state_partial;

  // A length as it is now, past the cache of a multiprocessor: kernels look at them before the ones before
  // them have ended, and again then. Pages that keys are read from are read only then, and often: they may
  // be cached.
  [[nodiscard]] static TESSERA_HD int now(const int& x) { return *static_cast<const volatile int*>(&x); }

  // Lengths on a GPU cannot be validated: whatever they are, nothing outside the tensors is touched.
  [[nodiscard]] TESSERA_HD DecodeSequence sequence(int b) const {
    const AttentionParams& a = attention;
    DecodeSequence s{0, a.rows_q, 0, 0, 0, 0, 0, 0};
    const auto clamp = [](int x, int low, int high) { return AttentionParams::clamp(x, low, high); };
    if (a.packed()) {
      s.q_begin = clamp(now(a.cu_seqlens_q[b]), 0, a.rows_q);
      s.allocated_q =
          (b == a.batch ? a.rows_q : clamp(now(a.cu_seqlens_q[b + 1]), s.q_begin, a.rows_q)) - s.q_begin;
    }
    if (b == a.batch) return s;  // the rows behind the last
    s.seqlen_q = s.allocated_q;
    s.before = clamp(now(seqlens[b]), 0, a.rows_k);
    s.seqlen_new = rows_new;
    if (rows_new > 0 && a.packed()) {
      s.new_begin = clamp(now(a.cu_seqlens_k[b]), 0, rows_new);
      s.seqlen_new = clamp(now(a.cu_seqlens_k[b + 1]), s.new_begin, rows_new) - s.new_begin;
    }
    s.seqlen_new = clamp(s.seqlen_new, 0, a.rows_k - s.before);
    s.k_begin = leftpad == nullptr ? 0 : clamp(now(leftpad[b]), 0, s.before);
    s.seqlen_k = clamp(s.before + s.seqlen_new - s.k_begin, 0, max_seqlen_k);
    return s;
  }
  [[nodiscard]] TESSERA_HD Mask mask(const DecodeSequence& s) const {
    return {s.seqlen_q, s.seqlen_k, attention.window_left, attention.window_right,
            0LL + s.seqlen_k - s.seqlen_q};
  }
  // Splits::of(seen, ...), where `seen` keys are those that some query of the sequence sees.
  [[nodiscard]] TESSERA_HD constexpr DecodeSplits splits(int seqlen_q, int seen) const {
    const auto n = static_cast<unsigned>(seen);
    const auto unit = static_cast<unsigned>(split_unit), w = static_cast<unsigned>(warps);
    unsigned keys =
        seqlen_q > split_queries ? (n + w - 1) / w : parts.quotient(n) + (parts.remainder(n) != 0 ? 1 : 0);
    keys = (keys + unit - 1) / unit * unit;
    const auto fewest = static_cast<unsigned>(seqlen_q > joined_queries ? split_fewest : split_fewest_joined);
    if (keys < fewest) keys = fewest;
    const unsigned count = (n + keys - 1) / keys;
    return {static_cast<int>(keys), count < 1 ? 1 : static_cast<int>(count)};
  }
  // As few parts a warp as the tile's blocks allow.
  [[nodiscard]] TESSERA_HD constexpr DecodeBlocks blocks_of(const DecodeSplits& splits) const {
    int of_warp = 1, count = (splits.count + warps - 1) / warps;
    while (count > static_cast<int>(most_splits.divisor)) {
      of_warp *= 2;
      count = (count + 1) / 2;
    }
    return {of_warp, count};
  }
  // The tile of a block, and that of a place in the workspace. number: row tile * head_tiles_k + head tile.
  [[nodiscard]] TESSERA_HD DecodeTileIndex tile(unsigned number) const {
    const auto head_tile = static_cast<int>(head_tiles_k.remainder(number));
    const unsigned row_tile = head_tiles_k.quotient(number);
    const AttentionParams& a = attention;
    if (!a.packed())
      return {static_cast<int>(tiles.quotient(row_tile)), static_cast<int>(tiles.remainder(row_tile)),
              head_tile};
    const TileIndex found = find_tile(a.cu_seqlens_q, a.batch, a.rows_q, queries, row_tile);
    return {found.b, found.tile, head_tile};
  }
  [[nodiscard]] TESSERA_HD DecodeTileIndex partial_tile(unsigned number) const {
    if (partial_as_all) return tile(number);
    const unsigned row_tile = head_tiles_k.quotient(number);
    return {AttentionParams::clamp(static_cast<int>(split_tiles.quotient(row_tile)), 0, attention.batch),
            static_cast<int>(split_tiles.remainder(row_tile)),
            static_cast<int>(head_tiles_k.remainder(number))};
  }
  // The place of `tile`, which is tile `number`.
  [[nodiscard]] TESSERA_HD long long partial_number(const DecodeTileIndex& tile, unsigned number) const {
    if (partial_as_all) return number;
    return (1LL * tile.b * split_tiles.divisor + tile.index) * head_tiles_k.divisor + tile.head_tile;
  }
  [[nodiscard]] TESSERA_HD long long partial_row(long long place, int split) const {
    return (place * most_splits.divisor + split) * partial_rows;
  }
  // Where a slot of a sequence lies: k.batch * block + k.seq * slot.
  struct Slot {
    int block, slot;
  };
  [[nodiscard]] TESSERA_HD Slot slot(int b, int s, bool early = false) const {
    if (page_table == nullptr)
      return {batch_idx == nullptr ? b : AttentionParams::clamp(now(batch_idx[b]), 0, blocks - 1), s};
    const unsigned page = page_size.quotient(static_cast<unsigned>(s));
    const int& number = page_table[b * page_table_row + page];
    return {AttentionParams::clamp(early ? now(number) : number, 0, blocks - 1),
            static_cast<int>(page_size.remainder(static_cast<unsigned>(s)))};
  }
  // The row of cos and sin of a query; a new key's is its slot.
  [[nodiscard]] TESSERA_HD int query_position(const DecodeSequence& s, int query) const {
    return AttentionParams::clamp(s.before + (ordered ? query : 0), 0, positions - 1);
  }
};

}  // namespace tessera
