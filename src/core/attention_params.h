// The arguments of the GPU kernels, as launch fills them and device code reads them.
#pragma once

#include "core/host_device.h"
#include "core/mask.h"
#include "core/philox.h"
#include "core/softcap.h"

namespace tessera {

// As View in core/problem.h: element (b, s, h, c) lies at b * batch + s * seq + h * head + c.
struct RowsArg {
  void* data;
  long long batch, seq, head;
  bool wide;     // float32, else the kernel's 16-bit type
  bool aligned;  // every row starts at a multiple of 16 bytes
};

// As BiasView: element (b, h, i, j), stride 0 where it is broadcast.
struct BiasArg {
  void* data;
  long long batch, head, row, col;
  long long extent[4];
  bool wide;
  bool aligned;  // keys are neighbours, and every row starts at a multiple of 16 bytes
};

// One sequence of the batch, as core/problem.h has it. Rows of a tensor, and so all of these, are below 2^31.
struct SequenceArg {
  int q_begin, k_begin;
  int seqlen_q, seqlen_k;
  int allocated_q, allocated_k;
};

// Rows of a block of backward's first kernel (kernels/delta.cuh).
inline constexpr int delta_rows = 2;

struct AttentionParams {
  RowsArg q, k, v, o, lse;
  RowsArg dout, dlse, dq, dk, dv;  // backward

  int batch, rows_q, rows_k;
  int num_heads_q, num_heads_k, group_size;
  int head_dim, head_dim_v;
  // Packed: cu_seqlens are given, every batch stride is 0, and the rows behind the last sequence count as one
  // more, empty sequence.
  const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;

  long long window_left, window_right;
  bool top_left;
  float scale, scale_log2;
  float softcap;  // 0: off
  CapInExponent cap;
  const float* alibi_slopes;
  long long alibi_batch, alibi_head;
  BiasArg bias, dbias;
  const void* sinks;
  void* dsinks;
  long long sinks_stride, dsinks_stride;
  bool sinks_wide, dsinks_wide;
  Dropout dropout;

  // Backward's workspace. delta: [num_heads_q][all rows of q], rowsum(dout * o) - dlse. dq_acc: float, in
  // tiles of 16 rows and 8 columns, each as the fragments of one warp (tile/dq_tiles.cuh). turn:
  // [num_heads_q][row tiles], the number of key blocks that a tile has taken; null where the order does not
  // matter. ticket: the key blocks that have been taken, by those who take them one by one.
  float *delta, *dq_acc;
  int *turn, *ticket;
  // To be 0 before anything is added: from dq_acc on, which for delta, who clears it, may lie further on. A
  // multiple of 16.
  long long clear_bytes;

  [[nodiscard]] TESSERA_HD bool packed() const { return cu_seqlens_q != nullptr; }

  // Lengths on a GPU cannot be validated: whatever they are, nothing outside the tensors is touched.
  [[nodiscard]] TESSERA_HD SequenceArg sequence(int b) const {
    SequenceArg s{0, 0, rows_q, rows_k, rows_q, rows_k};
    if (packed()) {
      s.q_begin = clamp(cu_seqlens_q[b], 0, rows_q);
      s.k_begin = clamp(cu_seqlens_k[b], 0, rows_k);
      s.allocated_q = (b == batch ? rows_q : clamp(cu_seqlens_q[b + 1], s.q_begin, rows_q)) - s.q_begin;
      s.allocated_k = (b == batch ? rows_k : clamp(cu_seqlens_k[b + 1], s.k_begin, rows_k)) - s.k_begin;
      s.seqlen_q = b == batch ? 0 : s.allocated_q;
      s.seqlen_k = b == batch ? 0 : s.allocated_k;
    }
    if (b < batch && seqused_q != nullptr) s.seqlen_q = clamp(seqused_q[b], 0, s.allocated_q);
    if (b < batch && seqused_k != nullptr) s.seqlen_k = clamp(seqused_k[b], 0, s.allocated_k);
    return s;
  }
  [[nodiscard]] TESSERA_HD Mask mask(const SequenceArg& s) const {
    return {s.seqlen_q, s.seqlen_k, window_left, window_right,
            top_left ? 0LL : 0LL + s.seqlen_k - s.seqlen_q};
  }

  [[nodiscard]] static TESSERA_HD int clamp(int x, int low, int high) {
    return x < low ? low : x > high ? high : x;
  }
};

// What TMA knows of a tensor: the driver's CUtensorMap.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Divides by a number that the host knows: a product instead of a division.
struct Divisor {
  unsigned divisor = 1, shift = 0;
  unsigned factor = (1u << 31) + 1;

  Divisor() = default;
  TESSERA_HD constexpr explicit Divisor(unsigned d) : divisor(d) {
    while ((1ULL << shift) < d) ++shift;
    factor = static_cast<unsigned>((1ULL << (31 + shift)) / d + 1);
  }
  // n below 2^31.
  [[nodiscard]] TESSERA_HD constexpr unsigned quotient(unsigned n) const {
    return static_cast<unsigned>(static_cast<unsigned long long>(n) * factor >> 31 >> shift);
  }
  [[nodiscard]] TESSERA_HD constexpr unsigned remainder(unsigned n) const {
    return n - quotient(n) * divisor;
  }
};

// Packed sequences that a block of threads sorts by their length, one more for the rows behind them.
inline constexpr int most_sorted = 128;

// How tiles of queries are dealt out. Blocks of threads take units in turn: a tile, or - where tiles of a
// head differ, as under a causal mask - one that sees many keys and one that sees few, so that units are
// alike. The units of a head, or of some heads side by side, follow one another, so that those which run at a
// time share keys in the L2 cache; the last tiles of a sequence, which see most, come first. The first rows,
// which see least, may stay apart: then the others fill the turns, and these fill up what is left. Under a
// window all others are alike: then every second turn goes backwards, so that who had a longer tile than
// others in one has a shorter one in the next.
struct TileOrder {
  unsigned rows, heads;  // a row of tiles has one of each head (unless packed: of all batch entries)
  bool masked;           // queries do not see all keys of their sequence
  bool paired;
  bool sorted;      // rows are tiles of packed sequences, those of the longest first
  bool to_and_fro;  // every second turn goes backwards
  unsigned apart;   // rows whose tiles are dealt out last, one by one
  unsigned change;  // of places, from turn to turn; below the number of blocks of threads
  Divisor beside;   // heads whose units are dealt out side by side, row by row; divides `heads`
  Divisor inner;    // units of these heads
  Divisor all_heads, heads_of_batch, group_size;

  // Of what was said so far, so that a GPU need not work it out for every tile.
  unsigned pairs = 0, together = 0, units = 0;  // together: all that do not stay apart
  // Where a tile has several heads: the rows that each has of it, a power of two. `heads` are key heads then.
  int head_rows = 0;

  // Units of a head that follow one another.
  [[nodiscard]] constexpr unsigned units_of_head() const {
    return paired ? (rows - apart + 1) / 2 : rows - apart;
  }
  constexpr void count() {
    together = units_of_head() * heads;
    pairs = paired ? together : 0;
    units = together + apart * heads;
  }

  // Where one of `blocks` blocks of threads has come to.
  struct Turn {
    unsigned before = 0, place = 0;  // units of earlier turns, and its place in this one
    bool second = false;             // of a pair

    [[nodiscard]] TESSERA_HD constexpr unsigned unit() const { return before + place; }
  };
  TESSERA_HD constexpr void next(Turn& turn, unsigned blocks) const {
    turn.second = turn.unit() < pairs && !turn.second;
    if (turn.second) return;
    turn.before += blocks;
    if (to_and_fro) {
      turn.place = blocks - 1 - turn.place;
      return;
    }
    // Where the units of a head divide the number of blocks, the same ones would get the small units
    // otherwise.
    turn.place += change;
    if (turn.place >= blocks) turn.place -= blocks;
  }

  struct Tile {
    unsigned row, head;
    bool there;  // of an odd number of rows the one in the middle has no partner
  };
  [[nodiscard]] TESSERA_HD constexpr Tile tile(const Turn& turn) const {
    const unsigned last = units - 1, unit = turn.unit() < last ? turn.unit() : last;  // behind it, any one
    if (unit >= together) {
      const unsigned single = unit - together;
      return {apart - 1 - all_heads.quotient(single), all_heads.remainder(single), true};
    }
    const unsigned rest = inner.remainder(unit), from_end = beside.quotient(rest);
    const unsigned head = inner.quotient(unit) * beside.divisor + beside.remainder(rest);
    return {turn.second ? apart + from_end : rows - 1 - from_end, head,
            !turn.second || 2 * from_end + 1 != rows - apart};
  }
};

// What Hopper's kernels have beside their tensor maps. Lengths are below NarrowMask::unbounded.
struct Sm90Params {
  AttentionParams attention;
  int window_left, window_right;

  [[nodiscard]] TESSERA_HD NarrowMask mask(const SequenceArg& s) const {
    return {s.seqlen_q, s.seqlen_k, window_left, window_right,
            attention.top_left ? 0 : s.seqlen_k - s.seqlen_q};
  }
};

struct Sm90ForwardParams : Sm90Params {
  TensorMap q, k, v, o;  // (column, row, head, batch); boxes as sm90/forward.cuh loads and stores them
  TileOrder order;
  bool o_by_tma;      // o has a map
  unsigned zero = 0;  // always, which the compiler does not know (tile/panels.cuh)
};

// Which block of keys gets which number, where sums of dq have an order. A list is the blocks of a key head,
// of one batch entry unless they are packed: one after the other, from those that add first. Each follows the
// one before it through the queries, and has to be behind it. So numbers go to `beside` lists in turn: who
// begins at the same time as another then has another list, and blocks of a list begin one after the other.
// Within a list numbers rise: each waits for smaller ones only.
struct KeyOrder {
  unsigned length, lists;
  unsigned beside;  // at least 1

  // In lists one after the other. Numbers behind the last stay there.
  [[nodiscard]] TESSERA_HD constexpr unsigned place(unsigned number) const {
    if (number >= length * lists) return number;
    const unsigned first = number / (length * beside) * beside;
    const unsigned rest = number - first * length;
    const unsigned here = lists - first < beside ? lists - first : beside;
    return (first + rest % here) * length + rest / here;
  }
  // How many blocks of keys add to a block of queries before this one: the last that it sees is the first.
  [[nodiscard]] static TESSERA_HD int turn(const NarrowMask& mask, int first_query, int past_query,
                                           int n_block, int block_n) {
    return (mask.keys_of_any({first_query, past_query}).end - 1) / block_n - n_block;
  }
};

struct Sm90BackwardParams : Sm90Params {
  TensorMap q, k, v, dout;
  KeyOrder order;
};

[[nodiscard]] TESSERA_HD constexpr int tiles_of(int size, int tile) {
  return size / tile + (size % tile != 0 ? 1 : 0);
}

// Tiles of `rows` rows of all sequences, numbered without reading a length on the host. A packed sequence b
// that begins at cu[b] owns the numbers from cu[b] / rows + b on: enough for its rows, and none twice. On the
// device there are fewer than 2^31.
[[nodiscard]] TESSERA_HD constexpr long long count_tiles(long long batch, int all_rows, bool packed,
                                                         int rows) {
  return packed ? all_rows / rows + batch + 1 : batch * tiles_of(all_rows, rows);
}
[[nodiscard]] TESSERA_HD inline int first_tile(const int* cu_seqlens, int b, int all_rows, int rows) {
  if (cu_seqlens == nullptr) return b * tiles_of(all_rows, rows);
  return AttentionParams::clamp(cu_seqlens[b], 0, all_rows) / rows + b;
}

struct TileIndex {
  int b;
  int tile;  // of the sequence b; a packed one may lie behind its rows, or before
};
[[nodiscard]] TESSERA_HD inline TileIndex find_tile(const int* cu_seqlens, int batch, int all_rows, int rows,
                                                    unsigned number) {
  if (cu_seqlens == nullptr) {
    const unsigned each = tiles_of(all_rows, rows);
    return {static_cast<int>(number / each), static_cast<int>(number % each)};
  }
  int low = 0, high = batch;  // the last b whose first tile is at most number
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (first_tile(cu_seqlens, middle, all_rows, rows) <= static_cast<int>(number)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, static_cast<int>(number) - first_tile(cu_seqlens, low, all_rows, rows)};
}

}  // namespace tessera
