// The rows that stream (few-inl.h), of all key heads of a task at once, in dot products of AVX-512. A key's
// row of the cache is read from its first head to its last one before the next ones are, one key or a few at
// a time: memory goes by in one piece, in the order in which the CPU's own prefetchers expect it.
//
//   s = q kᵀ                  of one or two rows a head: a pack, eight rows of several heads x 2 keys;
//                             of more: quads, four rows x 4 keys (few-quads-inl.h)
//   p = softmax of s          as it lies (few-softmax-inl.h), in the time that v takes to come
//   o (rows x columns) += p v a few keys in step, so that o is loaded and stored once for them
#pragma once

#include "cpu/few-quads-inl.h"
#include "cpu/few-softmax-inl.h"
#include "cpu/lines-ahead-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_CPU_KERNEL {

constexpr std::int64_t pack_rows = 8;
constexpr std::int64_t most_places = 64;  // of a task

// A head's rows take 1, 2, 4 or 8 places: packs and quads end where heads do.
constexpr std::int64_t pack_width(std::int64_t rows) {
  std::int64_t width = 1;
  while (width < rows) width *= 2;
  return width;
}
constexpr bool in_quads(std::int64_t rows) { return rows > 2; }

// A pack's scores are s[key / 2][key % 2][row]. Its weights, in the place of s, are p[key / 2][row][key % 2].
// `c` is even.
struct PackLayout {
  static constexpr std::int64_t rows = pack_rows;
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
  // Two keys' rows, rounded, to pairs.
  static HWY_INLINE void store_vector(Vec x, bfloat16* p, std::int64_t c) {
    const __m256i order = _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m256i pairs = _mm256_permutexvar_epi16(order, rounded(x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + rows * c), pairs);
  }
  // Where the cell of row r and of keys j and j + 1 lies, j even.
  static HWY_INLINE std::int64_t cell(std::int64_t r, std::int64_t j) { return rows * j + 2 * r; }
};
static_assert(lanes == 2 * pack_rows && col_align % 8 == 0 && col_unit % 8 == 0);

// A block's scores, of packs or of quads: the vectors of `Layout::rows` places lie together, those of the
// next places behind them. The arrays have one vector for each such group of places.
struct PackBlock {
  static constexpr std::int64_t size = most_places * (lanes / QuadLayout::rows);
  float* s;                       // becomes p
  alignas(64) float most[size];   // the largest scores
  alignas(64) float scale[size];  // scores to weights: exp2(scale score - shift)
  alignas(64) float shift[size];
  alignas(64) float shrink[size];  // of weights of blocks before
  alignas(64) float total[size];   // of weights

  HWY_INLINE float* scores(std::int64_t place) const { return s + place * col_align; }
  HWY_INLINE bfloat16* weights(std::int64_t place) const {
    return reinterpret_cast<bfloat16*>(scores(place));
  }
  // Where the vector of the places from `place` on is, in the arrays above.
  template <class Layout>
  static HWY_INLINE std::int64_t at(std::int64_t place) {
    return place * (lanes / Layout::rows);
  }

  template <class Layout>
  HWY_INLINE void keep_scores(Vec x, std::int64_t place, std::int64_t c) {
    float* largest = most + at<Layout>(place);
    Layout::store_rows(x, scores(place), c);
    store(LaneSoftmax<Layout>::larger(x, load(largest)), largest);
  }
  // The weights of `keys` keys from j on.
  template <class Layout, int keys>
  HWY_INLINE void weigh(std::int64_t place, std::int64_t j) {
    constexpr int step = static_cast<int>(lanes / Layout::rows);
    const std::int64_t i = at<Layout>(place);
    const typename LaneSoftmax<Layout>::Weighing weight{load(scale + i), load(shift + i)};
    Vec sum = load(total + i);
    HWY_UNROLL(4)
    for (int c = 0; c < keys; c += step) {
      const Vec x = weight(Layout::load_rows(scores(place), j + c));
      sum = hn::Add(sum, x);
      Layout::store_vector(x, weights(place), j + c);
    }
    store(sum, total + i);
  }
};
static_assert(QuadLayout::rows <= PackLayout::rows && QuadLayout::s_ld == col_align);

// The first n of a line's 32 numbers.
HWY_INLINE __mmask32 cells_there(std::int64_t n) { return ~__mmask32{0} >> (cell_step - n); }

// s of all heads. With each line that is read, one is called for in each of the calls.
template <class Way>
struct PackScores {
  const bfloat16* q;
  std::int64_t q_head;  // from one head's q to the next one's
  std::int64_t heads, k_head, dim;
  const void* const* k_rows;
  std::int64_t keys;

  // In packs: `rows` rows a head, key by key. Heads are a loop of a few instructions, whose sums go by way of
  // memory: of one piece of code for all heads of a pack each load would see every 2 KiB of memory, which is
  // slower (NOTES.md).
  template <int rows>
  HWY_INLINE void by_key(PackBlock& block, Calls<Way>& calls) const {
    switch (dim) {
      case 64:
        return by_key_of<rows, 2>(block, calls);
      case 128:
        return by_key_of<rows, 4>(block, calls);
      default:
        return by_key_of<rows, 0>(block, calls);
    }
  }

  // In quads: four keys at a time.
  template <int quads>
  HWY_NOINLINE void by_quads(PackBlock& block, Calls<Way>& calls) const {
    constexpr int at_once = 4;
    const std::int64_t columns = dim, head_bytes = k_head * static_cast<std::int64_t>(sizeof(bfloat16));
    // Four heads' bytes at a time, or one's: so that none goes on behind a row.
    const std::int64_t pieces = heads % at_once == 0 ? 1 : at_once;
    const std::int64_t piece_columns =
        round_up((columns + pieces - 1) / pieces, static_cast<std::int64_t>(quad_step));
    for (std::int64_t j = 0; j < keys; j += at_once) {
      const bfloat16* k[at_once];
      for (int n = 0; n < at_once; ++n) k[n] = static_cast<const bfloat16*>(k_rows[j + n]);
      const bfloat16* q_of_head = q;
      for (std::int64_t h = 0; h < heads; ++h) {
        const bfloat16* from = q_of_head;
        Vec acc[quads][at_once];
        HWY_UNROLL(2)
        for (int t = 0; t < quads; ++t) {
          HWY_UNROLL(4)
          for (int n = 0; n < at_once; ++n) acc[t][n] = set(0.0f);
        }
        const auto step = [&](std::int64_t c, std::int64_t left) TESSERA_INLINE_LAMBDA {
          Cells qc[quads];
          HWY_UNROLL(2)
          for (int t = 0; t < quads; ++t) qc[t] = load_cells(from + t * cell_step, cell_step);
          from += quads * cell_step;
          HWY_UNROLL(4)
          for (int n = 0; n < at_once; ++n) {
            const Cells kc = load_block(k[n] + c, left);
            HWY_UNROLL(2)
            for (int t = 0; t < quads; ++t) acc[t][n] = add_dots(acc[t][n], qc[t], kc);
          }
        };
        std::int64_t c = 0;
        for (std::int64_t i = 1; i <= pieces; ++i) {
          Called<Way> called(calls, at_once / pieces * head_bytes);
          const std::int64_t end = std::min(i * piece_columns, columns);
          for (; c + quad_step <= end; c += quad_step) {
            called.template call<1>();
            step(c, quad_step);
          }
        }
        if (c < columns) step(c, columns - c);
        HWY_UNROLL(2)
        for (int t = 0; t < quads; ++t) {
          block.keep_scores<QuadLayout>(fold_four(acc[t][0], acc[t][1], acc[t][2], acc[t][3]),
                                        (h * quads + t) * QuadLayout::rows, j);
        }
        q_of_head += q_head;
        for (const bfloat16*& row : k) row += k_head;
      }
    }
  }

 private:
  // Of `whole_lines` lines; 0: of as many as the dim has, the last of which may be a part of one.
  template <int rows, int whole_lines>
  HWY_NOINLINE void by_key_of(PackBlock& block, Calls<Way>& calls) const {
    const std::int64_t lines = whole_lines > 0 ? whole_lines : (dim + cell_step - 1) / cell_step;
    const __mmask32 last = cells_there(dim - (lines - 1) * cell_step);
    const std::int64_t head_count = heads, head_bytes = k_head * static_cast<std::int64_t>(sizeof(bfloat16));
    alignas(64) float sums[most_places * lanes] = {};  // of each row, to be summed further
    alignas(64) float even[2 * most_places];           // of an even key, likewise
    for (std::int64_t j = 0; j < keys + keys % 2; ++j) {
      Called<Way> called(calls, head_count * head_bytes);
      const auto* k = static_cast<const bfloat16*>(k_rows[j]);
      const bfloat16* q_line = q;
      float* to = sums;
      HWY_UNROLL(2)
      for (std::int64_t h = 0; h < head_count; ++h) {
        keep_address(k);
        for (const char*& line : called.at) keep_address(line);
        Vec acc[rows];
        for (Vec& sum : acc) sum = set(0.0f);
        const auto line = [&](__m512i cells) TESSERA_INLINE_LAMBDA {
          called.template call<1>();
          HWY_UNROLL(2)
          for (int r = 0; r < rows; ++r) acc[r] = add_dots(acc[r], q_line + r * cell_step, Cells{cells});
          q_line += rows * cell_step;
        };
        if constexpr (whole_lines > 0) {
          HWY_UNROLL(4)
          for (int l = 0; l < whole_lines; ++l) line(_mm512_loadu_si512(k + l * cell_step));
        } else {
          std::int64_t l = 0;
          for (; l + 1 < lines; ++l) line(_mm512_loadu_si512(k + l * cell_step));
          line(_mm512_maskz_loadu_epi16(last, k + l * cell_step));
        }
        HWY_UNROLL(2)
        for (int r = 0; r < rows; ++r) store(acc[r], to + r * lanes);
        to += rows * lanes;
        k += k_head;
        q_line += q_head - lines * rows * cell_step;
        called.skip(head_bytes - 64 * lines);
      }
      for (std::int64_t place = 0; place < head_count * rows; place += pack_rows) {
        const auto sum = [&](int r) TESSERA_INLINE_LAMBDA { return load(sums + (place + r) * lanes); };
        const Vec folded =
            fold_blocks(fold_four(sum(0), sum(1), sum(2), sum(3)), fold_four(sum(4), sum(5), sum(6), sum(7)));
        float* pack_even = even + 2 * place;
        if (j % 2 == 0) {
          store(folded, pack_even);
        } else {
          block.keep_scores<PackLayout>(fold_blocks(load(pack_even), folded), place, j - 1);
        }
      }
    }
  }
};

// o of all heads, `rows` rows of each, a few keys at a time. With each line that is read, one is called for
// in each of the calls.
template <class Way>
struct PackValues {
  PackBlock& block;
  std::int64_t heads, v_head, dim;
  float* o;  // [head][line of columns][row]

  template <int rows>
  HWY_NOINLINE void run(const void* const* v_rows, std::int64_t keys, Calls<Way>& calls) const {
    constexpr int at_once = Way::value_keys(rows);
    static_assert(col_unit % at_once == 0);  // what is weighed behind the last key is hidden
    if (keys == 0) return;
    for (std::int64_t h = 0; h < heads; ++h) weigh_head<rows, at_once>(h, 0);
    std::int64_t j = 0;
    for (; j + at_once <= keys; j += at_once) {
      const bool more = j + at_once < keys;
      add_keys<rows, at_once>(v_rows + j, j, calls, [&](std::int64_t h) TESSERA_INLINE_LAMBDA {
        if (more) weigh_head<rows, at_once>(h, j + at_once);
      });
    }
    const auto nothing = [](std::int64_t /*h*/) {};
    if constexpr (at_once > 2) {
      for (; j + 2 <= keys; j += 2) add_keys<rows, 2>(v_rows + j, j, calls, nothing);
    }
    if (j < keys) add_keys<rows, 1>(v_rows + j, j, calls, nothing);
  }

 private:
  template <int rows>
  using LayoutOf = std::conditional_t<in_quads(rows), QuadLayout, PackLayout>;

  // The weights of a head's quads, or of the pack that begins with it.
  template <int rows, int keys>
  HWY_INLINE void weigh_head(std::int64_t h, std::int64_t j) const {
    const std::int64_t place = h * pack_width(rows);
    if constexpr (in_quads(rows)) {
      HWY_UNROLL(2)
      for (int r = 0; r < rows; r += QuadLayout::rows) block.weigh<QuadLayout, keys>(place + r, j);
    } else {
      if (place % pack_rows == 0) block.weigh<PackLayout, keys>(place, j);
    }
  }

  // `between` is called once for each head, where its work has other work to hide behind.
  template <int rows, int keys, class Between>
  HWY_INLINE void add_keys(const void* const* v_rows, std::int64_t j, Calls<Way>& calls,
                           const Between& between) const {
    using Layout = LayoutOf<rows>;
    const std::int64_t columns = dim;
    const bfloat16* v[keys];
    for (int i = 0; i < keys; ++i) v[i] = static_cast<const bfloat16*>(v_rows[i]);
    float* HWY_RESTRICT to = o;
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t place = h * pack_width(rows), in_vector = place % Layout::rows;
      const bfloat16* p = block.weights(place - in_vector) + Layout::cell(in_vector, j);
      const auto take = [&](std::int64_t numbers) TESSERA_INLINE_LAMBDA {
        return Called<Way>(calls, keys * numbers * static_cast<std::int64_t>(sizeof(bfloat16)));
      };
      Called<Way> called = take(Way::values_by_line ? 0 : v_head);
      const auto add_line = [&](std::int64_t c, const auto& load_cells_of) TESSERA_INLINE_LAMBDA {
        if constexpr (Way::values_by_line) called = take(std::min(cell_step, columns - c));
        Vec acc[rows][2];
        HWY_UNROLL(8)
        for (int r = 0; r < rows; ++r) {
          acc[r][0] = load(to + r * cell_step);
          acc[r][1] = load(to + r * cell_step + lanes);
        }
        const auto add_pair = [&](int i) TESSERA_INLINE_LAMBDA {
          called.template call<(keys > 1 ? 2 : 1)>();
          const __m512i x = load_cells_of(v[i] + c);
          const __m512i y =
              i + 1 < keys ? load_cells_of(v[i + 1 < keys ? i + 1 : i] + c) : _mm512_setzero_si512();
          const Cells low{_mm512_unpacklo_epi16(x, y)}, high{_mm512_unpackhi_epi16(x, y)};
          HWY_UNROLL(8)
          for (int r = 0; r < rows; ++r) {
            constexpr std::int64_t next_vector = 2 * Layout::rows * col_align;
            std::uint32_t cell;
            std::memcpy(&cell, p + r / Layout::rows * next_vector + Layout::cell(r % Layout::rows, i),
                        sizeof(cell));
            const Cells pair = hn::Set(UintTag(), cell);
            acc[r][0] = add_dots(acc[r][0], pair, low);
            acc[r][1] = add_dots(acc[r][1], pair, high);
          }
        };
        // A loop of eight keys, not of 16: one piece of code for all of them reads slower (NOTES.md).
        if constexpr (keys > 8) {
          for (int first = 0; first < keys; first += 8) {
            HWY_UNROLL(4)
            for (int i = 0; i < 8; i += 2) add_pair(first + i);
          }
        } else {
          HWY_UNROLL(4)
          for (int i = 0; i < keys; i += 2) add_pair(i);
        }
        HWY_UNROLL(8)
        for (int r = 0; r < rows; ++r) {
          store(acc[r][0], to + r * cell_step);
          store(acc[r][1], to + r * cell_step + lanes);
        }
        to += rows * cell_step;
        if (c == 0) between(h);
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

  // In floats, of which each takes the room of two numbers.
  static constexpr std::int64_t q_rows(std::int64_t rows) { return (pack_width(rows) + 1) / 2; }
  static std::int64_t passes_of_scores(std::int64_t /*rows*/) { return 1; }
  static std::int64_t passes_of_values(std::int64_t /*rows*/) { return 1; }
  // q[piece of the dim][row]: pieces of a line in packs, of 16 bytes in quads. Rows that are not there are
  // zeros.
  static HWY_INLINE void load_queries(const TaskRows& task, const Few& few) {
    const std::int64_t depth = round_up(task.problem.head_dim, cell_step), width = pack_width(few.rows);
    alignas(64) float row[max_head_dim];
    alignas(64) bfloat16 halves[max_head_dim];
    for (std::int64_t r = 0; r < width; ++r) {
      if (r < few.rows) {
        load_query(task, r, row, depth);
      } else {
        zero_row(row, depth);
      }
      for (std::int64_t c = 0; c < depth; c += lanes) store_rounded(load(row + c), halves + c);
      const auto copy_by = [&](auto piece) {  // a constant: a memcpy whose size is not known is slow
        bfloat16* to = reinterpret_cast<bfloat16*>(few.q) + r * piece;
        for (std::int64_t c = 0; c < depth; c += piece)
          std::memcpy(to + c * width, halves + c, piece * sizeof(bfloat16));
      };
      if (in_quads(few.rows)) {
        copy_by(std::integral_constant<std::int64_t, quad_step>());
      } else {
        copy_by(std::integral_constant<std::int64_t, cell_step>());
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

class PackProducts::State : public BlockState<most_places> {
 public:
  explicit State(std::int64_t rows) : BlockState(rows, pack_width(rows)) {}

  // The block's rows, and those that are read after them.
  HWY_INLINE void start_block(const void* const* k_rows, const void* const* v_rows, std::int64_t keys,
                              std::int64_t dim, std::int64_t dim_v, std::int64_t heads,
                              const void* const* next_k, const void* const* next_v, std::int64_t next_keys) {
    BlockState::start_block(k_rows, v_rows, keys, dim, dim_v);
    const void** to = std::copy_n(v_rows, keys, std::copy_n(k_rows, keys, order_));
    to = std::copy_n(next_v, next_keys, std::copy_n(next_k, next_keys, to));
    std::fill(to, std::end(order_), to == order_ ? nullptr : to[-1]);
    row_bytes_[0] = heads * dim * static_cast<std::int64_t>(sizeof(bfloat16));
    row_bytes_[1] = heads * dim_v * static_cast<std::int64_t>(sizeof(bfloat16));
  }

  void scores(const Few& few, std::int64_t heads, std::int64_t k_head) {
    block_.s = few.s;
    std::fill_n(block_.most, std::size(block_.most), -infinity);
    in_way_of_cpu([&](auto way) HWY_ATTR { scores_in(way, few, heads, k_head); });
  }

  // task_of(h) has the rows of a head.
  template <class TaskOf>
  HWY_INLINE void softmax(const TaskOf& task_of, const Few& few, std::int64_t heads, Range rows,
                          std::int64_t key, Range cols) {
    if (in_quads(rows_)) return softmax_of<QuadLayout>(task_of, few, heads, rows, key, cols);
    softmax_of<PackLayout>(task_of, few, heads, rows, key, cols);
  }

  void values(const Few& few, std::int64_t heads, std::int64_t v_head) {
    in_way_of_cpu([&](auto way) HWY_ATTR { values_in(way, few, heads, v_head); });
    if (in_quads(rows_)) {
      add_sums<QuadLayout>(heads);
    } else {
      add_sums<PackLayout>(heads);
    }
  }

 private:
  static constexpr std::int64_t most_keys = col_align;  // of a block
  static constexpr std::int64_t most_ahead = 2 * most_keys;

  PackBlock block_;
  const void* order_[2 * most_keys + most_ahead] = {};  // k, v and those of the next block
  std::int64_t row_bytes_[2] = {};                      // of k and of v

  template <class Way>
  HWY_INLINE void scores_in(Way /*way*/, const Few& few, std::int64_t heads, std::int64_t k_head) {
    Calls<Way> calls;
    start_calls<Way>(calls, Way::k_lines, order_, 0);
    const PackScores<Way> to{reinterpret_cast<const bfloat16*>(few.q),
                             2 * q_rows(rows_) * few.q_ld,
                             heads,
                             k_head,
                             dim_,
                             k_rows_,
                             keys_};
    switch (width_) {
      case 1:
        return to.template by_key<1>(block_, calls);
      case 2:
        return to.template by_key<2>(block_, calls);
      case 4:
        return to.template by_quads<1>(block_, calls);
      default:
        return to.template by_quads<2>(block_, calls);
    }
  }

  template <class Way>
  HWY_INLINE void values_in(Way /*way*/, const Few& few, std::int64_t heads, std::int64_t v_head) {
    Calls<Way> calls;
    start_calls<Way>(calls, Way::v_lines, order_ + keys_, 1);
    const PackValues<Way> to{block_, heads, v_head, dim_v_, few.o};
    with_rows(rows_, [&](auto rows) HWY_ATTR { to.template run<rows>(v_rows_, keys_, calls); });
  }

  // Of rows[0], which is k's (side 0) or v's (1), and what follows it: as many rows of the other one at
  // least.
  template <class Way>
  HWY_INLINE void start_calls(Calls<Way>& calls, const std::int64_t (&lines)[Way::calls],
                              const void* const* rows, int side) const {
    const std::int64_t bytes = row_bytes_[side], other_bytes = row_bytes_[1 - side];
    for (int n = 0; n < Way::calls; ++n) {
      const std::int64_t ahead = std::min((64 * lines[n] + bytes - 1) / bytes, most_ahead);
      calls[n] = LinesAhead(rows + ahead, std::end(order_), keys_ - ahead, bytes, other_bytes);
    }
  }

  // How the scores become weights; o shrinks by what it makes of the maxima.
  template <class Layout, class TaskOf>
  HWY_NOINLINE void softmax_of(const TaskOf& task_of, const Few& few, std::int64_t heads, Range rows,
                               std::int64_t key, Range cols) {
    using Softmax = LaneSoftmax<Layout>;
    const TaskRows first = task_of(0);
    const bool plain = shows_all(first, rows, key, cols);
    Next none;
    for (std::int64_t begin = 0; begin < heads * width_; begin += Layout::rows) {
      const auto over_rows = [&](const auto& body) {
        for (std::int64_t i = 0; i < Layout::rows; ++i) {
          const std::int64_t h = (begin + i) / width_, r = (begin + i) % width_;
          if (h < heads && r < rows_) body(i, h, r);
        }
      };
      const std::int64_t at = PackBlock::at<Layout>(begin);
      float* s = block_.scores(begin);
      Vec scale = set(first.first.scale), largest = load(block_.most + at), shrink;
      if (!plain) {
        RowLanes of;
        over_rows([&](std::int64_t i, std::int64_t h, std::int64_t r) {
          of.set(i, task_of(h), rows.begin + r, key, cols);
        });
        Softmax::make_scores(first.first, of, 0, s, cols.end);
        scale = Layout::of_rows(of.exponent);
        largest = Softmax::largest_of(s, cols.end, none);
      }
      const auto weighing = Softmax::settle(largest, s, cols.end, scale, max_ + begin, shrink);
      store(weighing.scale, block_.scale + at);
      store(weighing.shift, block_.shift + at);
      store(shrink, block_.shrink + at);
      store(set(0.0f), block_.total + at);
      if (hn::AllTrue(FloatTag(), hn::Eq(shrink, set(1.0f)))) continue;
      alignas(64) float alpha[lanes];
      Layout::keep_rows(shrink, alpha);
      over_rows([&](std::int64_t i, std::int64_t h, std::int64_t r) HWY_ATTR {
        float* o = few.o + h * rows_ * few.o_ld + r * cell_step;
        for (std::int64_t c = 0; c < few.o_ld && alpha[i] != 1.0f; c += cell_step)
          scale_row(o + c * rows_, cell_step, alpha[i]);
      });
    }
  }

  template <class Layout>
  HWY_INLINE void add_sums(std::int64_t heads) {
    for (std::int64_t place = 0; place < heads * width_; place += Layout::rows) {
      const std::int64_t at = PackBlock::at<Layout>(place);
      LaneSoftmax<Layout>::add_to_sum(load(block_.total + at), load(block_.shrink + at), sum_ + place);
    }
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
