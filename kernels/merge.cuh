// merge_states: two results over different keys of the same queries, to the one over all of them:
//
//   lse = log(e^lse_a + e^lse_b)      o = e^(lse_a - lse) o_a + e^(lse_b - lse) o_b
#pragma once

#include "core/merge_params.h"
#include "tile/copy.cuh"

namespace tessera {

// Four neighbouring numbers of a row from `at` on, `valid` of which are there.
[[nodiscard]] __device__ __forceinline__ float4 load_four(const StateArg& from, long long at, int valid) {
  const bool half = from.type == Half::float16;
  if (from.o.aligned && valid >= 4) {
    if (from.o.wide) return *reinterpret_cast<const float4*>(static_cast<const float*>(from.o.data) + at);
    const uint2 piece = *reinterpret_cast<const uint2*>(static_cast<const tile::HalfBits*>(from.o.data) + at);
    const float2 low =
        half ? ptx::widen_pair<Half::float16>(piece.x) : ptx::widen_pair<Half::bfloat16>(piece.x);
    const float2 high =
        half ? ptx::widen_pair<Half::float16>(piece.y) : ptx::widen_pair<Half::bfloat16>(piece.y);
    return {low.x, low.y, high.x, high.y};
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = i >= valid ? 0.0f
           : half     ? tile::load_number<Half::float16>(from.o.data, at + i, from.o.wide)
                      : tile::load_number<Half::bfloat16>(from.o.data, at + i, from.o.wide);
  }
  return {x[0], x[1], x[2], x[3]};
}

__device__ __forceinline__ void store_four(const StateArg& to, long long at, int valid, const float4& value) {
  const bool half = to.type == Half::float16;
  const auto pack = [&](float low, float high) {
    return half ? ptx::pack<Half::float16>(low, high) : ptx::pack<Half::bfloat16>(low, high);
  };
  if (to.o.aligned && valid >= 4) {
    if (to.o.wide) {
      *reinterpret_cast<float4*>(static_cast<float*>(to.o.data) + at) = value;
    } else {
      *reinterpret_cast<uint2*>(static_cast<tile::HalfBits*>(to.o.data) + at) = {pack(value.x, value.y),
                                                                                 pack(value.z, value.w)};
    }
    return;
  }
  const float x[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= valid) continue;
    if (to.o.wide) {
      static_cast<float*>(to.o.data)[at + i] = x[i];
    } else {
      static_cast<tile::HalfBits*>(to.o.data)[at + i] = static_cast<tile::HalfBits>(pack(x[i], 0.0f));
    }
  }
}

// A warp has a row of a head. The type is that of no tensor: each says its own. o and lse may be those of a
// side: a lane reads its numbers before it writes them, and lse is read by all lanes before one writes it.
template <Half, int threads>
__device__ void merge(const MergeParams& params) {
  const long long number = 1LL * ptx::block_index() * (threads / 32) + threadIdx.x / 32;
  if (number >= params.rows) return;
  const int h = static_cast<int>(number % params.num_heads), lane = threadIdx.x % 32;
  const long long row = number / params.num_heads;
  const long long b = row / params.rows_q, s = row % params.rows_q;
  const auto place = [&](const RowsArg& arg) { return b * arg.batch + s * arg.seq + h * arg.head; };
  const auto lse_at = [&](const RowsArg& arg) { return static_cast<float*>(arg.data) + place(arg); };
  const float x = *lse_at(params.a.lse), y = *lse_at(params.b.lse), most = fmaxf(x, y);
  // A side without keys has weight 0, and what is in its o does not matter; without any o is 0.
  const auto weight = [&](float lse) {
    return lse == -ptx::infinity ? 0.0f : ptx::exp2((lse - most) * ptx::log2_e);
  };
  const float of_a = weight(x), of_b = weight(y), sum = of_a + of_b;
  const bool seen = sum != 0.0f;
  const float by_a = seen ? of_a / sum : 0.0f, by_b = seen ? of_b / sum : 0.0f;
  for (int col = lane * 4; col < params.head_dim_v; col += 128) {
    const int valid = params.head_dim_v - col;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto add = [&](const StateArg& from, float by) {
      if (by == 0.0f) return;
      const float4 part = load_four(from, place(from.o) + col, valid);
      o = {fmaf(by, part.x, o.x), fmaf(by, part.y, o.y), fmaf(by, part.z, o.z), fmaf(by, part.w, o.w)};
    };
    add(params.a, by_a);
    add(params.b, by_b);
    store_four(params.all, place(params.all.o) + col, valid, o);
  }
  __syncwarp();
  if (lane == 0 && params.all.lse.data != nullptr)
    *lse_at(params.all.lse) = seen ? fmaf(ptx::log2(sum), ptx::ln_2, most) : -ptx::infinity;
}

}  // namespace tessera
