// The C ABI over the C++ API: structs of any version in, no exception out.
#include <cstring>
#include <exception>
#include <new>

#include "core/layout.h"
#include "dispatch/dispatch.h"
#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

static_assert(static_cast<int>(Code::ok) == TESSERA_OK);
static_assert(static_cast<int>(Code::invalid_argument) == TESSERA_INVALID_ARGUMENT);
static_assert(static_cast<int>(Code::unsupported) == TESSERA_UNSUPPORTED);
static_assert(static_cast<int>(Code::internal) == TESSERA_INTERNAL);
static_assert(float8_e4m3fn_code == TESSERA_DL_FLOAT8_E4M3FN);

// Far above any struct of a future version, and small enough that a garbage struct_size is never followed.
constexpr std::size_t max_struct_size = 4096;

// The text of this thread's last error. Either text has it, or fixed does (when text could not grow).
struct LastError {
  std::string text;
  const char* fixed = nullptr;
};
thread_local LastError last_error;

tessera_code report(const Status& status) {
  last_error.fixed = nullptr;
  last_error.text = status.message();
  return static_cast<tessera_code>(status.code());
}

tessera_code report_fixed(const char* text) noexcept {
  last_error.fixed = text;
  return TESSERA_INTERNAL;
}

// Runs body, which returns a Status, and turns whatever leaves it into a code.
template <class Body>
tessera_code guarded(Body body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report_fixed("out of memory");
  } catch (const std::exception& error) {
    try {
      return report(Status(Code::internal, error.what()));
    } catch (...) {
      return report_fixed("out of memory");
    }
  } catch (...) {
    return report_fixed("an unknown exception");
  }
}

Status invalid(const std::string& argument, const std::string& was, const std::string& expected) {
  return {Code::invalid_argument, argument + ": " + was + ", expected " + expected};
}

// Copies a caller's struct of any version over defaults, which fields that it lacks keep. A longer struct
// comes from a newer header: what this library does not know must be zero, that is, unused. Sizes are
// multiples of 8 in every version, so that no field is ever cut.
template <class Struct>
Status read_struct(const char* name, const Struct* given, Struct& out) {
  const std::size_t size = given->struct_size;
  const std::string argument = std::string(name) + ".struct_size";
  if (size < sizeof(std::size_t) || size > max_struct_size || size % 8 != 0) {
    return invalid(argument, std::to_string(size),
                   "sizeof(" + std::string(name) + "), here " + std::to_string(sizeof(Struct)));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return invalid(argument, std::to_string(size),
                     "zeros behind the " + std::to_string(sizeof(Struct)) + " bytes that this library knows");
    }
  }
  std::memcpy(&out, given, size < sizeof(Struct) ? size : sizeof(Struct));
  return {};
}

// A DLTensor that may be absent. Its shape is the one pointer that validation could not check any more.
Status read_tensor(const char* name, const DLTensor* given, Tensor& out) {
  if (given == nullptr) return {};
  if (given->ndim > 0 && given->shape == nullptr) {
    return invalid(std::string(name) + ".shape", "null", std::to_string(given->ndim) + " sizes");
  }
  out = Tensor(*given);
  return {};
}

struct NamedTensor {
  const char* name;
  const DLTensor* given;
  Tensor* out;
};

Status read_tensors(std::initializer_list<NamedTensor> list) {
  for (const NamedTensor& entry : list) {
    if (Status status = read_tensor(entry.name, entry.given, *entry.out); !status.ok()) return status;
  }
  return {};
}

Status read_options(const tessera_options* given, Options& out) {
  if (given == nullptr) return {};
  tessera_options c;
  tessera_options_init(&c);
  if (Status status = read_struct("tessera_options", given, c); !status.ok()) return status;
  if (c.alignment != TESSERA_ALIGN_BOTTOM_RIGHT && c.alignment != TESSERA_ALIGN_TOP_LEFT) {
    return invalid("alignment", std::to_string(c.alignment),
                   "TESSERA_ALIGN_BOTTOM_RIGHT (0) or TESSERA_ALIGN_TOP_LEFT (1)");
  }
  if (c.reserved != 0) return invalid("reserved", std::to_string(c.reserved), "0");

  if (c.has_softmax_scale != 0) out.softmax_scale = c.softmax_scale;
  out.causal = c.causal != 0;
  if (c.window_left != TESSERA_UNBOUNDED) out.window_left = c.window_left;
  if (c.window_right != TESSERA_UNBOUNDED) out.window_right = c.window_right;
  out.alignment = c.alignment == TESSERA_ALIGN_TOP_LEFT ? Alignment::top_left : Alignment::bottom_right;
  out.softcap = c.softcap;
  out.dropout_p = c.dropout_p;
  out.seed = c.seed;
  out.offset = c.offset;
  if (c.max_seqlen_q != 0) out.max_seqlen_q = c.max_seqlen_q;
  if (c.max_seqlen_k != 0) out.max_seqlen_k = c.max_seqlen_k;
  out.deterministic = c.deterministic != 0;
  if (c.kernel != nullptr) out.kernel = c.kernel;
  out.num_threads = c.num_threads;
  out.stream = c.stream;
  return read_tensors({{"alibi_slopes", c.alibi_slopes, &out.alibi_slopes},
                       {"bias", c.bias, &out.bias},
                       {"sinks", c.sinks, &out.sinks},
                       {"cu_seqlens_q", c.cu_seqlens_q, &out.cu_seqlens_q},
                       {"cu_seqlens_k", c.cu_seqlens_k, &out.cu_seqlens_k},
                       {"seqused_q", c.seqused_q, &out.seqused_q},
                       {"seqused_k", c.seqused_k, &out.seqused_k}});
}

Status read(const tessera_forward_args* args, Forward& out) {
  if (args == nullptr) return invalid("args", "null", "a tessera_forward_args");
  tessera_forward_args c;
  tessera_forward_args_init(&c);
  if (Status status = read_struct("tessera_forward_args", args, c); !status.ok()) return status;
  if (Status status = read_options(c.options, out.options); !status.ok()) return status;
  out.workspace = {c.workspace, c.workspace_bytes};
  return read_tensors({{"q", c.q, &out.q},
                       {"k", c.k, &out.k},
                       {"v", c.v, &out.v},
                       {"o", c.o, &out.o},
                       {"lse", c.lse, &out.lse}});
}

Status read(const tessera_backward_args* args, Backward& out) {
  if (args == nullptr) return invalid("args", "null", "a tessera_backward_args");
  tessera_backward_args c;
  tessera_backward_args_init(&c);
  if (Status status = read_struct("tessera_backward_args", args, c); !status.ok()) return status;
  if (Status status = read_options(c.options, out.options); !status.ok()) return status;
  out.workspace = {c.workspace, c.workspace_bytes};
  return read_tensors({{"q", c.q, &out.q},
                       {"k", c.k, &out.k},
                       {"v", c.v, &out.v},
                       {"o", c.o, &out.o},
                       {"lse", c.lse, &out.lse},
                       {"dout", c.dout, &out.dout},
                       {"dlse", c.dlse, &out.dlse},
                       {"dq", c.dq, &out.dq},
                       {"dk", c.dk, &out.dk},
                       {"dv", c.dv, &out.dv},
                       {"dbias", c.dbias, &out.dbias},
                       {"dsinks", c.dsinks, &out.dsinks}});
}

Status read(const tessera_decode_args* args, Decode& out) {
  if (args == nullptr) return invalid("args", "null", "a tessera_decode_args");
  tessera_decode_args c;
  tessera_decode_args_init(&c);
  if (Status status = read_struct("tessera_decode_args", args, c); !status.ok()) return status;
  if (Status status = read_options(c.options, out.options); !status.ok()) return status;
  if (c.reserved != 0) return invalid("reserved", std::to_string(c.reserved), "0");
  out.rotary_interleaved = c.rotary_interleaved != 0;
  out.num_splits = c.num_splits;
  out.workspace = {c.workspace, c.workspace_bytes};
  return read_tensors({{"q", c.q, &out.q},
                       {"k_cache", c.k_cache, &out.k_cache},
                       {"v_cache", c.v_cache, &out.v_cache},
                       {"k_scale", c.k_scale, &out.k_scale},
                       {"v_scale", c.v_scale, &out.v_scale},
                       {"cache_seqlens", c.cache_seqlens, &out.cache_seqlens},
                       {"page_table", c.page_table, &out.page_table},
                       {"cache_batch_idx", c.cache_batch_idx, &out.cache_batch_idx},
                       {"leftpad_k", c.leftpad_k, &out.leftpad_k},
                       {"k_new", c.k_new, &out.k_new},
                       {"v_new", c.v_new, &out.v_new},
                       {"rotary_cos", c.rotary_cos, &out.rotary_cos},
                       {"rotary_sin", c.rotary_sin, &out.rotary_sin},
                       {"o", c.o, &out.o},
                       {"lse", c.lse, &out.lse}});
}

Status read(const tessera_merge_states_args* args, MergeStates& out) {
  if (args == nullptr) return invalid("args", "null", "a tessera_merge_states_args");
  tessera_merge_states_args c;
  tessera_merge_states_args_init(&c);
  if (Status status = read_struct("tessera_merge_states_args", args, c); !status.ok()) return status;
  if (Status status = read_options(c.options, out.options); !status.ok()) return status;
  return read_tensors({{"o_a", c.o_a, &out.o_a},
                       {"lse_a", c.lse_a, &out.lse_a},
                       {"o_b", c.o_b, &out.o_b},
                       {"lse_b", c.lse_b, &out.lse_b},
                       {"o", c.o, &out.o},
                       {"lse", c.lse, &out.lse}});
}

// forward, backward or prepare.
template <class Call, class Args>
Status pass_to(Status (*function)(const Call&), const Args* args) {
  Call call;
  Status status = read(args, call);
  return status.ok() ? function(call) : status;
}

template <class Call, class Args>
Status workspace_size_of(const Args* args, std::size_t* bytes) {
  if (bytes == nullptr) return invalid("bytes", "null", "a place for the size");
  Call call;
  if (Status status = read(args, call); !status.ok()) return status;
  const Result<std::size_t> size = workspace_size(call);
  if (size.ok()) *bytes = size.value();
  return size.status();
}

template <class Call, class Args>
Status explain_into(const Args* args, char* buffer, std::size_t* size) {
  if (size == nullptr) return invalid("size", "null", "a place for the size");
  Call call;
  if (Status status = read(args, call); !status.ok()) return status;
  const Result<Explanation> explanation = explain(call);
  if (!explanation.ok()) return explanation.status();
  const std::string text = explanation.value().to_json();
  const std::size_t room = *size;
  *size = text.size() + 1;
  if (buffer != nullptr && room >= *size) std::memcpy(buffer, text.c_str(), *size);
  return {};
}

}  // namespace
}  // namespace tessera

extern "C" {

tessera_code tessera_forward(const tessera_forward_args* args) {
  return tessera::guarded([&] { return tessera::pass_to(tessera::forward, args); });
}

tessera_code tessera_backward(const tessera_backward_args* args) {
  return tessera::guarded([&] { return tessera::pass_to(tessera::backward, args); });
}

tessera_code tessera_decode(const tessera_decode_args* args) {
  return tessera::guarded([&] { return tessera::pass_to(tessera::decode, args); });
}

tessera_code tessera_merge_states(const tessera_merge_states_args* args) {
  return tessera::guarded([&] { return tessera::pass_to(tessera::merge_states, args); });
}

tessera_code tessera_prepare_forward(const tessera_forward_args* args) {
  return tessera::guarded([&] { return tessera::pass_to<tessera::Forward>(tessera::prepare, args); });
}

tessera_code tessera_prepare_backward(const tessera_backward_args* args) {
  return tessera::guarded([&] { return tessera::pass_to<tessera::Backward>(tessera::prepare, args); });
}

tessera_code tessera_prepare_decode(const tessera_decode_args* args) {
  return tessera::guarded([&] { return tessera::pass_to<tessera::Decode>(tessera::prepare, args); });
}

tessera_code tessera_prepare_merge_states(const tessera_merge_states_args* args) {
  return tessera::guarded([&] { return tessera::pass_to<tessera::MergeStates>(tessera::prepare, args); });
}

tessera_code tessera_forward_workspace_size(const tessera_forward_args* args, size_t* bytes) {
  return tessera::guarded([&] { return tessera::workspace_size_of<tessera::Forward>(args, bytes); });
}

tessera_code tessera_backward_workspace_size(const tessera_backward_args* args, size_t* bytes) {
  return tessera::guarded([&] { return tessera::workspace_size_of<tessera::Backward>(args, bytes); });
}

tessera_code tessera_decode_workspace_size(const tessera_decode_args* args, size_t* bytes) {
  return tessera::guarded([&] { return tessera::workspace_size_of<tessera::Decode>(args, bytes); });
}

tessera_code tessera_explain_forward(const tessera_forward_args* args, char* buffer, size_t* size) {
  return tessera::guarded([&] { return tessera::explain_into<tessera::Forward>(args, buffer, size); });
}

tessera_code tessera_explain_backward(const tessera_backward_args* args, char* buffer, size_t* size) {
  return tessera::guarded([&] { return tessera::explain_into<tessera::Backward>(args, buffer, size); });
}

tessera_code tessera_explain_decode(const tessera_decode_args* args, char* buffer, size_t* size) {
  return tessera::guarded([&] { return tessera::explain_into<tessera::Decode>(args, buffer, size); });
}

const char* tessera_last_error(void) {
  const tessera::LastError& error = tessera::last_error;
  return error.fixed != nullptr ? error.fixed : error.text.c_str();
}

const char* tessera_last_kernel(void) { return tessera::last_kernel_name(); }

const char* tessera_version(void) { return TESSERA_VERSION; }

int tessera_abi_version(void) { return TESSERA_ABI_VERSION; }

}  // extern "C"
