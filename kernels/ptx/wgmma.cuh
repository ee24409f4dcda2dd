// wgmma of 64 rows: four warps multiply, asynchronously; accumulators in registers, B in shared memory, A in
// either.
//
// Of a width n * 8 a lane holds the fragments of mma's C, side by side (tile/fragments.cuh). CUTLASS wraps
// the widths that are powers of two or three times one, with a named parameter for each register; these take
// arrays, and every multiple of 16 that our tiles have.
#pragma once

#include "core/attention_config.h"

namespace tessera::ptx {

using MatrixDescriptor = unsigned long long;

// Before the first wgmma that uses registers which other instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `pending` of the latest groups are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from reading registers before the wait that precedes this, or from writing them after
// the fence that follows.
template <int n>
__device__ __forceinline__ void settle(float (&c)[n][4]) {
#pragma unroll
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[j][e])::"memory");
  }
}
template <int k>
__device__ __forceinline__ void settle(unsigned (&a)[k][4]) {
#pragma unroll
  for (int j = 0; j < k; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(a[j][e])::"memory");
  }
}

// clang-format off
#define TESSERA_NAMES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TESSERA_NAMES_2 TESSERA_NAMES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_NAMES_3 TESSERA_NAMES_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TESSERA_NAMES_4 TESSERA_NAMES_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_NAMES_5 TESSERA_NAMES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TESSERA_NAMES_6 TESSERA_NAMES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_NAMES_7 TESSERA_NAMES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TESSERA_NAMES_8 TESSERA_NAMES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_NAMES_9 TESSERA_NAMES_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TESSERA_NAMES_10 TESSERA_NAMES_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TESSERA_NAMES_11 TESSERA_NAMES_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TESSERA_NAMES_12 TESSERA_NAMES_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_NAMES_13 TESSERA_NAMES_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TESSERA_NAMES_14 TESSERA_NAMES_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TESSERA_NAMES_15 TESSERA_NAMES_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TESSERA_NAMES_16 TESSERA_NAMES_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TESSERA_TILE(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define TESSERA_TILES_1 TESSERA_TILE(0), TESSERA_TILE(1)
#define TESSERA_TILES_2 TESSERA_TILES_1, TESSERA_TILE(2), TESSERA_TILE(3)
#define TESSERA_TILES_3 TESSERA_TILES_2, TESSERA_TILE(4), TESSERA_TILE(5)
#define TESSERA_TILES_4 TESSERA_TILES_3, TESSERA_TILE(6), TESSERA_TILE(7)
#define TESSERA_TILES_5 TESSERA_TILES_4, TESSERA_TILE(8), TESSERA_TILE(9)
#define TESSERA_TILES_6 TESSERA_TILES_5, TESSERA_TILE(10), TESSERA_TILE(11)
#define TESSERA_TILES_7 TESSERA_TILES_6, TESSERA_TILE(12), TESSERA_TILE(13)
#define TESSERA_TILES_8 TESSERA_TILES_7, TESSERA_TILE(14), TESSERA_TILE(15)
#define TESSERA_TILES_9 TESSERA_TILES_8, TESSERA_TILE(16), TESSERA_TILE(17)
#define TESSERA_TILES_10 TESSERA_TILES_9, TESSERA_TILE(18), TESSERA_TILE(19)
#define TESSERA_TILES_11 TESSERA_TILES_10, TESSERA_TILE(20), TESSERA_TILE(21)
#define TESSERA_TILES_12 TESSERA_TILES_11, TESSERA_TILE(22), TESSERA_TILE(23)
#define TESSERA_TILES_13 TESSERA_TILES_12, TESSERA_TILE(24), TESSERA_TILE(25)
#define TESSERA_TILES_14 TESSERA_TILES_13, TESSERA_TILE(26), TESSERA_TILE(27)
#define TESSERA_TILES_15 TESSERA_TILES_14, TESSERA_TILE(28), TESSERA_TILE(29)
#define TESSERA_TILES_16 TESSERA_TILES_15, TESSERA_TILE(30), TESSERA_TILE(31)

// Columns, sixteenths of them, and the numbers of the operands behind the accumulators.
#define TESSERA_WGMMA_WIDTHS(X, type)       \
  X(16, 1, 8, 9, 10, 11, 12, 13, type)      \
  X(32, 2, 16, 17, 18, 19, 20, 21, type)    \
  X(48, 3, 24, 25, 26, 27, 28, 29, type)    \
  X(64, 4, 32, 33, 34, 35, 36, 37, type)    \
  X(80, 5, 40, 41, 42, 43, 44, 45, type)    \
  X(96, 6, 48, 49, 50, 51, 52, 53, type)    \
  X(112, 7, 56, 57, 58, 59, 60, 61, type)   \
  X(128, 8, 64, 65, 66, 67, 68, 69, type)   \
  X(144, 9, 72, 73, 74, 75, 76, 77, type)   \
  X(160, 10, 80, 81, 82, 83, 84, 85, type)  \
  X(176, 11, 88, 89, 90, 91, 92, 93, type)  \
  X(192, 12, 96, 97, 98, 99, 100, 101, type)    \
  X(208, 13, 104, 105, 106, 107, 108, 109, type) \
  X(224, 14, 112, 113, 114, 115, 116, 117, type) \
  X(240, 15, 120, 121, 122, 123, 124, 125, type) \
  X(256, 16, 128, 129, 130, 131, 132, 133, type)
#define TESSERA_WGMMA_SHARED(width, part, x0, x1, x2, x3, x4, x5, type)                                         \
  if constexpr (n * 8 == width)                                                                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." type "." type " {" TESSERA_NAMES_##part  \
                 "}, %" #x0 ", %" #x1 ", p, 1, 1, %" #x3 ", %" #x4 ";\n}"                                      \
                 : TESSERA_TILES_##part : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(of_a)),   \
                   "n"(static_cast<int>(of_b)));
#define TESSERA_WGMMA_REGISTERS(width, part, x0, x1, x2, x3, x4, x5, type)                                      \
  if constexpr (n * 8 == width)                                                                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x5 ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." type "." type " {" TESSERA_NAMES_##part  \
                 "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #x4 ", p, 1, 1, 1;\n}"                      \
                 : TESSERA_TILES_##part : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                   \
                   "r"(static_cast<int>(add)));
// clang-format on

// How the depth of an operand lies in shared memory.
enum class Depth { along_rows, across_rows };

// c = a b, or c += a b, 16 deep.
template <Half type, Depth of_a = Depth::along_rows, Depth of_b = Depth::along_rows, int n>
__device__ __forceinline__ void wgmma(float (&c)[n][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  static_assert(n % 2 == 0 && n <= 32);
  if constexpr (type == Half::bfloat16) {
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_SHARED, "bf16")
  } else {
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_SHARED, "f16")
  }
}
// The same with A in registers, and B with its depth across the rows of shared memory.
template <Half type, int n>
__device__ __forceinline__ void wgmma(float (&c)[n][4], const unsigned (&a)[4], MatrixDescriptor b,
                                      bool add) {
  static_assert(n % 2 == 0 && n <= 32);
  if constexpr (type == Half::bfloat16) {
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_REGISTERS, "bf16")
  } else {
    TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_REGISTERS, "f16")
  }
}

#undef TESSERA_WGMMA_WIDTHS
#undef TESSERA_WGMMA_SHARED
#undef TESSERA_WGMMA_REGISTERS

}  // namespace tessera::ptx
