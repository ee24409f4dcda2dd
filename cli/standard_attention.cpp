#include "cli/standard_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "cli/parallel.h"
#include "cli/simd_level.h"

namespace tessera::cli {
namespace {

using Index = std::int64_t;

// Element (i, j) lies at data[i * row + j * col].
struct Matrix {
  const float* data;
  Index row, col;
};

// c = scale * a b; c's columns are contiguous.
struct Product {
  Index rows, cols, depth;
  float scale;
  Matrix a, b;
  float* c;
  Index c_row;
};

struct Vec128 {
  using Float = float __attribute__((vector_size(16)));
  using Int = std::int32_t __attribute__((vector_size(16)));
  static constexpr int lanes = 4;
};
struct Vec256 {
  using Float = float __attribute__((vector_size(32)));
  using Int = std::int32_t __attribute__((vector_size(32)));
  static constexpr int lanes = 8;
};
struct Vec512 {
  using Float = float __attribute__((vector_size(64)));
  using Int = std::int32_t __attribute__((vector_size(64)));
  static constexpr int lanes = 16;
};

// Goto's blocking: a panel of b for the L2 cache, a block of a beside it, a tile of c in registers.
constexpr Index block_rows = 96, block_cols = 256, block_depth = 256;
constexpr int tile_rows = 6;
constexpr Index chunk_rows = 384;  // rows of c a task computes: enough to pay for packing b

// The loops, once for every vector width V.
template <class V>
struct Loops {
  using Float = typename V::Float;
  using Int = typename V::Int;
  static constexpr int tile_cols = 2 * V::lanes;

  TESSERA_CLI_INLINE static void load(Float& to, const float* from) { std::memcpy(&to, from, sizeof(to)); }
  TESSERA_CLI_INLINE static void store(float* to, const Float& from) { std::memcpy(to, &from, sizeof(from)); }

  // One tile: c (tile_rows, tile_cols) = or += the packed a (depth, tile_rows) times b (depth, tile_cols).
  TESSERA_CLI_INLINE static void tile(Index depth, const float* a, const float* b, float* c, Index c_row,
                                      bool accumulate) {
    Float low[tile_rows] = {}, high[tile_rows] = {};
    for (Index p = 0; p < depth; ++p) {
      Float b_low, b_high;
      load(b_low, b + p * tile_cols);
      load(b_high, b + p * tile_cols + V::lanes);
#pragma GCC unroll 6
      for (int r = 0; r < tile_rows; ++r) {
        const float factor = a[p * tile_rows + r];
        low[r] += factor * b_low;
        high[r] += factor * b_high;
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < tile_rows; ++r) {
      float* row = c + r * c_row;
      if (accumulate) {
        Float old_low, old_high;
        load(old_low, row);
        load(old_high, row + V::lanes);
        low[r] += old_low;
        high[r] += old_high;
      }
      store(row, low[r]);
      store(row + V::lanes, high[r]);
    }
  }

  // A tile at the edge of c, by way of a whole tile.
  TESSERA_CLI_INLINE static void edge_tile(Index depth, const float* a, const float* b, float* c, Index c_row,
                                           bool accumulate, Index rows, Index cols) {
    std::array<float, static_cast<std::size_t>(tile_rows) * tile_cols> whole;
    tile(depth, a, b, whole.data(), tile_cols, false);
    for (Index r = 0; r < rows; ++r) {
      for (Index j = 0; j < cols; ++j) {
        const float value = whole[static_cast<std::size_t>(r * tile_cols + j)];
        c[r * c_row + j] = accumulate ? c[r * c_row + j] + value : value;
      }
    }
  }

  // m (count, depth), element (i, p), into panels of `width` rows of m: (panel, depth, width), zero-filled.
  TESSERA_CLI_INLINE static void pack(const Matrix& m, Index count, Index depth, Index width, float scale,
                                      float* to) {
    for (Index panel = 0; panel < count; panel += width) {
      const Index filled = std::min(width, count - panel);
      for (Index p = 0; p < depth; ++p, to += width) {
        const float* from = m.data + panel * m.row + p * m.col;
        for (Index i = 0; i < filled; ++i) to[i] = scale * from[i * m.row];
        for (Index i = filled; i < width; ++i) to[i] = 0.0f;
      }
    }
  }

  TESSERA_CLI_INLINE static void multiply_block(const Product& m, Index rows, Index cols, Index depth,
                                                const float* a, const float* b, float* c, bool accumulate) {
    for (Index j = 0; j < cols; j += tile_cols) {
      for (Index i = 0; i < rows; i += tile_rows) {
        const float* a_panel = a + i * depth;
        const float* b_panel = b + j * depth;
        float* corner = c + i * m.c_row + j;
        if (i + tile_rows <= rows && j + tile_cols <= cols) {
          tile(depth, a_panel, b_panel, corner, m.c_row, accumulate);
        } else {
          edge_tile(depth, a_panel, b_panel, corner, m.c_row, accumulate,
                    std::min<Index>(tile_rows, rows - i), std::min<Index>(tile_cols, cols - j));
        }
      }
    }
  }

  TESSERA_CLI_INLINE static void multiply(const Product& m, float* a_packed, float* b_packed) {
    for (Index j = 0; j < m.cols; j += block_cols) {
      const Index cols = std::min(block_cols, m.cols - j);
      for (Index p = 0; p < m.depth; p += block_depth) {
        const Index depth = std::min(block_depth, m.depth - p);
        const Matrix b = {m.b.data + p * m.b.row + j * m.b.col, m.b.col, m.b.row};  // transposed
        pack(b, cols, depth, tile_cols, 1.0f, b_packed);
        for (Index i = 0; i < m.rows; i += block_rows) {
          const Index rows = std::min(block_rows, m.rows - i);
          const Matrix a = {m.a.data + i * m.a.row + p * m.a.col, m.a.row, m.a.col};
          pack(a, rows, depth, tile_rows, m.scale, a_packed);
          multiply_block(m, rows, cols, depth, a_packed, b_packed, m.c + i * m.c_row + j, p > 0);
        }
      }
    }
  }

  // exp(x) for x <= 0, to about 2 ulp: 2^k * a polynomial on [-ln2/2, ln2/2].
  TESSERA_CLI_INLINE static void exponential(Float& x) {
    constexpr float round_magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Float lowest = Float{} - 87.0f;
    x = x > lowest ? x : lowest;
    const Float k = (x * 1.44269504f + round_magic) - round_magic;
    const Float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    Float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const Int bits = (__builtin_convertvector(k, Int) + 127) << 23;
    Float power;
    std::memcpy(&power, &bits, sizeof(power));
    x = p * power;
  }

  TESSERA_CLI_INLINE static float row_max(const float* s, Index n) {
    Float best = Float{} - std::numeric_limits<float>::infinity();
    Index j = 0;
    for (; j + V::lanes <= n; j += V::lanes) {
      Float x;
      load(x, s + j);
      best = x > best ? x : best;
    }
    float result = best[0];
    for (int lane = 1; lane < V::lanes; ++lane) result = std::max(result, best[lane]);
    for (; j < n; ++j) result = std::max(result, s[j]);
    return result;
  }

  // s becomes softmax(s).
  TESSERA_CLI_INLINE static void softmax_row(float* s, Index n) {
    const float max = row_max(s, n);
    Float sums{};
    Index j = 0;
    for (; j + V::lanes <= n; j += V::lanes) {
      Float x;
      load(x, s + j);
      x -= max;
      exponential(x);
      sums += x;
      store(s + j, x);
    }
    float sum = 0.0f;
    for (int lane = 0; lane < V::lanes; ++lane) sum += sums[lane];
    for (; j < n; ++j) sum += s[j] = std::exp(s[j] - max);
    const float inverse = 1.0f / sum;
    for (Index i = 0; i < n; ++i) s[i] *= inverse;
  }

  // dp becomes ds.
  TESSERA_CLI_INLINE static void ds_row(const float* p, float* dp, float delta, float scale, Index n) {
    for (Index j = 0; j < n; ++j) dp[j] = p[j] * (dp[j] - delta) * scale;
  }
};

struct Kernels {
  void (*multiply)(const Product&, float* a_packed, float* b_packed);
  void (*softmax_row)(float* s, Index n);
  void (*ds_row)(const float* p, float* dp, float delta, float scale, Index n);
};

#define TESSERA_CLI_KERNELS(NAME, ATTRIBUTE, VEC)                                                         \
  ATTRIBUTE void multiply_##NAME(const Product& m, float* a, float* b) { Loops<VEC>::multiply(m, a, b); } \
  ATTRIBUTE void softmax_row_##NAME(float* s, Index n) { Loops<VEC>::softmax_row(s, n); }                 \
  ATTRIBUTE void ds_row_##NAME(const float* p, float* dp, float delta, float scale, Index n) {            \
    Loops<VEC>::ds_row(p, dp, delta, scale, n);                                                           \
  }                                                                                                       \
  constexpr Kernels kernels_##NAME = {multiply_##NAME, softmax_row_##NAME, ds_row_##NAME};

TESSERA_CLI_KERNELS(generic, , Vec128)
#if defined(__x86_64__)
TESSERA_CLI_KERNELS(avx2, TESSERA_CLI_AVX2, Vec256)
TESSERA_CLI_KERNELS(avx512, TESSERA_CLI_AVX512, Vec512)
#endif

const Kernels& kernels_here() {
#if defined(__x86_64__)
  if (simd_level() == SimdLevel::avx512) return kernels_avx512;
  if (simd_level() == SimdLevel::avx2) return kernels_avx2;
#endif
  return kernels_generic;
}

// The same product for every (batch, head): product_of(head index) describes one head's.
template <class ProductOf>
void multiply_heads(int threads, Index heads, const ProductOf& product_of) {
  const Index rows = product_of(0).rows;
  const Index chunks = (rows + chunk_rows - 1) / chunk_rows;
  parallel_for(threads, heads * chunks, [&](Index task) {
    Product part = product_of(task / chunks);
    const Index begin = task % chunks * chunk_rows;
    part.rows = std::min(chunk_rows, rows - begin);
    part.a.data += begin * part.a.row;
    part.c += begin * part.c_row;
    const Memory a = allocate(sizeof(float) * block_rows * block_depth);
    const Memory b = allocate(sizeof(float) * block_cols * block_depth);
    kernels_here().multiply(part, static_cast<float*>(a.get()), static_cast<float*>(b.get()));
  });
}

// Where a head's (seqlen, head_dim) lies in a tensor, and its (seqlen, seqlen) in a square matrix.
struct Layout {
  explicit Layout(const StandardShape& s)
      : n(s.seqlen), d(s.head_dim), heads(s.heads), all_heads(s.batch * s.heads), row(s.heads * s.head_dim) {}

  [[nodiscard]] Index head(Index index) const { return (index / heads * n * heads + index % heads) * d; }
  [[nodiscard]] Matrix of(const float* tensor, Index index) const { return {tensor + head(index), row, 1}; }
  [[nodiscard]] Matrix transposed(const float* tensor, Index index) const {
    return {tensor + head(index), 1, row};
  }
  [[nodiscard]] Index square(Index index) const { return index * n * n; }

  Index n, d, heads, all_heads, row;
};

}  // namespace

std::int64_t StandardAttention::square_bytes(const StandardShape& shape) {
  return shape.batch * shape.heads * shape.seqlen * shape.seqlen * static_cast<Index>(sizeof(float));
}

void StandardAttention::forward(const float* q, const float* k, const float* v, float* o) {
  const Layout at(shape_);
  if (p_ == nullptr) p_ = allocate(static_cast<std::size_t>(square_bytes(shape_)));
  auto* p = static_cast<float*>(p_.get());
  const float scale = 1.0f / std::sqrt(static_cast<float>(at.d));

  multiply_heads(threads_, at.all_heads, [&](Index h) {
    return Product{at.n, at.n, at.d, scale, at.of(q, h), at.transposed(k, h), p + at.square(h), at.n};
  });
  parallel_for(threads_, at.all_heads * at.n,
               [&](Index row) { kernels_here().softmax_row(p + row * at.n, at.n); });
  multiply_heads(threads_, at.all_heads, [&](Index h) {
    return Product{at.n, at.d, at.n, 1.0f, {p + at.square(h), at.n, 1}, at.of(v, h), o + at.head(h), at.row};
  });
}

void StandardAttention::backward(const float* q, const float* k, const float* v, const float* o,
                                 const float* dout, float* dq, float* dk, float* dv) {
  const Layout at(shape_);
  if (ds_ == nullptr) ds_ = allocate(static_cast<std::size_t>(square_bytes(shape_)));
  const auto* p = static_cast<const float*>(p_.get());
  auto* ds = static_cast<float*>(ds_.get());
  const float scale = 1.0f / std::sqrt(static_cast<float>(at.d));

  multiply_heads(threads_, at.all_heads, [&](Index h) {  // dv = p^T dout
    return Product{at.n,  at.d, at.n, 1.0f, {p + at.square(h), 1, at.n}, at.of(dout, h), dv + at.head(h),
                   at.row};
  });
  multiply_heads(threads_, at.all_heads, [&](Index h) {  // dp = dout v^T
    return Product{at.n, at.n, at.d, 1.0f, at.of(dout, h), at.transposed(v, h), ds + at.square(h), at.n};
  });
  parallel_for(threads_, at.all_heads * at.n, [&](Index row) {  // ds = p * (dp - delta)
    const Index offset = at.head(row / at.n) + row % at.n * at.row;
    float delta = 0.0f;
    for (Index c = 0; c < at.d; ++c) delta += o[offset + c] * dout[offset + c];
    kernels_here().ds_row(p + row * at.n, ds + row * at.n, delta, scale, at.n);
  });
  multiply_heads(threads_, at.all_heads, [&](Index h) {  // dq = ds k
    return Product{at.n,  at.d, at.n, 1.0f, {ds + at.square(h), at.n, 1}, at.of(k, h), dq + at.head(h),
                   at.row};
  });
  multiply_heads(threads_, at.all_heads, [&](Index h) {  // dk = ds^T q
    return Product{at.n,  at.d, at.n, 1.0f, {ds + at.square(h), 1, at.n}, at.of(q, h), dk + at.head(h),
                   at.row};
  });
}

}  // namespace tessera::cli
