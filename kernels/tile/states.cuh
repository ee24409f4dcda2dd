// What attention over some of a row's keys leaves behind, and how several of them become one: a reference of
// the exponentials in powers of two, their sum, and o not yet divided by it.
#pragma once

#include "core/decode_params.h"
#include "tile/copy.cuh"

namespace tessera::tile {

// What a part counts for when the largest reference is `most`; a part that has seen nothing, nothing.
[[nodiscard]] __device__ __forceinline__ float weight_of(float reference, float most) {
  return reference == -ptx::infinity ? 0.0f : ptx::exp2(reference - most);
}

// Two neighbouring parts become one: what they count for together, and what each of them does in it.
struct Joined {
  float2 state;
  float left, right;  // weights

  __device__ __forceinline__ Joined(float2 a, float2 b) {
    const float most = fmaxf(a.x, b.x);
    left = weight_of(a.x, most);
    right = weight_of(b.x, most);
    state = {most, sum(a.y, b.y)};
  }
  [[nodiscard]] __device__ __forceinline__ float sum(float a, float b) const {
    return fmaf(right, b, left * a);
  }
};

// Parts are always joined in the same binary tree over their numbers, whoever joins them: 2i with 2i + 1,
// these pairs in the same way, and so on; one that has no right neighbour waits for the next level. So it
// does not show in the bits how many neighbouring parts a warp, a block or a cluster has.
//
// This is the tree of `count` parts, at most `parts`, of four columns of a row; all are asked for before the
// first is used. state(i): reference and sum.
template <int parts, class State, class Columns>
__device__ __forceinline__ float2 join_tree(float4& o, int count, const State& state,
                                            const Columns& columns) {
  float2 of[parts];
  float4 x[parts];
#pragma unroll
  for (int i = 0; i < parts; ++i) {
    of[i] = i < count ? state(i) : float2{-ptx::infinity, 0.0f};
    x[i] = i < count ? columns(i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
#pragma unroll
  for (int apart = 1; apart < parts; apart *= 2) {
#pragma unroll
    for (int i = 0; i + apart < parts; i += 2 * apart) {
      if (i + apart < count) {
        const Joined both(of[i], of[i + apart]);
        of[i] = both.state;
        float4 &a = x[i], &b = x[i + apart];
        a = {both.sum(a.x, b.x), both.sum(a.y, b.y), both.sum(a.z, b.z), both.sum(a.w, b.w)};
      }
    }
  }
  o = x[0];
  return of[0];
}

// o's factor and lse of a row of all keys, the sink among them.
struct RowEnd {
  float factor, lse;
};
template <Half type>
[[nodiscard]] __device__ __forceinline__ RowEnd end_row(const AttentionParams& params, int h, float2 state) {
  float most = state.x, sum = state.y, shrink = 1.0f;
  if (params.sinks != nullptr) {
    const float sink =
        load_number<type>(params.sinks, h * params.sinks_stride, params.sinks_wide) * ptx::log2_e;
    const float both = fmaxf(most, sink);
    if (both > -ptx::infinity) {
      shrink = weight_of(most, both);
      sum = fmaf(sum, shrink, weight_of(sink, both));
      most = both;
    }
  }
  // No key and no sink: o = 0, lse = -inf. NaN is neither.
  if (sum == 0.0f) return {0.0f, -ptx::infinity};
  return {shrink / sum, (most + ptx::log2(sum)) * ptx::ln_2};
}

// Four columns of a row of o from `col` on, a multiple of 4, and in the first of them lse.
template <Half type>
__device__ __forceinline__ void store_row(const AttentionParams& params, int b, int row, int h, int col,
                                          const float4& o, const RowEnd& end) {
  const RowsArg& to = params.o;
  const long long at = b * to.batch + row * to.seq + h * to.head + col;
  const float x[4] = {o.x * end.factor, o.y * end.factor, o.z * end.factor, o.w * end.factor};
  if (to.aligned && col + 4 <= params.head_dim_v) {
    if (to.wide) {
      *reinterpret_cast<float4*>(static_cast<float*>(to.data) + at) = {x[0], x[1], x[2], x[3]};
    } else {
      *reinterpret_cast<uint2*>(static_cast<HalfBits*>(to.data) + at) = {ptx::pack<type>(x[0], x[1]),
                                                                         ptx::pack<type>(x[2], x[3])};
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (col + e < params.head_dim_v) store_number<type>(to.data, at + e, to.wide, x[e]);
    }
  }
  if (col == 0 && params.lse.data != nullptr) {
    const RowsArg& lse = params.lse;
    static_cast<float*>(lse.data)[b * lse.batch + row * lse.seq + h * lse.head] = end.lse;
  }
}

// Which queries and heads a tile of decode has.
struct DecodeTile : DecodeTileIndex {
  int first_query, queries;  // of the sequence; none: the tile does not exist
  int head_k, first_head, heads;
  DecodeSequence sequence;

  __device__ __forceinline__ DecodeTile(const DecodeParams& params, const DecodeTileIndex& tile)
      : DecodeTileIndex(tile), sequence(params.sequence(tile.b)) {
    first_query = index * params.queries;
    queries = index < 0 ? 0 : max(0, min(sequence.allocated_q - first_query, params.queries));
    head_k = params.head_tiles.quotient(head_tile);
    const int group_size = params.attention.group_size;
    const int part = params.head_tiles.remainder(head_tile) * params.heads;
    first_head = head_k * group_size + part;
    heads = min(params.heads, group_size - part);
  }

  struct Row {
    int query, head;
    bool there;
  };
  [[nodiscard]] __device__ __forceinline__ Row row(const DecodeParams& params, int r) const {
    const int query = params.tile_heads.quotient(r), head = params.tile_heads.remainder(r);
    return {first_query + query, first_head + head, query < queries && head < heads};
  }
};

// The tile of this block. Written twice, so that a packed batch's way is apart: as one they spill.
[[nodiscard]] __device__ __forceinline__ DecodeTile tile_of_block(const DecodeParams& params) {
  const unsigned number = params.most_splits.quotient(ptx::block_index());
  if (!params.attention.packed()) return {params, params.tile(number)};
  return {params, params.tile(number)};
}

// Number c of a row of `data` that begins at `row`, turned by the angles of a position: its first rotary_dim
// numbers are pairs.
template <Half type>
[[nodiscard]] __device__ __forceinline__ float turned(const DecodeParams& params, const RowsArg& from,
                                                      long long row, int c, int position) {
  const auto number = [&](int i) { return load_number<type>(from.data, row + i, from.wide); };
  if (c >= params.rotary_dim) return number(c);
  const int half = params.rotary_dim / 2;
  const bool second = params.interleaved ? c % 2 != 0 : c >= half;
  const int pair = params.interleaved ? c / 2 : second ? c - half : c;
  const int step = params.interleaved ? 1 : half;
  const float cos = load_number<type>(params.cos.data, position * params.cos.row + pair, params.cos.wide);
  const float sin = load_number<type>(params.sin.data, position * params.sin.row + pair, params.sin.wide);
  return second ? number(c - step) * sin + number(c) * cos : number(c) * cos - number(c + step) * sin;
}

}  // namespace tessera::tile
