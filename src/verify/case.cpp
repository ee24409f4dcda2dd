#include "verify/case.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>
#include <type_traits>

#include "core/philox.h"

namespace tessera::verify {
namespace {

using Index = std::int64_t;

// ---- Text. One list of fields serves printing and parsing.

template <class Visitor>
void visit_fields(Case& c, Visitor&& visit) {
  visit("dtype", c.dtype);
  visit("o_dtype", c.o_dtype);
  visit("grad_dtype", c.grad_dtype);
  visit("batch", c.batch);
  visit("seqlen_q", c.seqlen_q);
  visit("seqlen_k", c.seqlen_k);
  visit("num_heads_q", c.num_heads_q);
  visit("num_heads_k", c.num_heads_k);
  visit("head_dim", c.head_dim);
  visit("head_dim_v", c.head_dim_v);
  visit("packed", c.packed);
  visit("tail", c.tail);
  visit("seqused_q", c.seqused_q);
  visit("seqused_k", c.seqused_k);
  visit("softmax_scale", c.softmax_scale);
  visit("causal", c.causal);
  visit("window_left", c.window_left);
  visit("window_right", c.window_right);
  visit("alignment", c.alignment);
  visit("softcap", c.softcap);
  visit("alibi", c.alibi);
  visit("bias", c.bias);
  visit("bias_fill", c.bias_fill);
  visit("bias_dtype", c.bias_dtype);
  visit("sinks_dtype", c.sinks_dtype);
  visit("sinks", c.sinks);
  visit("dropout_p", c.dropout_p);
  visit("offset", c.offset);
  visit("lse", c.lse);
  visit("dlse", c.dlse);
  visit("dbias", c.dbias);
  visit("dsinks", c.dsinks);
  visit("deterministic", c.deterministic);
  visit("q_layout", c.q_layout);
  visit("k_layout", c.k_layout);
  visit("v_layout", c.v_layout);
  visit("o_layout", c.o_layout);
  visit("dout_layout", c.dout_layout);
  visit("dq_layout", c.dq_layout);
  visit("dk_layout", c.dk_layout);
  visit("dv_layout", c.dv_layout);
  visit("lse_layout", c.lse_layout);
  visit("bias_layout", c.bias_layout);
  visit("dbias_layout", c.dbias_layout);
  visit("magnitude", c.magnitude);
  visit("mean", c.mean);
  visit("seed", c.seed);
  visit("kernel", c.kernel);
  visit("threads", c.threads);
}

template <class Enum>
struct Names;
template <>
struct Names<DType> {
  static constexpr std::array names{"float32", "float16", "bfloat16", "int32"};
};
template <>
struct Names<Alignment> {
  static constexpr std::array names{"bottom_right", "top_left"};
};
template <>
struct Names<Layout> {
  static constexpr std::array names{"dense", "bhsd", "qkv", "expanded", "garbage", "misaligned"};
};
template <>
struct Names<BiasFill> {
  static constexpr std::array names{"normal", "deep", "hidden", "lowest"};
};

template <class T>
std::string text_of(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return Names<T>::names[static_cast<std::size_t>(value)];
  } else {
    std::array<char, 32> text{};
    const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
    return {text.data(), end};
  }
}
std::string text_of(const std::string& value) { return value; }
std::string text_of(bool value) { return value ? "1" : "0"; }
template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : "none";
}

template <class T>
bool read_text(std::string_view text, T& value) {
  if constexpr (std::is_enum_v<T>) {
    const auto& names = Names<T>::names;
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end()) return false;
    value = static_cast<T>(found - names.begin());
    return true;
  } else {
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc() && result.ptr == text.data() + text.size();
  }
}
bool read_text(std::string_view text, std::string& value) {
  value = text;
  return true;
}
bool read_text(std::string_view text, bool& value) {
  value = text == "1";
  return text == "0" || text == "1";
}
template <class T>
bool read_text(std::string_view text, std::optional<T>& value) {
  value.reset();
  return text == "none" || read_text(text, value.emplace());
}

bool read_field(Case& c, std::string_view key, std::string_view text) {
  bool read = false;
  visit_fields(c, [&](const char* name, auto& field) {
    if (key == name) read = read_text(text, field);
  });
  return read;
}

}  // namespace

std::string to_string(const Case& c) {
  Case defaults, mine = c;
  std::vector<std::string> default_texts;
  visit_fields(defaults, [&](const char*, auto& field) { default_texts.push_back(text_of(field)); });
  std::string line;
  std::size_t at = 0;
  visit_fields(mine, [&](const char* name, auto& field) {
    const std::string text = text_of(field);
    if (text == default_texts[at++]) return;
    line += (line.empty() ? "" : " ") + std::string(name) + "=" + text;
  });
  return line;
}

std::optional<Case> parse_case(std::string_view line) {
  Case c;
  while (!line.empty()) {
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string_view word = line.substr(0, space);
    line.remove_prefix(std::min(space + 1, line.size()));
    if (word.empty()) continue;
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos) return std::nullopt;
    if (!read_field(c, word.substr(0, equals), word.substr(equals + 1))) return std::nullopt;
  }
  const bool bias_valid =
      c.bias.empty() || (c.bias.size() == 4 && (c.bias[0] == 'b' || c.bias[0] == '1') &&
                         (c.bias[1] == 'h' || c.bias[1] == '1') && (c.bias[2] == 'q' || c.bias[2] == '1') &&
                         (c.bias[3] == 'k' || c.bias[3] == '1'));
  if (!bias_valid) return std::nullopt;
  return c;
}

// ---- Fixed cases.

std::vector<NamedCase> fixed_cases() {
  // One line a case: a name, a colon and what parse_case reads. Long ones go on without a comma.
  // NOLINTBEGIN(bugprone-suspicious-missing-comma)
  static constexpr std::string_view lines[] = {
      "empty_batch: batch=0 seqlen_q=5 seqlen_k=5",
      "empty_q: batch=2 seqlen_q=0 seqlen_k=7 num_heads_q=2 bias=bhqk dbias=1 sinks=1 dsinks=1",
      "empty_q_deterministic: batch=2 seqlen_q=0 seqlen_k=8 num_heads_q=3 num_heads_k=3 deterministic=1",
      "empty_k: batch=2 seqlen_q=7 seqlen_k=0 num_heads_q=2 bias=bhqk dbias=1",
      "empty_k_sinks: batch=2 seqlen_q=7 seqlen_k=0 num_heads_q=2 sinks=1 dsinks=1 dlse=1",
      "empty_packed_batch: packed=1 batch=0 tail=0",
      "empty_packed_batch_with_tail: packed=1 batch=0 tail=3",
      "empty_packed_total: packed=1 batch=3 seqlen_q=0 seqlen_k=0",
      "empty_packed_entries: packed=1 batch=9 seqlen_q=1 seqlen_k=3 num_heads_q=2 tail=2 causal=1",
      "empty_packed_queries: packed=1 batch=3 seqlen_q=0 seqlen_k=20",
      "empty_packed_keys: packed=1 batch=3 seqlen_q=20 seqlen_k=0 sinks=1 dsinks=1 dlse=1",
      "empty_seqused: batch=5 seqlen_q=17 seqlen_k=19 seqused_q=1 seqused_k=1 dlse=1 bias=bhqk dbias=1",

      "tiny: head_dim=1 head_dim_v=1",
      "tiny_bfloat16: dtype=bfloat16 o_dtype=bfloat16 grad_dtype=bfloat16 head_dim=8 head_dim_v=8",
      "tall_causal: seqlen_q=76 seqlen_k=1 causal=1 num_heads_q=2",
      "tall_causal_top_left: seqlen_q=76 seqlen_k=1 causal=1 alignment=top_left",
      "wide_causal: seqlen_q=3 seqlen_k=200 causal=1",
      "wide_causal_top_left: seqlen_q=3 seqlen_k=200 causal=1 alignment=top_left",
      "one_query_masked: batch=3 seqlen_q=1 seqlen_k=129 causal=1 window_left=20 seqused_k=1 bias=b11k "
      "dbias=1",
      "one_key: batch=2 seqlen_q=65 seqlen_k=1 sinks=1 dsinks=1",

      "length_97: seqlen_q=97 seqlen_k=97 causal=1 head_dim=40 head_dim_v=40",
      "length_113: seqlen_q=113 seqlen_k=203 causal=1 head_dim=40 head_dim_v=40",
      "length_129: seqlen_q=129 seqlen_k=129 head_dim=72 head_dim_v=72",
      "length_192: seqlen_q=192 seqlen_k=192 head_dim=32 head_dim_v=32 bias=11qk dbias=1",
      "length_238: seqlen_q=238 seqlen_k=257 causal=1 head_dim=32 head_dim_v=32",
      "length_1025: seqlen_q=65 seqlen_k=1025 causal=1 head_dim=24 head_dim_v=24",
      "length_512: seqlen_q=256 seqlen_k=512 head_dim=16 head_dim_v=16",

      "qkv_192_128: seqlen_q=70 seqlen_k=90 head_dim=192 head_dim_v=128 causal=1 dtype=bfloat16",
      "value_wider: seqlen_q=33 seqlen_k=40 head_dim=7 head_dim_v=256 dtype=float16",
      "head_dim_above_128_groups: seqlen_q=150 seqlen_k=200 num_heads_q=4 num_heads_k=2 head_dim=256 "
      "head_dim_v=256 "
      "causal=1 dlse=1 dtype=bfloat16 grad_dtype=bfloat16",
      "head_dim_above_128_ordered: seqlen_q=130 seqlen_k=270 head_dim=200 head_dim_v=200 deterministic=1 "
      "dtype=bfloat16",
      "head_dim_above_128_packed: packed=1 batch=4 tail=5 seqlen_q=150 seqlen_k=140 num_heads_q=2 "
      "head_dim=192 "
      "head_dim_v=128 seqused_q=1 seqused_k=1 causal=1 deterministic=1 dtype=float16",
      "head_dim_above_128_terms: seqlen_q=100 seqlen_k=140 num_heads_q=2 num_heads_k=1 head_dim=160 "
      "head_dim_v=136 "
      "window_left=90 softcap=20 alibi=1 bias=1hqk sinks=1 dsinks=1 dropout_p=0.2 dtype=float16",
      "value_narrower: seqlen_q=33 seqlen_k=40 head_dim=256 head_dim_v=1",
      // Of a wide o some columns leave at a time.
      "value_248: batch=3 seqlen_q=200 seqlen_k=150 num_heads_q=4 num_heads_k=2 head_dim=64 head_dim_v=248 "
      "causal=1 dtype=bfloat16",
      "value_256_wide_o: batch=2 seqlen_q=140 seqlen_k=200 num_heads_q=4 num_heads_k=4 head_dim=256 "
      "head_dim_v=256 causal=1 dtype=bfloat16 o_dtype=float32",
      "value_256_packed: packed=1 batch=9 tail=5 seqlen_q=90 seqlen_k=70 num_heads_q=4 num_heads_k=2 "
      "head_dim=256 head_dim_v=256 causal=1 dtype=float16",

      "magnitude_3: seqlen_q=100 seqlen_k=100 magnitude=3 causal=1 dtype=bfloat16",
      "packed_127: packed=1 batch=127 tail=9 seqlen_q=20 seqlen_k=30 num_heads_q=2 dtype=bfloat16 causal=1",
      "packed_128: packed=1 batch=128 seqlen_q=20 seqlen_k=30 num_heads_q=2 dtype=float16",
      "packed_many: packed=1 batch=140 tail=5 seqlen_q=12 seqlen_k=9 num_heads_q=3 dtype=bfloat16 causal=1",

      // As many blocks of keys as a GPU has multiprocessors, and several of them to add to each query.
      "length_many_blocks: batch=3 seqlen_q=300 seqlen_k=300 num_heads_q=16 num_heads_k=16 head_dim=8 "
      "head_dim_v=8 causal=1 dtype=bfloat16 o_dtype=bfloat16 grad_dtype=bfloat16",

      // A few queries of heads that share a key head, more of them than a GPU has multiprocessors.
      "group_5: batch=14 seqlen_q=5 seqlen_k=70 num_heads_q=10 num_heads_k=2 head_dim=64 head_dim_v=64 "
      "causal=1 dtype=bfloat16",
      "group_16: batch=4 seqlen_q=16 seqlen_k=33 num_heads_q=40 num_heads_k=2 head_dim=96 head_dim_v=96 "
      "dtype=float16",
      "group_20: batch=10 seqlen_q=20 seqlen_k=70 num_heads_q=14 num_heads_k=2 head_dim=128 head_dim_v=128 "
      "window_left=30 sinks=1 dtype=float16",
      "group_64: batch=9 seqlen_q=64 seqlen_k=130 num_heads_q=16 num_heads_k=2 head_dim=8 head_dim_v=8 "
      "seqused_k=1 causal=1 dtype=bfloat16 q_layout=bhsd",
      "group_3_head_dim_256: batch=17 seqlen_q=3 seqlen_k=20 num_heads_q=8 num_heads_k=2 head_dim=256 "
      "head_dim_v=256 dtype=bfloat16",
      "group_40_192_128: batch=23 seqlen_q=40 seqlen_k=50 num_heads_q=6 num_heads_k=1 head_dim=192 "
      "head_dim_v=128 causal=1 dtype=float16",
      "group_tall: batch=24 seqlen_q=40 seqlen_k=10 num_heads_q=6 num_heads_k=2 head_dim=64 head_dim_v=64 "
      "causal=1 sinks=1 dtype=bfloat16",
      "group_window: batch=24 seqlen_q=33 seqlen_k=90 num_heads_q=6 num_heads_k=2 head_dim=128 "
      "head_dim_v=128 window_left=20 window_right=5 dtype=float16",
      "group_top_left: batch=24 seqlen_q=30 seqlen_k=50 num_heads_q=6 num_heads_k=2 head_dim=128 "
      "head_dim_v=128 causal=1 alignment=top_left dtype=bfloat16",
      "group_no_keys: batch=24 seqlen_q=7 seqlen_k=0 num_heads_q=6 num_heads_k=2 head_dim=256 head_dim_v=256 "
      "sinks=1 dtype=bfloat16",
      "group_9_head_dim_192: batch=23 seqlen_q=9 seqlen_k=30 num_heads_q=6 num_heads_k=1 head_dim=192 "
      "head_dim_v=192 causal=1 dtype=bfloat16 o_dtype=float32",

      // What the rows of k and v have in common cancels in dq and dk, and roundings of o do not.
      "mean_1: seqlen_q=256 seqlen_k=256 mean=1 num_heads_q=2 dtype=bfloat16 o_dtype=bfloat16 "
      "grad_dtype=bfloat16",
      "mean_3_causal: seqlen_q=200 seqlen_k=256 mean=3 num_heads_q=4 num_heads_k=2 causal=1 dtype=bfloat16 "
      "o_dtype=bfloat16 grad_dtype=bfloat16 head_dim=128 head_dim_v=128",
      "mean_10: seqlen_q=130 seqlen_k=300 mean=10 dtype=float16 o_dtype=float16 grad_dtype=float16 "
      "head_dim=256 head_dim_v=256 deterministic=1",
      "mean_10_wide: seqlen_q=256 seqlen_k=256 mean=10 dtype=bfloat16 grad_dtype=bfloat16",
      "mean_30: seqlen_q=140 seqlen_k=260 mean=-30 sinks=1 dsinks=1 dlse=1",

      // Scores that outgrow what came before by powers of two that a float does not have.
      "magnitude_4: num_heads_q=2 seqlen_q=300 seqlen_k=300 magnitude=4 dtype=float16 causal=1 sinks=1",
      "magnitude_8: num_heads_q=2 seqlen_q=300 seqlen_k=300 magnitude=8 dtype=bfloat16 head_dim=128 "
      "head_dim_v=128 window_left=150 window_right=0",
      "magnitude_20: num_heads_q=2 seqlen_q=150 seqlen_k=600 magnitude=20 dtype=bfloat16 causal=1",
      "magnitude_60: seqlen_q=150 seqlen_k=600 magnitude=60 dtype=bfloat16 head_dim=128 head_dim_v=128 "
      "window_left=300",
      "magnitude_200: seqlen_q=150 seqlen_k=700 magnitude=200 dtype=float16 head_dim=256 head_dim_v=256",
      "magnitude_20_alibi: seqlen_q=150 seqlen_k=700 magnitude=20 dtype=float16 alibi=1 sinks=1 dsinks=1 "
      "dropout_p=0.1",
      "magnitude_60_rows: seqlen_q=700 seqlen_k=700 num_heads_q=4 magnitude=60 dtype=bfloat16 dlse=1",
      // A dbias of few and large probabilities, which nothing rounds: their own error shows.
      "magnitude_dbias: batch=3 seqlen_q=153 seqlen_k=3 num_heads_q=9 bias=11q1 dropout_p=1 dlse=1 dbias=1 "
      "dtype=bfloat16",
      "magnitude_deep: seqlen_q=60 seqlen_k=60 bias=11qk bias_fill=deep dbias=1",
      "magnitude_deep_causal: seqlen_q=50 seqlen_k=60 bias=1h1k num_heads_q=2 bias_fill=deep dbias=1 "
      "causal=1",
      "magnitude_softcap: seqlen_q=60 seqlen_k=60 magnitude=5000 softcap=30",
      "magnitude_softcap_float16: seqlen_q=60 seqlen_k=60 magnitude=5000 softcap=30 dtype=float16 causal=1",
      "magnitude_hidden_rows: batch=2 seqlen_q=60 seqlen_k=60 bias=bhqk bias_fill=hidden dbias=1 dlse=1",
      "magnitude_hidden_rows_sinks: seqlen_q=60 seqlen_k=60 bias=bhqk bias_fill=hidden sinks=1 dsinks=1 "
      "dlse=1",
      "magnitude_hidden_rows_float16: batch=2 seqlen_q=60 seqlen_k=60 dtype=float16 bias=b1qk "
      "bias_fill=hidden "
      "bias_dtype=float16 dbias=1",
      "magnitude_hidden_rows_bfloat16: batch=2 seqlen_q=60 seqlen_k=60 dtype=bfloat16 bias=b1qk "
      "bias_fill=hidden "
      "bias_dtype=bfloat16 dbias=1",
      "magnitude_lowest: batch=2 seqlen_q=60 seqlen_k=60 bias=b1qk bias_fill=lowest dbias=1",
      "magnitude_lowest_float16: seqlen_q=60 seqlen_k=60 bias=b1qk bias_fill=lowest dbias=1 dtype=float16 "
      "bias_dtype=float16 causal=1",

      "softcap_low: seqlen_q=150 seqlen_k=200 num_heads_q=2 magnitude=3 softcap=50 dtype=bfloat16 causal=1 "
      "head_dim=128 head_dim_v=128",
      "softcap_sometimes_high: seqlen_q=150 seqlen_k=200 num_heads_q=2 magnitude=6 softcap=50 dtype=float16 "
      "window_left=90",
      "softcap_outgrown: seqlen_q=150 seqlen_k=512 num_heads_q=2 magnitude=6 softcap=50 dtype=bfloat16 "
      "head_dim=64 head_dim_v=64",
      "softcap_many_keys: seqlen_q=300 seqlen_k=900 num_heads_q=2 softcap=30 dtype=bfloat16 causal=1 "
      "head_dim=128 head_dim_v=128",
      "softcap_many_keys_rising: seqlen_q=600 seqlen_k=700 magnitude=3 softcap=30 dtype=float16 causal=1 "
      "window_left=400",
      "softcap_large: seqlen_q=70 seqlen_k=90 softcap=1000000 dtype=float16",
      "softcap_dropout: seqlen_q=100 seqlen_k=130 magnitude=3 softcap=30 dropout_p=0.2 dtype=bfloat16 "
      "head_dim=128 head_dim_v=128",

      "bias_tiles_bfloat16: batch=2 num_heads_q=2 seqlen_q=150 seqlen_k=200 head_dim=128 head_dim_v=128 "
      "bias=bhqk bias_dtype=bfloat16 dbias=1 dtype=bfloat16 causal=1",
      "bias_tiles_float32: seqlen_q=150 seqlen_k=204 head_dim=128 head_dim_v=128 bias=bhqk dbias=1 "
      "dtype=bfloat16",
      "bias_tiles_odd: seqlen_q=150 seqlen_k=203 bias=bhqk bias_dtype=float16 dtype=float16 causal=1",
      "bias_tiles_dropout: seqlen_q=150 seqlen_k=200 head_dim=128 head_dim_v=128 bias=bhqk "
      "bias_dtype=bfloat16 dtype=bfloat16 dropout_p=0.3 alibi=1",
      "bias_of_keys: batch=2 seqlen_q=150 seqlen_k=200 bias=b11k bias_dtype=bfloat16 dbias=1 dtype=bfloat16",

      "poison_seqused: batch=4 seqlen_q=50 seqlen_k=70 seqused_q=1 seqused_k=1 num_heads_q=4 num_heads_k=2",
      "poison_tail: packed=1 batch=4 seqlen_q=50 seqlen_k=70 tail=17 seqused_q=1 seqused_k=1 dlse=1",
      "poison_bias: batch=3 seqlen_q=30 seqlen_k=40 seqused_q=1 seqused_k=1 bias=bhqk dbias=1 causal=1",

      "strides_bhsd: batch=2 seqlen_q=40 seqlen_k=50 num_heads_q=4 num_heads_k=2 q_layout=bhsd k_layout=bhsd "
      "v_layout=bhsd o_layout=bhsd dout_layout=bhsd dq_layout=bhsd dk_layout=bhsd dv_layout=bhsd "
      "lse_layout=bhsd",
      "strides_qkv: batch=2 seqlen_q=50 seqlen_k=50 num_heads_q=3 num_heads_k=3 q_layout=qkv k_layout=qkv "
      "v_layout=qkv dq_layout=qkv dk_layout=qkv dv_layout=qkv lse_layout=qkv",
      "strides_k_differs_from_v: batch=2 seqlen_q=40 seqlen_k=50 num_heads_q=4 num_heads_k=2 k_layout=bhsd "
      "v_layout=qkv dk_layout=misaligned dv_layout=bhsd dtype=float16",
      "strides_transposed_dout: batch=2 seqlen_q=40 seqlen_k=50 num_heads_q=2 dout_layout=bhsd",
      "strides_expanded: batch=3 seqlen_q=40 seqlen_k=50 num_heads_q=2 q_layout=expanded k_layout=expanded "
      "v_layout=expanded dout_layout=expanded bias=bhqk bias_layout=expanded dbias=1",
      "strides_misaligned: batch=2 seqlen_q=40 seqlen_k=50 num_heads_q=2 q_layout=misaligned "
      "k_layout=misaligned "
      "v_layout=misaligned o_layout=misaligned dout_layout=misaligned dq_layout=misaligned "
      "dk_layout=misaligned "
      "dv_layout=misaligned lse_layout=misaligned bias=bhqk bias_layout=misaligned dbias=1 "
      "dbias_layout=misaligned",
      "strides_misaligned_bfloat16: batch=2 seqlen_q=40 seqlen_k=50 dtype=bfloat16 q_layout=misaligned "
      "k_layout=misaligned v_layout=misaligned dout_layout=misaligned head_dim=33 head_dim_v=31",
      "strides_garbage: q_layout=garbage k_layout=garbage v_layout=garbage o_layout=garbage "
      "dout_layout=garbage "
      "dq_layout=garbage dk_layout=garbage dv_layout=garbage lse_layout=garbage bias=1111 "
      "bias_layout=garbage "
      "dbias=1 dbias_layout=garbage dlse=1 head_dim=1 head_dim_v=1",
      "strides_garbage_heads: batch=1 seqlen_q=40 seqlen_k=30 q_layout=garbage k_layout=garbage "
      "v_layout=garbage "
      "o_layout=garbage dout_layout=garbage dq_layout=garbage dk_layout=garbage dv_layout=garbage",
      "strides_bias_transposed: batch=2 seqlen_q=40 seqlen_k=30 bias=b1qk bias_layout=bhsd dbias=1 "
      "dbias_layout=bhsd",

      "window_all_but_one: seqlen_q=60 seqlen_k=60 window_left=59 window_right=0",
      "window_all: seqlen_q=60 seqlen_k=60 window_left=60 window_right=0",
      "window_beyond: seqlen_q=60 seqlen_k=60 window_left=1000 window_right=77",
      "window_right_only: seqlen_q=60 seqlen_k=90 window_right=0",
      "window_left_only: seqlen_q=60 seqlen_k=90 window_left=5",
      "window_self: seqlen_q=60 seqlen_k=60 window_left=0 window_right=0",
      "window_self_rectangular: seqlen_q=90 seqlen_k=60 window_left=0 window_right=0 dlse=1",
      "window_top_left: seqlen_q=60 seqlen_k=90 window_left=3 window_right=2 alignment=top_left",
      "window_huge: seqlen_q=20 seqlen_k=20 window_left=9223372036854775807 window_right=9223372036854775807",
      "window_skips_keys: seqlen_q=10 seqlen_k=300 window_left=7 causal=1",

      "dropout_rare: seqlen_q=80 seqlen_k=90 dropout_p=0.001 seed=3",
      "dropout_tenth: batch=2 num_heads_q=4 num_heads_k=2 seqlen_q=80 seqlen_k=90 dropout_p=0.1 seed=3 "
      "causal=1",
      "dropout_half_offset: seqlen_q=80 seqlen_k=90 dropout_p=0.5 offset=68719476735 dtype=bfloat16 dlse=1",
      "dropout_rising: seqlen_q=200 seqlen_k=700 magnitude=20 dropout_p=0.2 dtype=bfloat16 causal=1",
      "dropout_all: seqlen_q=30 seqlen_k=30 dropout_p=1 dlse=1 bias=11qk dbias=1",
      "dropout_packed: packed=1 batch=4 seqlen_q=40 seqlen_k=60 dropout_p=0.3 num_heads_q=2 softcap=10",

      "everything: dtype=bfloat16 o_dtype=bfloat16 grad_dtype=bfloat16 batch=3 seqlen_q=60 seqlen_k=70 "
      "num_heads_q=4 num_heads_k=2 head_dim=48 head_dim_v=40 seqused_q=1 seqused_k=1 causal=1 window_left=30 "
      "softcap=20 alibi=2 bias=bhqk dbias=1 sinks=1 dsinks=1 dropout_p=0.2 dlse=1",
      "everything_packed: batch=4 packed=1 tail=5 seqlen_q=60 seqlen_k=70 num_heads_q=6 num_heads_k=2 "
      "head_dim=40 "
      "head_dim_v=48 seqused_q=1 seqused_k=1 causal=1 window_left=30 softcap=20 alibi=1 bias=b1qk dbias=1 "
      "sinks=1 "
      "dsinks=1 dropout_p=0.2 dlse=1",
  };
  // NOLINTEND(bugprone-suspicious-missing-comma)
  std::vector<NamedCase> cases;
  for (const std::string_view line : lines) {
    const std::size_t colon = line.find(':');
    cases.push_back({std::string(line.substr(0, colon)), parse_case(line.substr(colon + 1)).value()});
  }
  for (const Index head_dim :
       {1, 7, 8, 16, 40, 64, 72, 80, 96, 112, 128, 136, 144, 152, 160, 168, 176, 192, 224, 255, 256}) {
    Case c;
    c.dtype = head_dim % 3 == 0 ? DType::float32 : head_dim % 3 == 1 ? DType::bfloat16 : DType::float16;
    c.seqlen_q = 37;
    c.seqlen_k = 66;
    c.num_heads_q = 2;
    c.head_dim = c.head_dim_v = head_dim;
    c.causal = true;
    cases.push_back({"head_dim_" + std::to_string(head_dim), c});
  }
  return cases;
}

// ---- Random cases.

namespace {

class Chooser {
 public:
  explicit Chooser(std::mt19937_64& random) : random_(random) {}

  Index below(Index count) { return static_cast<Index>(random_() % static_cast<std::uint64_t>(count)); }
  Index between(Index first, Index last) { return first + below(last - first + 1); }
  bool chance(Index percent) { return below(100) < percent; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<Index>(values.size()))];
  }

  Index seqlen() {
    const Index kind = below(100);
    if (kind < 3) return 0;
    if (kind < 10) return 1;
    if (kind < 40) return between(2, 17);
    if (kind < 50) return one_of<Index>({31, 32, 33, 63, 64, 65, 97, 113, 127, 128, 129, 192, 238, 256, 257});
    return kind < 85 ? between(18, 130) : between(131, 300);
  }
  Index head_dim() {
    if (chance(30)) return between(1, 256);
    return one_of<Index>(
        {1, 7, 8, 16, 32, 40, 64, 64, 72, 80, 96, 112, 128, 128, 136, 160, 176, 192, 224, 256});
  }
  std::optional<Index> window(Index seqlen) {
    switch (below(6)) {
      case 0:
        return 0;
      case 1:
        return 1;
      case 2:
        return std::max<Index>(seqlen - 1, 0);
      case 3:
        return seqlen;
      case 4:
        return between(0, seqlen + 5);
      default:
        return std::nullopt;
    }
  }
  Layout input_layout() {
    if (chance(40)) return Layout::dense;
    return one_of({Layout::bhsd, Layout::qkv, Layout::expanded, Layout::garbage, Layout::misaligned});
  }
  Layout output_layout() {
    if (chance(40)) return Layout::dense;
    return one_of({Layout::bhsd, Layout::qkv, Layout::garbage, Layout::misaligned});
  }

 private:
  std::mt19937_64& random_;
};

void choose_shape(Chooser& choose, Case& c) {
  c.seqlen_q = choose.seqlen();
  c.seqlen_k = choose.chance(40) ? c.seqlen_q : choose.seqlen();
  c.head_dim = choose.head_dim();
  c.head_dim_v = choose.chance(60) ? c.head_dim : choose.head_dim();
  if (choose.chance(5)) {
    c.head_dim = 192;
    c.head_dim_v = 128;
  }
  c.packed = choose.chance(40);
  c.batch = choose.chance(2) ? 0 : choose.between(1, c.packed ? 6 : 3);
  c.num_heads_k = choose.between(1, 3);
  c.num_heads_q = c.num_heads_k * choose.one_of<Index>({1, 1, 2, 3, 4});
  // The oracle's work, in multiply-adds of one matmul, stays in bounds.
  const auto work = [&] {
    return c.batch * c.num_heads_q * c.seqlen_q * c.seqlen_k * std::max(c.head_dim, c.head_dim_v);
  };
  constexpr Index budget = 2'000'000;
  while (work() > budget && c.batch > 1) --c.batch;
  if (work() > budget) c.num_heads_q = c.num_heads_k = choose.between(1, 2);
  while (work() > budget && c.head_dim + c.head_dim_v > 40) {
    c.head_dim = std::max<Index>(c.head_dim / 2, 1);
    c.head_dim_v = std::max<Index>(c.head_dim_v / 2, 1);
  }
  if (c.packed && choose.chance(40)) c.tail = choose.between(1, 9);
  c.seqused_q = choose.chance(20);
  c.seqused_k = choose.chance(25);
}

void choose_types(Chooser& choose, Case& c) {
  c.dtype = choose.one_of({DType::float32, DType::float16, DType::bfloat16});
  const auto own_or_float = [&](Index percent) { return choose.chance(percent) ? DType::float32 : c.dtype; };
  c.o_dtype = own_or_float(20);
  c.grad_dtype = own_or_float(20);
  c.bias_dtype = own_or_float(50);
  c.sinks_dtype = own_or_float(50);
}

void choose_mask(Chooser& choose, Case& c) {
  c.causal = choose.chance(35);
  if (choose.chance(35)) {
    c.window_left = choose.window(c.seqlen_k);
    if (!c.causal) c.window_right = choose.window(c.seqlen_k);
  }
  c.alignment = choose.chance(30) ? Alignment::top_left : Alignment::bottom_right;
}

void choose_score(Chooser& choose, Case& c) {
  if (choose.chance(20)) c.softmax_scale = choose.one_of({0.01, 0.1, 0.3});
  if (choose.chance(25)) c.softcap = choose.one_of({1.0, 15.0, 30.0, 50.0});
  if (choose.chance(20)) c.magnitude = choose.one_of({3.0, 30.0, c.softcap > 0 ? 3000.0 : 100.0});
  if (choose.chance(25)) c.alibi = static_cast<int>(choose.between(1, 2));
  if (choose.chance(35)) {
    c.bias = "bhqk";
    for (char& extent : c.bias) {
      if (choose.chance(40)) extent = '1';
    }
    c.dbias = choose.chance(70);
    c.bias_fill = choose.one_of(
        {BiasFill::normal, BiasFill::normal, BiasFill::deep, BiasFill::hidden, BiasFill::lowest});
    // A window can hide the one key of a row that is not at the lowest value.
    if (c.bias_fill == BiasFill::lowest && c.window_left) c.bias_fill = BiasFill::normal;
  }
  c.sinks = choose.chance(25);
  c.dsinks = c.sinks && choose.chance(75);
  if (choose.chance(25)) {
    c.dropout_p = choose.one_of({0.001, 0.1, 0.5, 1.0});
    c.offset = choose.one_of<std::uint64_t>({0, 5, Philox::max_offset});
  }
}

}  // namespace

Case random_case(std::mt19937_64& random) {
  Chooser choose(random);
  Case c;
  choose_shape(choose, c);
  choose_types(choose, c);
  choose_mask(choose, c);
  choose_score(choose, c);
  c.lse = choose.chance(85);
  c.dlse = choose.chance(30);
  c.deterministic = choose.chance(50);
  for (Layout* layout : {&c.q_layout, &c.k_layout, &c.v_layout, &c.dout_layout, &c.bias_layout}) {
    *layout = choose.input_layout();
  }
  for (Layout* layout :
       {&c.o_layout, &c.dq_layout, &c.dk_layout, &c.dv_layout, &c.lse_layout, &c.dbias_layout}) {
    *layout = choose.output_layout();
  }
  c.seed = random();
  c.threads = static_cast<int>(choose.between(1, 3));
  if (choose.chance(15)) c.mean = choose.one_of({-3.0, 1.0, 10.0});
  return c;
}

}  // namespace tessera::verify
