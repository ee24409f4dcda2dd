// Cases of decode, their memory, and their judge.
//
//   DecodeCase c;
//   c.cache_seqlens = {100, 0, 37};
//   c.page_size = 16;
//   EXPECT_EQ(judge(c), "");
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "verify/judge.h"

namespace tessera::verify {

struct DecodeCase {
  std::vector<std::int32_t> cache_seqlens = {100};  // as many as the batch
  std::int64_t seqlen_q = 1, seqlen_new = 0;
  // Packed instead, if not empty: of each sequence.
  std::vector<std::int32_t> lengths_q, lengths_new;
  std::int64_t num_heads_q = 2, num_heads_k = 1, head_dim = 64, head_dim_v = 64;
  DType dtype = DType::float32, o_dtype = DType::float32;
  std::optional<DType> cache_dtype;  // q's unless given
  double cache_scale = 0;            // of an 8-bit cache, and a little another for each head; 0: none given
  std::int64_t page_size = 0;        // 0: contiguous
  bool head_major = false;           // heads outside of slots
  std::int64_t room = 5;             // slots, or pages of each sequence, beyond those in use
  std::vector<std::int32_t> batch_idx;  // contiguous
  std::vector<std::int32_t> leftpad;    // contiguous
  std::int64_t rotary_dim = 0;
  bool interleaved = false;
  bool causal = false;
  std::optional<std::int64_t> window_left, window_right;
  double softcap = 0, magnitude = 1;
  bool alibi = false, sinks = false, lse = true;
  std::int64_t num_splits = 0;
  int threads = 2;
  std::string kernel;
  std::uint64_t seed = 1;
};

// Of all options, in any dtype; caches have q's.
[[nodiscard]] DecodeCase random_decode_case(std::uint64_t seed);

// The memory of a case. Slots of the cache that are not in use are NaN (in int8, large numbers), and so are
// the pages that no table names; entries of the table that are not in use are no pages.
struct DecodeTensors {
  explicit DecodeTensors(const DecodeCase& c);

  DecodeCase settings;
  Buffer q, k_cache, v_cache, k_scale, v_scale, o, lse;
  Buffer cache_seqlens, page_table, cache_batch_idx, leftpad_k;
  Buffer k_new, v_new, rotary_cos, rotary_sin, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks;

  [[nodiscard]] std::int64_t batch() const {
    return static_cast<std::int64_t>(settings.cache_seqlens.size());
  }
  [[nodiscard]] Decode call() const;
  // Where slot s of sequence b lies: the index of (block, slot, head 0, 0) in k_cache, v_cache, in rows.
  [[nodiscard]] std::int64_t row_of(std::int64_t b, std::int64_t s) const;
  void set_lengths();  // cache_seqlens anew from settings
};

// With a workspace of exactly the size it asks for, poisoned and between guards.
[[nodiscard]] Status run(const DecodeTensors& tensors);

// Runs what lies in tensors, and holds o, lse and the cache against the oracle. Empty: all is right.
[[nodiscard]] std::string judge(DecodeTensors& tensors);
// By another way of running it.
[[nodiscard]] std::string judge(DecodeTensors& tensors, const std::function<Status()>& run_it);
[[nodiscard]] std::string judge(const DecodeCase& c);

}  // namespace tessera::verify
