// One attention problem that can be printed and drawn at random: what `tessera verify`, the tests and the
// benchmarks share.
//
//   Case c;
//   c.dtype = DType::bfloat16;
//   c.causal = true;
//   judge(c);  // verify/judge.h; Tensors(c) are its memory, verify/tensors.h
//
// A Case is one line of key=value pairs (to_string, parse_case), and everything about it, data included,
// follows from that line.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::verify {

// How a tensor lies in memory. Tokens are (batch, seqlen, heads, dim) or packed (total, heads, dim); lse has
// heads before rows, and bias is (batch, heads, seqlen_q, seqlen_k).
enum class Layout : std::uint8_t {
  dense,  // compact
  bhsd,   // a transposed view: of (batch, heads, seqlen, dim); lse of (rows, heads), bias of (keys, queries)
  qkv,    // every third row of a buffer, as q, k and v of one packed tensor lie; lse: every third element
  expanded,    // stride 0: one batch entry (packed: one head) serves all, bias: one head. Inputs only
  garbage,     // compact, with senseless strides on dimensions of size 1
  misaligned,  // starts one element late, and rows are one element longer than needed
};

enum class BiasFill : std::uint8_t {
  normal,
  deep,    // normal - 120: every logit far below the range of exp
  hidden,  // some rows and some single elements are -inf
  lowest,  // the same places hold the lowest finite number
};

struct Case {
  DType dtype = DType::float32;
  DType o_dtype = DType::float32, grad_dtype = DType::float32;  // each: dtype or float32
  std::int64_t batch = 1, seqlen_q = 1, seqlen_k = 1;
  std::int64_t num_heads_q = 1, num_heads_k = 1, head_dim = 64, head_dim_v = 64;
  bool packed = false;    // lengths are drawn from 0..seqlen, the longest and the empty one among them
  std::int64_t tail = 0;  // packed: rows behind the last sequence, in q and k
  bool seqused_q = false, seqused_k = false;  // drawn from 0..length

  std::optional<double> softmax_scale;
  bool causal = false;
  std::optional<std::int64_t> window_left, window_right;
  Alignment alignment = Alignment::bottom_right;
  double softcap = 0.0;
  int alibi = 0;     // 0: none; 1: slopes of (num_heads_q); 2: of (batch, num_heads_q)
  std::string bias;  // "": none; else b, h, q, k with 1 where it is broadcast, as "1hqk", "b11k"
  BiasFill bias_fill = BiasFill::normal;
  DType bias_dtype = DType::float32, sinks_dtype = DType::float32;  // each: dtype or float32
  bool sinks = false;
  double dropout_p = 0.0;
  std::uint64_t offset = 0;
  bool lse = true;  // ask forward for it. Backward always gets one
  bool dlse = false, dbias = false, dsinks = false;
  bool deterministic = false;

  Layout q_layout = Layout::dense, k_layout = Layout::dense, v_layout = Layout::dense;
  Layout o_layout = Layout::dense, dout_layout = Layout::dense;
  Layout dq_layout = Layout::dense, dk_layout = Layout::dense, dv_layout = Layout::dense;
  Layout lse_layout = Layout::dense;  // of dlse too
  Layout bias_layout = Layout::dense, dbias_layout = Layout::dense;

  double magnitude = 1.0;  // of q
  double mean = 0.0;       // of k and v
  std::uint64_t seed = 0;  // of the data and of dropout
  std::string kernel;
  int threads = 0;

  friend bool operator==(const Case&, const Case&) = default;
};

// "dtype=bfloat16 batch=2 ...": what differs from Case{}, in one line. parse_case reads it back, and gives
// none where a key or a value is unknown.
[[nodiscard]] std::string to_string(const Case& c);
[[nodiscard]] std::optional<Case> parse_case(std::string_view line);

// Every option freely combined, at sizes that the oracle takes some milliseconds for.
[[nodiscard]] Case random_case(std::mt19937_64& random);

// The bug classes of the field, each by a name.
struct NamedCase {
  std::string name;
  Case c;
};
[[nodiscard]] std::vector<NamedCase> fixed_cases();

}  // namespace tessera::verify
