// Tile sizes of the CPU kernels, one row a kernel; src/cpu/NOTES.md has the measurements.
#pragma once

#include <cstdint>

namespace tessera::cpu {

struct ForwardTiles {
  std::int64_t tile_m;      // rows of s and p
  std::int64_t block_n;     // keys of s and p
  std::int64_t task_bytes;  // of a task's q and acc_o, at most: a part of the second-level cache
};

struct BackwardTiles {
  std::int64_t tile_m;
  std::int64_t block_n;
  std::int64_t block_bytes;  // of one of a key block's operands, at most: block_n shrinks with the head dim
};

struct Tiles {
  ForwardTiles forward;
  BackwardTiles backward;
};

// clang-format off
//                                        forward                       backward
//                                        tile_m  block_n  task_bytes   tile_m  block_n  block_bytes
inline constexpr Tiles amx_tiles         {{16,     256,     512 << 10},  {96,     256,     128 << 10}};
inline constexpr Tiles amx_emulated_tiles = amx_tiles;
inline constexpr Tiles avx512_tiles      {{48,     128,     512 << 10},  {96,     192,     128 << 10}};
inline constexpr Tiles avx512_bf16_tiles = avx512_tiles;
inline constexpr Tiles avx2_tiles        {{48,     128,     256 << 10},  {96,     128,     128 << 10}};
inline constexpr Tiles baseline_tiles    {{48,      64,     128 << 10},  {48,      64,     128 << 10}};
// clang-format on

}  // namespace tessera::cpu
