// A validated call in one normal form, the same for dense and packed tensors: what every kernel, the oracle
// and explain read. Made by validate() only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/mask.h"
#include "core/philox.h"
#include "tessera/tessera.hpp"

namespace tessera {

inline constexpr std::int64_t max_head_dim = 256;

// q, k, v, o and their gradients, lse and delta: element (b, s, h, c) lies at
// b * batch + s * seq + h * head + c, where s counts from the start of the tensor (packed tensors have
// batch == 0 and s = Sequence::q_begin + i).
struct View {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t batch = 0, seq = 0, head = 0;

  [[nodiscard]] bool given() const { return present; }
  [[nodiscard]] std::int64_t offset(std::int64_t b, std::int64_t s, std::int64_t h) const {
    return b * batch + s * seq + h * head;
  }
  bool present = false;
};

// bias and dbias: element (b, h, i, j), stride 0 where it is broadcast. extent is 1 there.
struct BiasView {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
  std::int64_t extent[4] = {1, 1, 1, 1};  // bias's own shape, as (b, h, i, j)
  bool present = false;

  [[nodiscard]] bool given() const { return present; }
  [[nodiscard]] std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return b * batch + h * head + i * row + j * col;
  }
};

// One sequence of the batch. Rows q_begin + i with seqlen_q <= i < allocated_q, and keys likewise, are
// padding: their outputs are written (o = 0, lse = -inf, gradients 0), their inputs are not read.
struct Sequence {
  std::int64_t q_begin = 0, k_begin = 0;
  std::int64_t seqlen_q = 0, seqlen_k = 0;
  std::int64_t allocated_q = 0, allocated_k = 0;
  std::int64_t new_begin = 0, seqlen_new = 0;  // decode: its rows of k_new; seqlen_k counts them
};

// What a key head's stored numbers are to be multiplied by: 1 unless given. Reads memory.
struct ScaleView {
  const float* data = nullptr;
  std::int64_t stride = 0;

  [[nodiscard]] float of(std::int64_t head_k) const { return data == nullptr ? 1.0f : data[head_k * stride]; }
};

// Decode: where the keys of a sequence lie, and what is appended to them first. Its key j is the one of slot
// Sequence::k_begin + j. Nothing but Problem::sequence, slot and query_position reads the int32 arrays.
struct Cache {
  const std::int32_t* seqlens = nullptr;     // slots in use before the append
  const std::int32_t* page_table = nullptr;  // paged: k and v are (num_pages, page_size, ...)
  std::int64_t page_table_row = 0;           // stride
  std::int64_t page_size = 0;
  std::int64_t blocks = 0;  // pages, or rows of the contiguous cache
  const std::int32_t* batch_idx = nullptr;
  const std::int32_t* leftpad = nullptr;
  ScaleView k_scale, v_scale;  // of a cache of an 8-bit dtype
  View k_new, v_new;
  std::int64_t rows_new = 0;  // of k_new: a sequence's, or the total when packed
  View cos, sin;              // row `position`, rotary_dim / 2 each
  std::int64_t positions = 0;
  std::int64_t rotary_dim = 0;
  bool interleaved = false;
  std::int64_t num_splits = 0;  // 0: automatic

  [[nodiscard]] bool rotates() const { return rotary_dim > 0; }
};

// merge_states: what o and lse are merged from.
struct States {
  View o_a, lse_a, o_b, lse_b;
};

enum class Direction : std::uint8_t { forward, backward, decode, merge };

struct Problem {
  Direction direction = Direction::forward;
  DLDevice device{kDLCPU, 0};    // of type kDLCPU or kDLCUDA; the host reads no memory of the latter
  void* stream = nullptr;        // CUDA
  DType dtype = DType::float32;  // of q, k, v; in decode of q and what is appended

  std::int64_t batch = 0;
  std::int64_t num_heads_q = 0, num_heads_k = 0, group_size = 1;
  std::int64_t head_dim = 0, head_dim_v = 0;
  // Of any sequence, seqused not applied. On a GPU what the caller says, or else rows_q and rows_k: bounds,
  // and in decode max_seqlen_k always is one.
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  bool packed = false;
  // Extent of the sequence dimension of q and k: seqlen, or the totals when packed. Rows from
  // cu_seqlens[batch] up to the total belong to no sequence: padding. In decode rows_k is the slots that the
  // cache has for a sequence, and cu_seqlens_k those of k_new.
  std::int64_t rows_q = 0, rows_k = 0;
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int32_t* seqused_q = nullptr;
  const std::int32_t* seqused_k = nullptr;

  View q, k, v, o, lse;
  View dout, dlse, dq, dk, dv;  // backward
  Cache cache;                  // decode
  States states;                // merge

  double softmax_scale = 1.0;
  double softcap = 0.0;                                                        // 0: off
  std::int64_t window_left = Mask::unbounded, window_right = Mask::unbounded;  // causal folded into right
  Alignment alignment = Alignment::bottom_right;
  const float* alibi_slopes = nullptr;
  std::int64_t alibi_batch = 0, alibi_head = 0;  // strides
  BiasView bias, dbias;
  const void* sinks = nullptr;
  void* dsinks = nullptr;
  DType sinks_dtype = DType::float32;
  std::int64_t sinks_stride = 0, dsinks_stride = 0;
  Dropout dropout;

  bool deterministic = false;
  int num_threads = 1;

  [[nodiscard]] bool on_host() const { return device.device_type == kDLCPU; }
  // These five read memory: only where it is on_host().
  [[nodiscard]] Sequence sequence(std::int64_t b) const;
  [[nodiscard]] float alibi_slope(std::int64_t b, std::int64_t h) const {
    return alibi_slopes == nullptr ? 0.0f : alibi_slopes[b * alibi_batch + h * alibi_head];
  }
  [[nodiscard]] float sink(std::int64_t h) const;  // only with sinks
  // Decode. Where slot s of sequence b lies: k.offset(b, s, h) of what this returns. And the row of cos and
  // sin for a query; a new key's is its slot.
  struct Slot {
    std::int64_t b, s;
  };
  [[nodiscard]] Slot slot(std::int64_t b, std::int64_t s) const {
    if (cache.page_table == nullptr) return {cache.batch_idx == nullptr ? b : cache.batch_idx[b], s};
    return {cache.page_table[b * cache.page_table_row + s / cache.page_size], s % cache.page_size};
  }
  [[nodiscard]] std::int64_t query_position(std::int64_t b, std::int64_t i) const {
    const bool unbounded = window_left >= Mask::unbounded && window_right >= Mask::unbounded;
    return cache.seqlens[b] + (unbounded ? 0 : i);
  }

  [[nodiscard]] Mask mask(const Sequence& sequence) const;
};

// Everything docs/semantics.md calls bad input is found here, before anything is written. The workspace and
// the choice of kernel are dispatch's.
//
// Pointers::optional is for calls that only plan (workspace_size, explain): a null data pointer passes,
// except of int32 tensors (cu_seqlens, seqused, Decode's) in host memory, which are read.
enum class Pointers : std::uint8_t { required, optional };
[[nodiscard]] Result<Problem> validate(const Forward& call, Pointers pointers = Pointers::required);
[[nodiscard]] Result<Problem> validate(const Backward& call, Pointers pointers = Pointers::required);
[[nodiscard]] Result<Problem> validate(const Decode& call, Pointers pointers = Pointers::required);
[[nodiscard]] Result<Problem> validate(const MergeStates& call, Pointers pointers = Pointers::required);

// "float32", ...
[[nodiscard]] const char* name_of(DType dtype);
[[nodiscard]] constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float8_e4m3fn:
    case DType::int8:
      break;
  }
  return 1;
}
// What q, o and everything but caches and indices may have.
[[nodiscard]] constexpr bool is_floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

}  // namespace tessera
