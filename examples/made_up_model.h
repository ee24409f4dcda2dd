// A language model of which there is attention alone: caches, and a table of random numbers that stands for
// all the rest. q, k and v of a step's tokens are a stretch of the table, which differs with step and layer.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tessera/tessera.hpp>
#include <vector>

#include "device.h"

namespace example {

struct ModelShape {
  std::string dtype = "bf16";
  std::int64_t layers = 4, heads = 32, heads_k = 8, head_dim = 128;
  std::int64_t pages = 1024, page_size = 16;
  unsigned seed = 1;
};

// The larger of two distances. NaN is the largest, and stays.
constexpr double worse(double a, double b) { return a != a || a >= b ? a : b; }
static_assert(worse(1, 2) == 2 && worse(2, 1) == 2);
static_assert(worse(1, std::numeric_limits<double>::quiet_NaN()) != 1);
static_assert(worse(std::numeric_limits<double>::quiet_NaN(), 1) != 1);

// Where in the table a token was.
struct Place {
  std::int64_t step, row;
};

inline std::uint16_t to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

class Model {
 public:
  // For steps of up to `rows` tokens.
  Model(const ModelShape& shape, std::int64_t rows, const Device& device)
      : shape_(shape),
        device_(device),
        dtype_(shape.dtype == "bf16" ? tessera::DType::bfloat16 : tessera::DType::float32),
        size_(dtype_ == tessera::DType::bfloat16 ? 2 : 4),
        rows_(rows),
        q_(numbers(shape.heads, 1)),
        k_(numbers(shape.heads_k, 2)),
        v_(numbers(shape.heads_k, 3)),
        q_table_(on_device(q_)),
        k_table_(on_device(k_)),
        v_table_(on_device(v_)),
        o_(device, static_cast<std::size_t>(rows_ * shape.heads * shape.head_dim * 4)) {
    const std::int64_t slots = shape.pages * shape.page_size;
    for (std::int64_t i = 0; i < 2 * shape.layers; ++i)
      caches_.emplace_back(device, static_cast<std::size_t>(slots * shape.heads_k * shape.head_dim * size_));
  }

  // A layer's tensors of a step of `rows` tokens. What the call has besides is the batch's.
  void fill(tessera::Decode& call, std::int64_t step, std::int64_t layer, std::int64_t rows) const {
    call.q = rows_of(q_table_, shape_.heads, step, layer, rows);
    call.k_new = rows_of(k_table_, shape_.heads_k, step, layer, rows);
    call.v_new = rows_of(v_table_, shape_.heads_k, step, layer, rows);
    call.k_cache = cache(2 * layer);
    call.v_cache = cache(2 * layer + 1);
    call.o = tessera::Tensor(o_.data(), tessera::DType::float32, {rows, shape_.heads, shape_.head_dim});
    call.o.device = device_.place();
  }

  // The largest distance of the last token's output, in row `row` of the step's, from attention to all
  // tokens that is computed here. For each key head's first query head.
  [[nodiscard]] double error(const std::vector<Place>& tokens, std::int64_t layer, std::int64_t row) const {
    const std::int64_t dim = shape_.head_dim, group = shape_.heads / shape_.heads_k;
    std::vector<float> o(static_cast<std::size_t>(shape_.heads * dim));
    device_.download(o.data(), o_.at(static_cast<std::size_t>(row) * o.size() * 4), o.size() * 4);
    double worst = 0;
    for (std::int64_t h = 0; h < shape_.heads_k; ++h) {
      std::vector<double> p, sum(static_cast<std::size_t>(dim));
      double denominator = 0;
      for (const Place& place : tokens) {
        double s = 0;
        for (std::int64_t c = 0; c < dim; ++c)
          s += number(q_, shape_.heads, tokens.back(), layer, h * group, c) *
               number(k_, shape_.heads_k, place, layer, h, c);
        p.push_back(std::exp(s / std::sqrt(static_cast<double>(dim))));  // scores are far below 700
        denominator += p.back();
      }
      for (std::size_t j = 0; j < p.size(); ++j) {
        for (std::int64_t c = 0; c < dim; ++c)
          sum[static_cast<std::size_t>(c)] +=
              p[j] / denominator * number(v_, shape_.heads_k, tokens[j], layer, h, c);
      }
      for (std::int64_t c = 0; c < dim; ++c) {
        const auto at = static_cast<std::size_t>(h * group * dim + c);
        worst = worse(worst, std::fabs(o[at] - sum[static_cast<std::size_t>(c)]));
      }
    }
    return worst;
  }

  // Bytes that a step reads and writes, every number once: of a token in the cache, and of a new one.
  [[nodiscard]] double bytes_of_key() const {
    return static_cast<double>(2 * shape_.layers * shape_.heads_k * shape_.head_dim * size_);
  }
  [[nodiscard]] double bytes_of_row() const {
    return static_cast<double>(shape_.layers * shape_.heads * shape_.head_dim * (size_ + 4)) +
           2 * bytes_of_key();
  }

  [[nodiscard]] const std::vector<Buffer>& caches() const { return caches_; }

 private:
  static constexpr std::int64_t spare = 1021;  // where a stretch may begin: a prime

  static std::int64_t first_row(std::int64_t step, std::int64_t layer) {
    return (step * 31 + layer * 101) % spare;
  }

  [[nodiscard]] std::vector<float> numbers(std::int64_t heads, unsigned seed) const {
    std::mt19937 engine(shape_.seed * 3 + seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>((rows_ + spare) * heads * shape_.head_dim));
    for (float& value : values)
      value = size_ == 2 ? from_bfloat16(to_bfloat16(normal(engine))) : normal(engine);
    return values;
  }
  [[nodiscard]] Buffer on_device(const std::vector<float>& values) const {
    Buffer table(device_, values.size() * static_cast<std::size_t>(size_));
    if (size_ == 4) {
      device_.upload(table.data(), values.data(), table.bytes());
    } else {
      std::vector<std::uint16_t> bits(values.size());
      std::transform(values.begin(), values.end(), bits.begin(), to_bfloat16);
      device_.upload(table.data(), bits.data(), table.bytes());
      device_.wait();
    }
    return table;
  }
  [[nodiscard]] tessera::Tensor rows_of(const Buffer& table, std::int64_t heads, std::int64_t step,
                                        std::int64_t layer, std::int64_t rows) const {
    const std::int64_t first = first_row(step, layer) * heads * shape_.head_dim * size_;
    tessera::Tensor tensor(table.at(static_cast<std::size_t>(first)), dtype_, {rows, heads, shape_.head_dim});
    tensor.device = device_.place();
    return tensor;
  }
  [[nodiscard]] tessera::Tensor cache(std::int64_t index) const {
    tessera::Tensor tensor(caches_[static_cast<std::size_t>(index)].data(), dtype_,
                           {shape_.pages, shape_.page_size, shape_.heads_k, shape_.head_dim});
    tensor.device = device_.place();
    return tensor;
  }
  [[nodiscard]] double number(const std::vector<float>& table, std::int64_t heads, Place place,
                              std::int64_t layer, std::int64_t h, std::int64_t c) const {
    const std::int64_t row = first_row(place.step, layer) + place.row;
    return table[static_cast<std::size_t>((row * heads + h) * shape_.head_dim + c)];
  }

  ModelShape shape_;
  const Device& device_;
  tessera::DType dtype_;
  std::int64_t size_, rows_;
  std::vector<float> q_, k_, v_;  // the table; in the model's dtype on the device:
  Buffer q_table_, k_table_, v_table_, o_;
  std::vector<Buffer> caches_;  // of each layer k, then v
};

}  // namespace example
