// What a GPU kernel is compiled for: the one template parameter of each. Host and device.
//
// What is not here is an argument (core/attention_params.h). A flag is here only where it pays: each kernel's
// NOTES.md has the measurement.
#pragma once

namespace tessera {

enum class Half : unsigned char { float16, bfloat16 };
// What a cache holds: numbers of q's type, or 8-bit ones.
enum class Stored : unsigned char { half, float8, int8 };

// What a score has beside softmax_scale and the mask. any_scale: a softmax_scale that is not above 0.
// wide_bias, beside bias: it is float32. Forward alone is compiled for that.
enum class Terms : unsigned char {
  plain = 0,
  softcap = 1,
  alibi = 2,
  bias = 4,
  dropout = 8,
  any_scale = 16,
  wide_bias = 32
};
[[nodiscard]] constexpr Terms operator|(Terms a, Terms b) {
  return static_cast<Terms>(static_cast<int>(a) | static_cast<int>(b));
}
[[nodiscard]] constexpr bool has(Terms terms, Terms one) {
  return (static_cast<int>(terms) & static_cast<int>(one)) != 0;
}

[[nodiscard]] constexpr Terms without(Terms terms, Terms one) {
  return static_cast<Terms>(static_cast<int>(terms) & ~static_cast<int>(one));
}
// Whether they are more than one.
[[nodiscard]] constexpr bool is_several(Terms terms) {
  const int bits = static_cast<int>(without(terms, Terms::wide_bias));
  return (bits & (bits - 1)) != 0;
}

struct ForwardConfig {
  Half type;
  int head_dim, head_dim_v;  // of the tiles: the problem's, rounded up
  int block_m, block_n;
  int warps;   // along block_m
  int per_sm;  // blocks that shall fit a multiprocessor: bounds the registers
  bool q_in_registers;
  bool aligned;  // rows of q, k, v are whole, aligned pieces of 16 bytes
  Terms terms;
};

// Hopper's: warpgroups of 64 rows each that compute, and one that loads.
struct Sm90ForwardConfig {
  Half type;
  int head_dim, head_dim_v;
  int block_m, block_n;
  int stages;    // buffers of k, and of v
  int q_stages;  // of q, which o leaves through unless it has memory of its own
  bool turns;    // the warpgroups issue their products in turn
  Terms terms;
  bool grouped = false;  // a tile has some of the heads that share a key head, 16, 32 or 64 rows of each

  [[nodiscard]] constexpr int consumers() const { return block_m / 64; }
  [[nodiscard]] constexpr int threads() const { return (consumers() + 1) * 128; }
  // o has memory of its own, for some of its columns at a time, where q has one buffer and there is room: so
  // the next q can come while this o is made.
  [[nodiscard]] constexpr bool o_apart() const {
    return q_stages == 1 && head_dim_v == 256 && !has(terms, Terms::bias);
  }
  [[nodiscard]] constexpr int o_cols() const { return o_apart() ? 128 : head_dim_v; }
  // Of a multiprocessor's 65536, a thread; multiples of 8.
  [[nodiscard]] constexpr int producer_registers() const { return consumers() == 3 ? 32 : 24; }
  [[nodiscard]] constexpr int consumer_registers() const {
    return consumers() == 2 ? 240 : consumers() == 3 ? 160 : 112;
  }
};

struct BackwardConfig {
  Half type;
  int head_dim, head_dim_v;
  int block_m, block_n;
  int split;   // warps that share the 16 keys of a part of s
  int stages;  // buffers of q and dout
  int dq_warps_m;
  int per_sm;
  bool kv_in_registers;  // as operands of s and dp, if not split
  bool aligned;          // of dout, too
  Terms terms;

  [[nodiscard]] constexpr int warps() const { return block_n / 16 * split; }
  // Parts of the columns of dk and dv: 32 keys a warp where s is split.
  [[nodiscard]] constexpr int dkv_split() const { return split == 1 || block_n < 32 ? split : 2 * split; }
};

// Hopper's: warpgroups of 64 keys each that compute, or two of them that share 64, and one whose warps load,
// and add dq.
struct Sm90BackwardConfig {
  Half type;
  int head_dim, head_dim_v;
  int block_m, block_n;
  int q_stages, dout_stages;  // buffers
  // Registers are what decides: parts in which dv is issued, each beside the making of its part of ds (0: ds
  // is made behind all of dv), and whether ds, as an operand of dk, is kept or read from shared memory.
  int dv_parts;
  bool ds_in_registers;
  Terms terms;
  bool ordered;  // sums of dq have an order: if that is asked for, or faster

  // Two warpgroups have the same keys: the one their dv, the other their dk.
  [[nodiscard]] constexpr bool wide() const { return head_dim > 128 || head_dim_v > 128; }
  // Then dq is added from registers, for shared memory has no room for it.
  [[nodiscard]] constexpr bool dq_direct() const { return wide(); }
  // Buffers of ds, and of dq on its way to memory. The copy engine takes most of a step to read dq: it has
  // two where ds, which only dq's product reads then, is free early enough to have one; unless registers are
  // scarce.
  [[nodiscard]] constexpr bool two_dqs() const { return !wide() && ds_in_registers && dv_parts > 0; }
  [[nodiscard]] constexpr int dq_stages() const { return two_dqs() ? 2 : 1; }
  [[nodiscard]] constexpr int ds_stages() const { return two_dqs() ? 1 : 2; }
  // dk and dv leave through memory of their own, where there is room, and do not wait for dq's.
  [[nodiscard]] constexpr bool own_leave() const { return !wide() && dq_parts() == 1; }
  // Barriers of dq: of its buffers, or of every other step, for the two warps that add where there is an
  // order.
  [[nodiscard]] constexpr int dq_turns() const { return ordered ? 2 : dq_stages(); }
  // Buffers of lse, delta and where dq lies, which is needed a step later.
  [[nodiscard]] constexpr int row_stages() const { return dq_direct() ? 3 : 2; }
  [[nodiscard]] constexpr int consumers() const { return wide() ? 2 : block_n / 64; }
  [[nodiscard]] constexpr int threads() const { return (consumers() + 1) * 128; }
  // Who keeps an order is the faster for more registers, which consumers of small head dims can spare.
  [[nodiscard]] constexpr bool spares() const { return ordered && own_leave(); }
  [[nodiscard]] constexpr int producer_registers() const { return spares() ? 40 : 24; }
  [[nodiscard]] constexpr int consumer_registers() const {
    return consumers() != 2 ? 160 : spares() ? 232 : 240;
  }
  // The warpgroups share dq: 64 queries each, and where there are fewer queries, parts of the columns. Parts
  // begin and end with panels; where those come in no whole parts, the last ones overlap.
  [[nodiscard]] constexpr int dq_parts() const { return consumers() * 64 / block_m; }
  [[nodiscard]] constexpr int dq_cols() const {
    const int panel = head_dim % 64 == 0 ? 64 : 32;
    return (head_dim / panel + dq_parts() - 1) / dq_parts() * panel;
  }
};

// A block of threads has 16-row tiles of queries by heads; each of its warps has keys of its own, `keys` at a
// time, and buffers of its own for them.
struct DecodeConfig {
  Half type;
  int head_dim, head_dim_v;
  int block_m;
  int warps, keys, stages;
  int levels;  // a warp joins up to 2^levels parts of the keys
  int per_sm;
  int cluster;   // blocks of one tile that join their parts in shared memory, Hopper's; 1: by the workspace
  bool aligned;  // rows of q, k, v are whole, aligned pieces of 16 bytes
  Stored stored = Stored::half;

  // Whether its first keys are asked for before the wait for earlier kernels: not where it is alone and has
  // more stages, for there that is not faster.
  [[nodiscard]] constexpr bool asks_early() const { return per_sm > 1 || warps > 4; }
  // Of k and v. All 8-bit numbers are float16 ones, so that the products are of that type, whatever q's is.
  [[nodiscard]] constexpr bool narrow() const { return stored != Stored::half; }
  [[nodiscard]] constexpr Half product() const { return narrow() ? Half::float16 : type; }
  [[nodiscard]] constexpr int number_bytes() const { return narrow() ? 1 : 2; }
};

struct DbiasConfig {
  Half type;
  int head_dim, head_dim_v;
  int block;  // of queries and of keys
  bool aligned;
  Terms terms;

  [[nodiscard]] constexpr int threads() const { return block / 16 * 32; }
};

}  // namespace tessera
