// Tile sizes of the CPU kernels, one row a kernel; src/cpu/NOTES.md has the measurements.
#pragma once

#include <cstdint>

namespace tessera::cpu {

struct ForwardTiles {
  std::int64_t tile_m;   // rows of s and p
  std::int64_t block_n;  // keys of s and p
  std::int64_t task_m;   // rows of a task, at most
};

struct BackwardTiles {
  std::int64_t tile_m;
  std::int64_t block_n;
};

struct Tiles {
  ForwardTiles forward;
  BackwardTiles backward;
};

//                                    forward            backward
inline constexpr Tiles amx_tiles{{32, 256, 1024}, {64, 256}};
inline constexpr Tiles amx_emulated_tiles = amx_tiles;
inline constexpr Tiles avx512_tiles{{48, 128, 384}, {96, 128}};
inline constexpr Tiles avx2_tiles{{48, 128, 384}, {96, 128}};
inline constexpr Tiles baseline_tiles{{48, 64, 192}, {48, 64}};

}  // namespace tessera::cpu
