#include "core/arguments.h"

namespace tessera {

bool is_packed(const Options& options) {
  return options.cu_seqlens_q.given() || options.cu_seqlens_k.given();
}

namespace {

// clang-format off
void add_options(Arguments& table, const Options& x) {
  const auto add = [&](const char* name, const Tensor& tensor, Types types, Last last, int min_rank, int max_rank) {
    table.add({name, &tensor, Role::input, Need::optional, types, last, min_rank, max_rank});
  };
  add("alibi_slopes", x.alibi_slopes, Types::float32,         Last::strided,    1, 2);
  add("bias",         x.bias,         Types::as_q_or_float32, Last::strided,    1, 4);
  add("sinks",        x.sinks,        Types::as_q_or_float32, Last::strided,    1, 1);
  add("cu_seqlens_q", x.cu_seqlens_q, Types::int32,           Last::contiguous, 1, 1);
  add("cu_seqlens_k", x.cu_seqlens_k, Types::int32,           Last::contiguous, 1, 1);
  add("seqused_q",    x.seqused_q,    Types::int32,           Last::contiguous, 1, 1);
  add("seqused_k",    x.seqused_k,    Types::int32,           Last::contiguous, 1, 1);
}
// clang-format on

}  // namespace

// clang-format off
Arguments arguments(const Forward& x) {
  const int tokens = is_packed(x.options) ? 3 : 4;  // rank of q, k, v, o
  const int scalars = tokens - 1;                   // rank of lse
  using enum Role;
  using enum Need;
  Arguments table = {
      {"q",   &x.q,   input,  required, Types::floating,        Last::contiguous, tokens,  tokens},
      {"k",   &x.k,   input,  required, Types::as_q,            Last::contiguous, tokens,  tokens},
      {"v",   &x.v,   input,  required, Types::as_q,            Last::contiguous, tokens,  tokens},
      {"o",   &x.o,   output, required, Types::as_q_or_float32, Last::contiguous, tokens,  tokens},
      {"lse", &x.lse, output, optional, Types::float32,         Last::strided,    scalars, scalars},
  };
  add_options(table, x.options);
  return table;
}

Arguments arguments(const Backward& x) {
  const int tokens = is_packed(x.options) ? 3 : 4;
  const int scalars = tokens - 1;
  using enum Role;
  using enum Need;
  Arguments table = {
      {"q",      &x.q,      input,  required, Types::floating,        Last::contiguous, tokens,  tokens},
      {"k",      &x.k,      input,  required, Types::as_q,            Last::contiguous, tokens,  tokens},
      {"v",      &x.v,      input,  required, Types::as_q,            Last::contiguous, tokens,  tokens},
      {"o",      &x.o,      input,  required, Types::as_q_or_float32, Last::contiguous, tokens,  tokens},
      {"lse",    &x.lse,    input,  required, Types::float32,         Last::strided,    scalars, scalars},
      {"dout",   &x.dout,   input,  required, Types::as_q_or_float32, Last::contiguous, tokens,  tokens},
      {"dlse",   &x.dlse,   input,  optional, Types::float32,         Last::strided,    scalars, scalars},
      {"dq",     &x.dq,     output, required, Types::as_q_or_float32, Last::contiguous, tokens,  tokens},
      {"dk",     &x.dk,     output, required, Types::as_q_or_float32, Last::contiguous, tokens,  tokens},
      {"dv",     &x.dv,     output, required, Types::as_q_or_float32, Last::contiguous, tokens,  tokens},
      {"dbias",  &x.dbias,  output, optional, Types::as_q_or_float32, Last::strided,    1,       4},
      {"dsinks", &x.dsinks, output, optional, Types::as_q_or_float32, Last::strided,    1,       1},
  };
  add_options(table, x.options);
  return table;
}

Arguments arguments(const Decode& x) {
  const int tokens = is_packed(x.options) ? 3 : 4;
  const int scalars = tokens - 1;
  using enum Role;
  using enum Need;
  const Role cache = x.k_new.given() || x.v_new.given() ? output : input;  // both, then
  return {
      {"q",               &x.q,                    input,  required, Types::floating,        Last::contiguous, tokens,  tokens},
      {"k_cache",         &x.k_cache,              cache,  required, Types::cached,          Last::contiguous, 4,       4},
      {"v_cache",         &x.v_cache,              cache,  required, Types::cached,          Last::contiguous, 4,       4},
      {"k_scale",         &x.k_scale,              input,  optional, Types::float32,         Last::strided,    1,       1},
      {"v_scale",         &x.v_scale,              input,  optional, Types::float32,         Last::strided,    1,       1},
      {"cache_seqlens",   &x.cache_seqlens,        input,  required, Types::int32,           Last::contiguous, 1,       1},
      {"page_table",      &x.page_table,           input,  optional, Types::int32,           Last::contiguous, 2,       2},
      {"cache_batch_idx", &x.cache_batch_idx,      input,  optional, Types::int32,           Last::contiguous, 1,       1},
      {"leftpad_k",       &x.leftpad_k,            input,  optional, Types::int32,           Last::contiguous, 1,       1},
      {"k_new",           &x.k_new,                input,  optional, Types::as_q,            Last::contiguous, tokens,  tokens},
      {"v_new",           &x.v_new,                input,  optional, Types::as_q,            Last::contiguous, tokens,  tokens},
      {"rotary_cos",      &x.rotary_cos,           input,  optional, Types::as_q_or_float32, Last::contiguous, 2,       2},
      {"rotary_sin",      &x.rotary_sin,           input,  optional, Types::as_q_or_float32, Last::contiguous, 2,       2},
      {"o",               &x.o,                    output, required, Types::as_q_or_float32, Last::contiguous, tokens,  tokens},
      {"lse",             &x.lse,                  output, optional, Types::float32,         Last::strided,    scalars, scalars},
      {"alibi_slopes",    &x.options.alibi_slopes, input,  optional, Types::float32,         Last::strided,    1,       2},
      {"sinks",           &x.options.sinks,        input,  optional, Types::as_q_or_float32, Last::strided,    1,       1},
      {"cu_seqlens_q",    &x.options.cu_seqlens_q, input,  optional, Types::int32,           Last::contiguous, 1,       1},
      {"cu_seqlens_k",    &x.options.cu_seqlens_k, input,  optional, Types::int32,           Last::contiguous, 1,       1},
  };
}

Arguments arguments(const MergeStates& x) {
  using enum Role;
  using enum Need;
  return {
      {"o_a",   &x.o_a,   input,  required, Types::floating,     Last::contiguous, 3, 4},
      {"lse_a", &x.lse_a, input,  required, Types::float32,      Last::strided,    2, 3},
      {"o_b",   &x.o_b,   input,  required, Types::any_floating, Last::contiguous, 3, 4},
      {"lse_b", &x.lse_b, input,  required, Types::float32,      Last::strided,    2, 3},
      {"o",     &x.o,     output, required, Types::any_floating, Last::contiguous, 3, 4},
      {"lse",   &x.lse,   output, optional, Types::float32,      Last::strided,    2, 3},
  };
}
// clang-format on

}  // namespace tessera
