// Tile sizes of the GPU kernels: one row for the head dims up to a bound. kernels/sm80/NOTES.md has the
// measurements.
#pragma once

#include <array>

namespace tessera::cuda {

struct ForwardTiles {
  int head_dim;  // up to; the larger of head_dim and head_dim_v
  int block_m, block_n, warps, per_sm;
  bool q_in_registers;
};

struct BackwardTiles {
  int head_dim;
  int block_m, block_n, split;
  int stages;  // 1 where shared memory has no room for 2
  int dq_warps_m, per_sm;
  bool kv_in_registers;
};

// Decode: 8 or 16 rows a tile, or block_m for more of them.
struct DecodeTiles {
  int head_dim;
  int block_m;
  int warps, keys, stages, per_sm;
};

// _terms: where the score has softcap, ALiBi or dropout, which want registers. _bias: a bias, which wants
// shared memory, too; _both: a bias and others of them.
struct TileTable {
  std::array<ForwardTiles, 5> forward, forward_terms, forward_bias, forward_both;
  std::array<BackwardTiles, 5> backward, backward_terms;
  std::array<DecodeTiles, 5> decode;
};

// Hopper's forward kernel: the first row that has room for both. kernels/sm90/NOTES.md has the measurements.
struct Sm90ForwardTiles {
  int head_dim, head_dim_v;  // up to
  int block_m, block_n;
  int stages, q_stages;  // buffers of k and v; of q
  bool turns;
};

// Its backward kernels: likewise. Above a head dim of 128 dq comes behind the
// first of dv's parts.
struct Sm90BackwardTiles {
  int head_dim, head_dim_v;  // up to
  int block_m, block_n, q_stages, dout_stages, dv_parts;
  bool ds_in_registers;
};

// clang-format off
//    head_dim  head_dim_v  block_m  block_n  stages  q_stages  turns
inline constexpr std::array<Sm90ForwardTiles, 6> sm90_forward = {{
    { 64,        64,        256,      64,     4,      2,        false},
    { 96,        96,        192,      64,     3,      2,        false},
    {128,       128,        192,      64,     4,      2,        false},
    {192,       128,        128,     128,     2,      1,        true},
    {192,       192,        128,     112,     2,      1,        false},
    {256,       256,        128,      64,     2,      1,        false}}};
// ALiBi and several terms want registers.
inline constexpr std::array<Sm90ForwardTiles, 6> sm90_forward_terms = {{
    { 64,        64,        256,      64,     4,      2,        false},
    { 96,        96,        128,     128,     2,      2,        true},
    {128,       128,        128,     128,     2,      2,        true},
    {192,       128,        128,     128,     2,      1,        true},
    {192,       192,        128,      96,     2,      1,        false},
    {256,       256,        128,      64,     2,      1,        false}}};
// Softcap alone does not, but for one.
inline constexpr std::array<Sm90ForwardTiles, 6> sm90_forward_softcap = [] {
  std::array<Sm90ForwardTiles, 6> rows = sm90_forward;
  rows[4] = sm90_forward_terms[4];
  return rows;
}();
// Dropout wants registers, too; its masks are made for 32 keys at a time and 128 at most.
inline constexpr std::array<Sm90ForwardTiles, 6> sm90_forward_dropout = [] {
  std::array<Sm90ForwardTiles, 6> rows = sm90_forward_terms;
  rows[0].block_m = 192;
  return rows;
}();
// A bias comes in rows of 16 pieces at most: 128 keys, or 64 of float32.
inline constexpr std::array<Sm90ForwardTiles, 6> sm90_forward_bias = {{
    { 64,        64,        192,      64,     4,      2,        false},
    { 96,        96,        128,     128,     2,      2,        true},
    {128,       128,        128,     128,     2,      2,        true},
    {192,       128,        128,      64,     2,      1,        true},
    {192,       192,        128,      64,     2,      1,        false},
    {256,       256,        128,      64,     2,      1,        false}}};
inline constexpr std::array<Sm90ForwardTiles, 6> sm90_forward_wide_bias = {{
    { 64,        64,        128,      64,     2,      2,        true},
    { 96,        96,        128,      64,     2,      2,        true},
    {128,       128,        128,      64,     2,      2,        true},
    {192,       128,        128,      64,     2,      1,        true},
    {192,       192,        128,      64,     2,      1,        false},
    {256,       256,        128,      64,     2,      1,        false}}};

//    head_dim  head_dim_v  block_m  block_n  q_stages  dout_stages  dv_parts  ds_in_registers
inline constexpr std::array<Sm90BackwardTiles, 5> sm90_backward = {{
    { 64,        64,        128,     128,     3,        2,           4,        false},
    { 96,        96,         64,     128,     3,        2,           1,        true},
    {128,       128,         64,     128,     3,        2,           2,        true},
    {192,       192,         64,      64,     3,        3,           2,        true},
    {256,       256,         64,      64,     2,        2,           4,        true}}};
// Softcap, ALiBi, bias and dropout want registers.
inline constexpr std::array<Sm90BackwardTiles, 5> sm90_backward_terms = {{
    { 64,        64,         64,     128,     3,        2,           0,        true},
    { 96,        96,         64,     128,     3,        2,           0,        true},
    {128,       128,         64,     128,     3,        2,           0,        true},
    {192,       192,         64,      64,     3,        3,           2,        true},
    {256,       256,         64,      64,     2,        2,           2,        true}}};

// sm_90, and what came after with as much shared memory.
inline constexpr TileTable sm90_tiles = {
    //  head_dim  block_m  block_n  warps  per_sm  q_in_registers
    {{ { 64,      128,     128,     4,     2,      false},
       { 96,      128,      64,     4,     2,      false},
       {128,      128,      64,     4,     2,      false},
       {192,       64,      64,     4,     2,      false},
       {256,       64,      64,     4,     2,      false}}},
    {{ { 64,      128,      64,     4,     2,      true},
       { 96,      128,      64,     4,     2,      false},
       {128,      128,      64,     4,     2,      false},
       {192,       64,      64,     4,     2,      false},
       {256,       64,      64,     4,     2,      false}}},
    {{ { 64,      128,      64,     4,     2,      true},
       { 96,      128,      64,     4,     2,      false},
       {128,      128,      64,     4,     2,      false},
       {192,       64,      64,     4,     2,      false},
       {256,       64,      64,     4,     2,      false}}},
    {{ { 64,      128,      64,     4,     2,      false},
       { 96,       64,      64,     4,     3,      false},
       {128,       64,      64,     4,     3,      false},
       {192,       64,      64,     4,     2,      false},
       {256,       64,      64,     4,     2,      false}}},
    //  head_dim  block_m  block_n  split  stages  dq_warps_m  per_sm  kv_in_registers
    {{ { 64,       64,      64,     1,     2,      2,          2,      true},
       { 96,       64,      64,     1,     2,      4,          2,      false},
       {128,       64,      64,     1,     2,      1,          2,      false},
       {192,       64,      64,     2,     1,      2,          1,      false},
       {256,       64,      64,     2,     2,      2,          1,      false}}},
    {{ { 64,       64,      64,     1,     2,      2,          2,      false},
       { 96,       32,      64,     1,     1,      2,          2,      false},
       {128,       32,      64,     1,     1,      2,          2,      false},
       {192,       32,      64,     2,     1,      2,          1,      false},
       {256,       32,      64,     2,     1,      2,          1,      false}}},
    //  head_dim  block_m  warps  keys  stages  per_sm
    {{ { 64,       32,     4,     32,   3,      2},
       { 96,       32,     4,     16,   4,      2},
       {128,       32,     4,     16,   3,      2},
       {192,       16,     4,     16,   2,      2},
       {256,       16,     4,     16,   3,      1}}},
};
// Those with 100 KB of shared memory: sm_86, sm_89, sm_120. Not timed either.
inline constexpr TileTable small_tiles = {
    {{ { 64,      128,      64,     4,     2,      true},
       { 96,       64,      64,     4,     2,      false},
       {128,       64,      64,     4,     2,      false},
       {192,       64,      32,     4,     1,      false},
       {256,       64,      32,     4,     1,      false}}},
    {{ { 64,      128,      64,     4,     2,      true},
       { 96,       64,      32,     4,     2,      false},
       {128,       64,      32,     4,     2,      false},
       {192,       64,      32,     4,     1,      false},
       {256,       64,      32,     4,     1,      false}}},
    {{ { 64,       64,      64,     4,     2,      false},
       { 96,       64,      32,     4,     2,      false},
       {128,       64,      32,     4,     2,      false},
       {192,       64,      32,     4,     1,      false},
       {256,       64,      32,     4,     1,      false}}},
    {{ { 64,       64,      64,     4,     2,      false},
       { 96,       64,      32,     4,     2,      false},
       {128,       64,      32,     4,     2,      false},
       {192,       64,      32,     4,     1,      false},
       {256,       64,      32,     4,     1,      false}}},
    {{ { 64,       64,      64,     1,     1,      2,          2,      false},
       { 96,       64,      64,     1,     1,      2,          1,      false},
       {128,       32,      64,     1,     2,      2,          1,      false},
       {192,       32,      64,     2,     1,      2,          1,      false},
       {256,       32,      32,     2,     1,      2,          1,      false}}},
    {{ { 64,       32,      64,     1,     1,      2,          2,      false},
       { 96,       32,      64,     1,     1,      2,          1,      false},
       {128,       32,      64,     1,     1,      2,          1,      false},
       {192,       32,      64,     2,     1,      2,          1,      false},
       {256,       32,      32,     2,     1,      2,          1,      false}}},
    {{ { 64,       32,     4,     16,   2,      2},
       { 96,       32,     4,     16,   2,      1},
       {128,       32,     4,     16,   2,      1},
       {192,       16,     2,     16,   3,      1},
       {256,       16,     2,     16,   2,      1}}},
};
// clang-format on

// sm_80. No such card was at hand: the sizes of sm_90, made smaller where registers spilled.
inline constexpr TileTable sm80_tiles = [] {
  TileTable table = sm90_tiles;
  table.forward[0] = table.forward_terms[0];
  table.forward_terms[1].block_n = table.forward_terms[2].block_n = 32;
  table.forward_bias = table.forward_both;
  table.backward[2].dq_warps_m = 2;
  for (DecodeTiles& row : table.decode) row.stages = 2;
  table.decode[3].per_sm = 1;
  return table;
}();

}  // namespace tessera::cuda
