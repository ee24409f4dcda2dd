#include "cuda/launch/tensor_maps.h"

#include "cuda/driver/driver.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t unit = 16;                    // bytes that everything is a multiple of
constexpr std::int64_t far = std::int64_t{1} << 40;  // bytes that strides stay below

struct Dimensions {
  std::int64_t cols, rows, heads, batch;

  [[nodiscard]] bool nothing() const { return rows == 0 || heads == 0 || batch == 0; }
};
Dimensions queries_of(const Problem& problem, std::int64_t cols) {
  return {cols, problem.rows_q, problem.num_heads_q, problem.packed ? 1 : problem.batch};
}
Dimensions keys_of(const Problem& problem, std::int64_t cols) {
  return {cols, problem.rows_k, problem.num_heads_k, problem.packed ? 1 : problem.batch};
}

std::string why_not(const char* name, const View& view, const Dimensions& size) {
  const auto text = [&](const char* what, std::int64_t value, const char* expected) {
    return std::string(name) + what + std::to_string(value) + ", TMA wants " + expected;
  };
  if (size.nothing()) return "";
  if (view.dtype == DType::float32) return std::string(name) + " is float32, TMA copies 16-bit tiles";
  if (reinterpret_cast<std::uintptr_t>(view.data) % unit != 0)
    return std::string(name) + " does not begin at a multiple of 16 bytes, as TMA wants";
  if (size.cols % 8 != 0) return text(" has rows of ", size.cols, "a multiple of 8");
  const auto check = [&](const char* what, std::int64_t extent, std::int64_t stride) {
    const std::int64_t bytes = stride * size_of(view.dtype);
    if (extent <= 1 || (bytes > 0 && bytes % unit == 0 && bytes < far)) return std::string();
    return text(what, bytes, "multiples of 16 bytes above 0 and below 2^40");
  };
  std::string reason = check(" has a stride of its rows of ", size.rows, view.seq);
  if (reason.empty()) reason = check(" has a stride of its heads of ", size.heads, view.head);
  if (reason.empty()) reason = check(" has a stride of its batch of ", size.batch, view.batch);
  return reason;
}

Status encode(const View& view, Dimensions size, int box_cols, int box_rows, void* anywhere, TensorMap& map) {
  // Of a tensor without elements nothing is read, but it has to look like one.
  void* const data = size.nothing() ? anywhere : view.data;
  if (size.nothing()) size.rows = size.heads = size.batch = 1;
  // So has the stride of a dimension of one.
  const std::int64_t row = (size.cols * size_of(view.dtype) + unit - 1) / unit * unit;
  const auto stride = [&](std::int64_t extent, std::int64_t elements) {
    return extent == 1 ? row : elements * size_of(view.dtype);
  };
  return encode_tensor_map(
      {data,
       {size.cols, size.rows, size.heads, size.batch},
       {stride(size.rows, view.seq), stride(size.heads, view.head), stride(size.batch, view.batch)},
       box_cols,
       box_rows},
      map.bytes);
}

// Columns of a panel of a tile, as tile/panels.cuh has it.
int panel_width(int cols) { return cols % 64 == 0 ? 64 : 32; }

}  // namespace

std::string why_no_maps(const Problem& problem) {
  if (!has_tensor_maps()) return "the driver has no cuTensorMapEncodeTiled";
  std::string reason = why_not("q", problem.q, queries_of(problem, problem.head_dim));
  if (reason.empty()) reason = why_not("k", problem.k, keys_of(problem, problem.head_dim));
  if (reason.empty()) reason = why_not("v", problem.v, keys_of(problem, problem.head_dim_v));
  return reason;
}

std::string why_no_dout_map(const Problem& problem) {
  return why_not("dout", problem.dout, queries_of(problem, problem.head_dim_v));
}

Status fill_maps(const Sm90ForwardConfig& config, const Problem& problem, Sm90ForwardParams& params) {
  constexpr int group_rows = 64, warp_rows = 16;
  void* const anywhere = problem.q.data;
  const int width = panel_width(config.head_dim), width_v = panel_width(config.head_dim_v);
  const Dimensions queries = queries_of(problem, problem.head_dim), keys = keys_of(problem, problem.head_dim),
                   values = keys_of(problem, problem.head_dim_v),
                   outputs = queries_of(problem, problem.head_dim_v);
  const int q_rows = config.grouped ? params.order.head_rows : group_rows;
  if (Status status = encode(problem.q, queries, width, q_rows, anywhere, params.q); !status.ok())
    return status;
  if (Status status = encode(problem.k, keys, width, config.block_n, anywhere, params.k); !status.ok())
    return status;
  if (Status status = encode(problem.v, values, width_v, config.block_n, anywhere, params.v); !status.ok())
    return status;
  params.o_by_tma = why_not("o", problem.o, outputs).empty();
  return params.o_by_tma ? encode(problem.o, outputs, width_v, warp_rows, anywhere, params.o) : Status();
}

Status fill_maps(const Sm90BackwardConfig& config, const Problem& problem, Sm90BackwardParams& params) {
  void* const anywhere = problem.k.data;
  const int width = panel_width(config.head_dim), width_v = panel_width(config.head_dim_v);
  const Dimensions queries = queries_of(problem, problem.head_dim), keys = keys_of(problem, problem.head_dim),
                   values = keys_of(problem, problem.head_dim_v),
                   outputs = queries_of(problem, problem.head_dim_v);
  if (Status status = encode(problem.q, queries, width, config.block_m, anywhere, params.q); !status.ok())
    return status;
  if (Status status = encode(problem.k, keys, width, config.block_n, anywhere, params.k); !status.ok())
    return status;
  if (Status status = encode(problem.v, values, width_v, config.block_n, anywhere, params.v); !status.ok())
    return status;
  return encode(problem.dout, outputs, width_v, config.block_m, anywhere, params.dout);
}

}  // namespace tessera::cuda
