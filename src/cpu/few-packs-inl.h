// The rows that stream (few-inl.h), of all key heads of a task at once, in dot products of AVX-512. A key's
// row of the cache is read from its first head to its last one before the next key's is: memory goes by in
// one piece, in the order in which the CPU's own prefetchers expect it.
//
//   s (8 rows x 2 keys) = q kᵀ     a pack: eight rows of q, of as many heads as have eight rows together
//   p = softmax of s               as it lies (few-softmax-inl.h)
//   o (rows x columns) += p v      a few keys in step, so that o is loaded and stored once for them
#pragma once

#include "cpu/few-softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

constexpr std::int64_t pack_rows = 8;
constexpr std::int64_t most_packs = 8;           // of a task
constexpr std::int64_t least_pack_bytes = 2048;  // of a row of the cache

// A head's rows take 1, 2, 4 or 8 lanes: packs end where heads do.
constexpr std::int64_t pack_width(std::int64_t rows) {
  std::int64_t width = 1;
  while (width < rows) width *= 2;
  return width;
}

// A pack's scores are s[key][row]. Its weights, in the place of s, are p[key / 2][row][key % 2].
struct PackLayout {
  static constexpr std::int64_t rows = pack_rows;
  static constexpr std::int64_t s_ld = col_align, p_ld = 2 * col_align;
  static constexpr bool called_with_maxima = false;

  static HWY_INLINE Vec load_rows(const float* s, std::int64_t c) { return load(s + rows * c); }
  static HWY_INLINE void store_rows(Vec x, float* s, std::int64_t c) { store(x, s + rows * c); }
  template <class Body>
  static HWY_INLINE void over_keys(std::int64_t cols, const Body& body) {
    for (std::int64_t c = 0; c < cols; c += 8) {
      HWY_UNROLL(4)
      for (int i = 0; i < 4; ++i) body(c + 2 * i, i);
    }
  }
  static HWY_INLINE auto columns(std::int64_t c) {
    const IntTag i;
    return hn::Add(hn::Set(i, static_cast<std::int32_t>(c)), hn::ShiftRight<3>(hn::Iota(i, 0)));
  }
  template <class T>
  static HWY_INLINE auto of_rows(const T* x) {
    const hn::ScalableTag<T> tag;
    const auto low = hn::LoadU(hn::Half<hn::ScalableTag<T>>(), x);
    return hn::Combine(tag, low, low);
  }
  static HWY_INLINE void keep_rows(Vec x, float* to) {
    const hn::Half<FloatTag> half;
    hn::StoreU(hn::LowerHalf(half, x), half, to);
  }
  template <class Combine>
  static HWY_INLINE Vec across_keys(Vec x, const Combine& combine) {
    return combine(x, hn::ConcatLowerUpper(FloatTag(), x, x));
  }
  template <class Weigh>
  static HWY_INLINE void store_weights(std::int64_t cols, bfloat16* p, const Weigh& weigh) {
    for (std::int64_t c = 0; c < cols; c += 4) {
      store_pairs(weigh(c, 0), p + rows * c);
      store_pairs(weigh(c + 2, 1), p + rows * (c + 2));
    }
  }

 private:
  // Two keys' rows, rounded, to pairs.
  static HWY_INLINE void store_pairs(Vec x, bfloat16* to) {
    const __m256i order = _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m256i pairs = _mm256_permutexvar_epi16(order, rounded(x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pairs);
  }
};
static_assert(lanes == 2 * pack_rows && col_align % 8 == 0 && col_unit % 8 == 0);

// The first n of a line's 32 numbers.
HWY_INLINE __mmask32 cells_there(std::int64_t n) { return ~__mmask32{0} >> (cell_step - n); }

// Rows in the order in which they will be read, from one of them on, line by line.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const void* const* rows, std::int64_t count, std::int64_t bytes)
      : rows_(rows), count_(count), bytes_(bytes) {}

  // The next `lines`; where there are no more, any.
  HWY_INLINE const char* take(std::int64_t lines) {
    if (line_ >= end_ && count_ > 0) next_row();
    if (HWY_UNLIKELY(line_ >= end_)) next_rows();
    const char* line = line_;
    line_ += 64 * lines;
    return line;
  }

 private:
  const void* const* rows_ = nullptr;
  std::int64_t count_ = 0, bytes_ = 0;
  const char *line_ = nullptr, *end_ = nullptr;

  HWY_INLINE void next_row() {
    const auto* row = static_cast<const char*>(*rows_++);
    --count_;
    if (row != end_) line_ = row;
    end_ = row + bytes_;
  }
  // Where what was taken last was longer than a row.
  HWY_NOINLINE void next_rows() {
    while (line_ >= end_ && count_ > 0) next_row();
  }
};

// How many lines before it is read a line is called for, and how many rows that are: CPUs forget prefetches
// that they have no room for, so it is three times (NOTES.md).
constexpr int pack_calls = 3;
constexpr std::int64_t k_lines_ahead[pack_calls] = {384, 256, 128},
                       v_lines_ahead[pack_calls] = {384, 288, 192};

struct RowsAhead {
  std::int64_t rows[pack_calls];

  RowsAhead(const std::int64_t (&lines)[pack_calls], std::int64_t row_lines, std::int64_t most) {
    for (int n = 0; n < pack_calls; ++n) rows[n] = std::min((lines[n] + row_lines - 1) / row_lines, most);
  }
};

HWY_INLINE void call_for(const void* line) { __builtin_prefetch(line, 0, 3); }

// s of all heads, `rows` rows of each, key by key. With each line the same one of rows that will be read
// later is called for: `order` has k_rows and what follows them.
struct PackScores {
  const bfloat16* q;
  std::int64_t q_head;  // from one head's q to the next one's
  std::int64_t heads, k_head, dim;
  float* s;
  const void *const *k_rows, *const *order;
  std::int64_t keys;
  RowsAhead ahead;

  template <int rows>
  HWY_INLINE void run() const {
    switch (dim) {
      case 64:
        return run_lines<rows, 2>();
      case 128:
        return run_lines<rows, 4>();
      default:
        return run_lines<rows, 0>();
    }
  }

 private:
  // Of `whole_lines` lines; 0: of as many as the dim has, the last of which may be a part of one.
  template <int rows, int whole_lines>
  HWY_NOINLINE void run_lines() const {
    constexpr std::int64_t pack_heads = pack_rows / rows;
    const std::int64_t lines = whole_lines > 0 ? whole_lines : (dim + cell_step - 1) / cell_step;
    const __mmask32 last = cells_there(dim - (lines - 1) * cell_step);
    const std::int64_t head_count = heads;
    alignas(64) float even[most_packs * lanes];  // of each pack, what is left to sum of an even key's scores
    for (std::int64_t j = 0; j < keys + keys % 2; ++j) {
      const auto* k = static_cast<const bfloat16*>(k_rows[j]);
      const bfloat16* later[pack_calls];
      for (int n = 0; n < pack_calls; ++n) later[n] = static_cast<const bfloat16*>(order[j + ahead.rows[n]]);
      float *pack_even = even, *to = s + pack_rows * (j - j % 2);
      // A pack of all its heads, or of those that are left.
      const auto pack = [&](std::int64_t first, auto whole) TESSERA_INLINE_LAMBDA {
        Vec acc[pack_rows];
        for (Vec& sum : acc) sum = set(0.0f);
        HWY_UNROLL(8)
        for (int i = 0; i < pack_heads; ++i) {
          const std::int64_t head = first + i;
          if (!whole && head >= head_count) break;
          const bfloat16 *k_line = k + head * k_head, *q_line = q + head * q_head, *called[pack_calls];
          keep_address(k_line);
          keep_address(q_line);
          for (int n = 0; n < pack_calls; ++n) {
            called[n] = later[n] + head * k_head;
            keep_address(called[n]);
          }
          const auto line = [&](__m512i cells, std::int64_t l) TESSERA_INLINE_LAMBDA {
            HWY_UNROLL(3)
            for (const bfloat16* at : called) call_for(at + l * cell_step);
            HWY_UNROLL(8)
            for (int r = 0; r < rows; ++r) {
              Vec& sum = acc[i * rows + r];
              sum = add_dots(sum, q_line + (l * rows + r) * cell_step, Cells{cells});
            }
          };
          if constexpr (whole_lines > 0) {
            HWY_UNROLL(4)
            for (int l = 0; l < whole_lines; ++l) line(_mm512_loadu_si512(k_line + l * cell_step), l);
          } else {
            std::int64_t l = 0;
            for (; l + 1 < lines; ++l) line(_mm512_loadu_si512(k_line + l * cell_step), l);
            line(_mm512_maskz_loadu_epi16(last, k_line + l * cell_step), l);
          }
        }
        const Vec sums =
            fold_blocks(fold_four(acc[0], acc[1], acc[2], acc[3]), fold_four(acc[4], acc[5], acc[6], acc[7]));
        if (j % 2 == 0) {
          store(sums, pack_even);
        } else {
          store(fold_blocks(load(pack_even), sums), to);
        }
        pack_even += lanes;
        to += pack_rows * PackLayout::s_ld;
      };
      std::int64_t h = 0;
      for (; h + pack_heads <= head_count; h += pack_heads) pack(h, std::true_type());
      if constexpr (pack_heads > 1) {
        if (h < head_count) pack(h, std::false_type());
      }
    }
  }
};

// o of all heads, `rows` rows of each, a few keys at a time. With each line of o's columns as many lines of
// `next` are called for as there are keys.
struct PackValues {
  const bfloat16* p;
  std::int64_t width;  // lanes from one head's rows to the next one's
  std::int64_t heads, v_head, dim;
  float* o;  // [head][line of columns][row]

  static constexpr int keys_at_once(std::int64_t rows) { return rows <= 2 ? 2 : rows <= 4 ? 4 : 8; }

  template <int rows>
  HWY_NOINLINE void run(const void* const* v_rows, std::int64_t keys, LinesAhead (&next)[pack_calls]) const {
    constexpr int at_once = keys_at_once(rows);
    std::int64_t j = 0;
    for (; j + at_once <= keys; j += at_once) add_keys<rows, at_once>(v_rows + j, j, next);
    if constexpr (at_once > 2) {
      for (; j + 2 <= keys; j += 2) add_keys<rows, 2>(v_rows + j, j, next);
    }
    if (j < keys) add_keys<rows, 1>(v_rows + j, j, next);
  }

 private:
  template <int rows, int keys>
  HWY_INLINE void add_keys(const void* const* v_rows, std::int64_t j, LinesAhead (&next)[pack_calls]) const {
    const std::int64_t columns = dim, lines = (columns + cell_step - 1) / cell_step;
    const bfloat16* v[keys];
    for (int i = 0; i < keys; ++i) v[i] = static_cast<const bfloat16*>(v_rows[i]);
    float* HWY_RESTRICT to = o;
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t lane = h * width;
      const bfloat16* cells =
          p + lane / pack_rows * (pack_rows * PackLayout::p_ld) + pack_rows * j + 2 * (lane % pack_rows);
      const char* called[pack_calls];
      for (int n = 0; n < pack_calls; ++n) called[n] = next[n].take(lines * keys);
      const auto add_line = [&](std::int64_t c, const auto& load_cells_of) TESSERA_INLINE_LAMBDA {
        HWY_UNROLL(3)
        for (const char*& line : called) {
          HWY_UNROLL(8)
          for (int i = 0; i < keys; ++i) call_for(line + 64 * i);
          line += 64 * keys;
        }
        Vec acc[rows][2];
        HWY_UNROLL(8)
        for (int r = 0; r < rows; ++r) {
          acc[r][0] = load(to + r * cell_step);
          acc[r][1] = load(to + r * cell_step + lanes);
        }
        HWY_UNROLL(4)
        for (int i = 0; i < keys; i += 2) {
          const __m512i x = load_cells_of(v[i] + c);
          const __m512i y =
              i + 1 < keys ? load_cells_of(v[i + 1 < keys ? i + 1 : i] + c) : _mm512_setzero_si512();
          const Cells low{_mm512_unpacklo_epi16(x, y)}, high{_mm512_unpackhi_epi16(x, y)};
          HWY_UNROLL(8)
          for (int r = 0; r < rows; ++r) {
            std::uint32_t cell;
            std::memcpy(&cell, cells + i * pack_rows + 2 * r, sizeof(cell));
            const Cells pair = hn::Set(UintTag(), cell);
            acc[r][0] = add_dots(acc[r][0], pair, low);
            acc[r][1] = add_dots(acc[r][1], pair, high);
          }
        }
        HWY_UNROLL(8)
        for (int r = 0; r < rows; ++r) {
          store(acc[r][0], to + r * cell_step);
          store(acc[r][1], to + r * cell_step + lanes);
        }
        to += rows * cell_step;
      };
      std::int64_t c = 0;
      for (; c + cell_step <= columns; c += cell_step)
        add_line(c, [](const bfloat16* from) TESSERA_INLINE_LAMBDA { return _mm512_loadu_si512(from); });
      if (c < columns) {
        const __mmask32 there = cells_there(columns - c);
        add_line(c, [&](const bfloat16* from)
                        TESSERA_INLINE_LAMBDA { return _mm512_maskz_loadu_epi16(there, from); });
      }
      for (int i = 0; i < keys; ++i) v[i] += v_head;
    }
  }
};

struct PackProducts {
  static constexpr bool by_block = true, heads_at_once = true;
  static constexpr std::int64_t most_lanes = most_packs * pack_rows;  // of a task

  // In floats, of which each takes the room of two numbers.
  static constexpr std::int64_t q_rows(std::int64_t rows) { return (pack_width(rows) + 1) / 2; }
  static std::int64_t passes_of_scores(std::int64_t /*rows*/) { return 1; }
  static std::int64_t passes_of_values(std::int64_t /*rows*/) { return 1; }
  // q[line][row]. Rows that are not there are zeros.
  static HWY_INLINE void load_queries(const TaskRows& task, const Few& few) {
    const std::int64_t depth = round_up(task.problem.head_dim, cell_step), width = pack_width(few.rows);
    alignas(64) float row[max_head_dim];
    for (std::int64_t r = 0; r < width; ++r) {
      if (r < few.rows) {
        load_query(task, r, row, depth);
      } else {
        zero_row(row, depth);
      }
      bfloat16* to = reinterpret_cast<bfloat16*>(few.q) + r * cell_step;
      for (std::int64_t c = 0; c < depth; c += cell_step, to += width * cell_step) {
        store_rounded(load(row + c), to);
        store_rounded(load(row + c + lanes), to + lanes);
      }
    }
  }
  // o[line of columns][row] to rows.
  static HWY_NOINLINE void after_values(const Few& few, std::int64_t dim) {
    alignas(64) float copy[pack_rows * max_head_dim];
    std::memcpy(copy, few.o, static_cast<std::size_t>(few.rows * few.o_ld) * sizeof(float));
    for (std::int64_t r = 0; r < few.rows; ++r) {
      float* row = few.o + r * few.o_ld;
      for (std::int64_t c = 0; c < few.o_ld; c += cell_step)
        std::memcpy(row + c, copy + c * few.rows + r * cell_step, cell_step * sizeof(float));
      unzip_row(row, dim);
    }
  }

  class State;
};

class PackProducts::State : public BlockState<PackProducts::most_lanes> {
 public:
  explicit State(std::int64_t rows) : BlockState(rows, pack_width(rows)) {}

  // The block's rows, and those that are read after them.
  HWY_INLINE void start_block(const void* const* k_rows, const void* const* v_rows, std::int64_t keys,
                              std::int64_t dim, std::int64_t dim_v, const void* const* next_k,
                              const void* const* next_v, std::int64_t next_keys) {
    BlockState::start_block(k_rows, v_rows, keys, dim, dim_v);
    const void** to = std::copy_n(v_rows, keys, std::copy_n(k_rows, keys, order_));
    to = std::copy_n(next_v, next_keys, std::copy_n(next_k, next_keys, to));
    std::fill(to, std::end(order_), to[-1]);
  }

  void scores(const Few& few, std::int64_t heads, std::int64_t k_head) const {
    const PackScores to{reinterpret_cast<const bfloat16*>(few.q),
                        2 * q_rows(rows_) * few.q_ld,
                        heads,
                        k_head,
                        dim_,
                        few.s,
                        k_rows_,
                        order_,
                        keys_,
                        {k_lines_ahead, row_lines(heads, dim_), most_ahead}};
    switch (width_) {
      case 1:
        return to.run<1>();
      case 2:
        return to.run<2>();
      case 4:
        return to.run<4>();
      default:
        return to.run<8>();
    }
  }

  // task_of(h) has the rows of a head.
  template <class TaskOf>
  HWY_INLINE void softmax(const TaskOf& task_of, const Few& few, std::int64_t heads, Range rows,
                          std::int64_t key, Range cols) {
    const TaskRows first = task_of(0);
    const bool plain = shows_all(first, rows, key, cols);
    Next none;
    const std::int64_t pack_heads = pack_rows / width_;
    for (std::int64_t begin = 0; begin < heads; begin += pack_heads) {
      const std::int64_t end = std::min(begin + pack_heads, heads), lane = begin * width_;
      RowLanes of;
      for (std::int64_t h = begin; h < end && !plain; ++h) {
        const TaskRows task = task_of(h);
        for (std::int64_t r = 0; r < rows_; ++r)
          of.set((h - begin) * width_ + r, task, rows.begin + r, key, cols);
      }
      alignas(64) float alpha[lane_rows];
      float* s = few.s + lane * PackLayout::s_ld;
      LaneSoftmax<PackLayout>::run(first.first, plain ? nullptr : &of, pack_rows, cols, s,
                                   reinterpret_cast<bfloat16*>(s), max_ + lane, sum_ + lane, alpha, none);
      for (std::int64_t h = begin; h < end; ++h) {
        for (std::int64_t r = 0; r < rows_; ++r) {
          const float shrink = alpha[(h - begin) * width_ + r];
          float* o = few.o + h * rows_ * few.o_ld + r * cell_step;
          for (std::int64_t c = 0; c < few.o_ld && shrink != 1.0f; c += cell_step)
            scale_row(o + c * rows_, cell_step, shrink);
        }
      }
    }
  }

  void values(const Few& few, std::int64_t heads, std::int64_t v_head) const {
    const RowsAhead ahead(v_lines_ahead, row_lines(heads, dim_v_), most_ahead);
    LinesAhead next[pack_calls];
    for (int n = 0; n < pack_calls; ++n) {
      const void* const* from = order_ + keys_ + ahead.rows[n];
      next[n] = LinesAhead(from, std::end(order_) - from,
                           heads * v_head * static_cast<std::int64_t>(sizeof(bfloat16)));
    }
    const PackValues to{reinterpret_cast<const bfloat16*>(few.s), width_, heads, v_head, dim_v_, few.o};
    with_rows(rows_, [&](auto rows) HWY_ATTR { to.run<rows>(v_rows_, keys_, next); });
  }

 private:
  static constexpr std::int64_t most_keys = col_align;  // of a block
  static constexpr std::int64_t most_ahead = 2 * most_keys;

  const void* order_[2 * most_keys + most_ahead] = {};  // k, v and those of the next block

  static std::int64_t row_lines(std::int64_t heads, std::int64_t dim) {
    return heads * ((dim + cell_step - 1) / cell_step);
  }

  template <int count = static_cast<int>(pack_rows), class Body>
  static HWY_INLINE void with_rows(std::int64_t rows, const Body& body) {
    if constexpr (count > 1) {
      if (rows < count) return with_rows<count - 1>(rows, body);
    }
    body(std::integral_constant<int, count>());
  }
};

}  // namespace tessera::cpu::TESSERA_CPU_KERNEL
HWY_AFTER_NAMESPACE();
