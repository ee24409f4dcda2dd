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
// clang-format on

}  // namespace tessera
