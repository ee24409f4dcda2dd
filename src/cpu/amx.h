// The AMX instructions that the kernels use, as asm: compilers ask for target flags with their intrinsics,
// and the objects here are compiled without any. TESSERA_CPU_AMX_EMULATED replaces them by plain loops, so
// that the kernel above them is tested on machines without AMX.
//
// Eight tile registers of 16 rows x 64 bytes; the first four may have fewer rows.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/half.h"

// Two namespaces: a test build has both.
namespace tessera::cpu::tile {

#if defined(TESSERA_CPU_AMX_EMULATED)
inline namespace emulated {

inline thread_local float registers[8][16][16];
inline thread_local int row_count[8] = {16, 16, 16, 16, 16, 16, 16, 16};

inline void shape(std::int64_t rows) {
  for (int i = 0; i < 4; ++i) row_count[i] = static_cast<int>(rows);
  std::memset(registers, 0, sizeof(registers));
}

class Configured {
 public:
  Configured() { shape(16); }
  ~Configured() { shape(16); }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
};

template <int tile>
void zero() {
  std::memset(registers[tile], 0, sizeof(registers[tile]));
}
template <int tile>
void load(const void* from, std::int64_t stride) {
  for (int r = 0; r < row_count[tile]; ++r)
    std::memcpy(registers[tile][r], static_cast<const std::byte*>(from) + r * stride, 64);
}
template <int tile>
void store(void* to, std::int64_t stride) {
  for (int r = 0; r < row_count[tile]; ++r)
    std::memcpy(static_cast<std::byte*>(to) + r * stride, registers[tile][r], 64);
}
template <int c, int a, int b>
void multiply_add() {
  assert(row_count[c] == row_count[a] && row_count[b] == 16);
  bfloat16 left[16][32], right[16][32];
  std::memcpy(left, registers[a], sizeof(left));
  std::memcpy(right, registers[b], sizeof(right));
  for (int m = 0; m < row_count[a]; ++m) {
    for (int k = 0; k < 32; ++k) {
      const float x = to_float(left[m][k]);
      for (int n = 0; n < 16; ++n) registers[c][m][n] += x * to_float(right[k / 2][2 * n + k % 2]);
    }
  }
}

}  // namespace emulated
#else
inline namespace native {

// How many rows the first four tiles have from here on. All tiles are 0 then.
inline void shape(std::int64_t rows) {
  struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  for (int i = 0; i < 4; ++i) config.rows[i] = static_cast<std::uint8_t>(rows);
  static_assert(sizeof(config) == 64);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// The thread's tiles are configured while one lives, and given back after it: idle tiles cost power and make
// every context switch longer.
class Configured {
 public:
  Configured() { shape(16); }
  ~Configured() { __asm__ volatile("tilerelease"); }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
};

template <int tile>
__attribute__((always_inline)) inline void zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
__attribute__((always_inline)) inline void load(const void* from, std::int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
__attribute__((always_inline)) inline void store(void* to, std::int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
// c (16 x 16 float) += a (16 x 32) b (32 x 16, in pairs).
template <int c, int a, int b>
__attribute__((always_inline)) inline void multiply_add() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

}  // namespace native
#endif

}  // namespace tessera::cpu::tile
