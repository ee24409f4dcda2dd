// Tessera: exact attention, tile by tile, in memory that grows with the sequence and not with its square.
//
//   tessera::Forward call;
//   call.q = tessera::Tensor(q, tessera::DType::float32, {batch, seqlen_q, heads, dim});
//   call.k = ...; call.v = ...; call.o = ...; call.lse = ...;
//   call.options.causal = true;
//   std::vector<std::byte> workspace(tessera::workspace_size(call).or_throw());
//   call.workspace = {workspace.data(), workspace.size()};
//   tessera::forward(call).or_throw();
//
// Every option is described in docs/semantics.md. All functions are thread-safe. Nothing here allocates
// tensors: outputs and workspace belong to the caller. A call that fails has written nothing.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

namespace tessera {

// The last two are dtypes of caches (struct Decode).
enum class DType : std::uint8_t { float32, float16, bfloat16, int32, float8_e4m3fn, int8 };

enum class Code : std::uint8_t {
  ok = 0,
  invalid_argument = 1,  // the message names the argument, its value and what was expected
  unsupported = 2,  // valid, but no kernel (or not the forced one) can run it; the message has the reasons
  internal = 3,     // a bug or a failing system call
};

// The outcome of a call. Success carries no text.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const { return code_ == Code::ok; }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }
  void or_throw() const {
    if (!ok()) throw std::runtime_error(message_);
  }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  [[nodiscard]] bool ok() const { return status_.ok(); }
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] const T& value() const { return *value_; }  // NOLINT(bugprone-unchecked-optional-access)
  T or_throw() const {
    status_.or_throw();
    return *value_;  // NOLINT(bugprone-unchecked-optional-access)
  }

 private:
  std::optional<T> value_;
  Status status_;
};

// A view of somebody else's memory. Strides count elements; an empty stride list means compact row-major.
// A default-constructed Tensor (rank 0) means "not given".
struct TESSERA_EXPORT Tensor {
  static constexpr int max_rank = 4;

  void* data = nullptr;
  DLDataType dtype{kDLFloat, 32, 1};
  DLDevice device{kDLCPU, 0};
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> stride{};

  Tensor() = default;
  Tensor(const void* address, DType type, std::initializer_list<std::int64_t> sizes,
         std::initializer_list<std::int64_t> strides = {});
  explicit Tensor(
      const DLTensor& tensor);  // a rank above 4 is kept, for the error message; its extents are not

  [[nodiscard]] bool given() const { return rank != 0; }
};

// Where the diagonal of causal and window masks lies when seqlen_q != seqlen_k.
enum class Alignment : std::uint8_t { bottom_right, top_left };

// Every option of docs/semantics.md.
struct Options {
  std::optional<double> softmax_scale;       // default: 1 / sqrt(head_dim)
  bool causal = false;                       // the same as window_right = 0
  std::optional<std::int64_t> window_left;   // keys i + shift - left .. ; none: unbounded
  std::optional<std::int64_t> window_right;  // .. i + shift + right
  Alignment alignment = Alignment::bottom_right;
  double softcap = 0.0;  // 0: off
  Tensor alibi_slopes;   // float32 (num_heads_q) or (batch, num_heads_q)
  Tensor bias;           // float32 or q's dtype, broadcast to (batch, num_heads_q, seqlen_q, seqlen_k)
  Tensor sinks;          // float32 or q's dtype (num_heads_q)
  double dropout_p = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;           // below 2^36
  Tensor cu_seqlens_q, cu_seqlens_k;  // int32 (batch + 1): q, k, v, o are packed (total, heads, dim)
  Tensor seqused_q, seqused_k;        // int32 (batch)
  // Packed only; default: the longest sequence, on a GPU (whose memory the host does not read) the total.
  std::optional<std::int64_t> max_seqlen_q, max_seqlen_k;
  bool deterministic = false;  // backward bitwise repeatable (the CPU's always is)
  std::string kernel;          // force a kernel by name; empty: the first of kernels() that fits
  int num_threads = 0;         // CPU; 0: TESSERA_NUM_THREADS, else every core of the process
  void* stream = nullptr;      // CUDA stream of the work; null: the default stream
};

struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// o = softmax(mask(softcap(scale * q k^T) + alibi + bias)) v, and lse.
struct Forward {
  Tensor q, k, v;
  Tensor o;    // q's dtype or float32
  Tensor lse;  // optional; float32 (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q)
  Options options;
  Workspace workspace;
};

// The gradients of a forward call with the same options.
struct Backward {
  Tensor q, k, v;
  Tensor o, lse;      // as forward wrote them
  Tensor dout;        // like o
  Tensor dlse;        // optional; like lse
  Tensor dq, dk, dv;  // q's dtype or float32
  Tensor dbias;       // optional; bias's shape and dtype
  Tensor dsinks;      // optional; sinks's shape and dtype
  Options options;
  Workspace workspace;
};

// Attention of a few new queries a sequence to a cache of keys and values (docs/semantics.md, Decode).
//
// The cache is contiguous, (batch_cache, seqlen_cache, num_heads_k, dim), or with page_table paged,
// (num_pages, page_size, num_heads_k, dim). k_new and v_new, if given, are first appended to it, in place.
//
// Of the options these have no place here: bias, dropout, seqused and Alignment::top_left. cu_seqlens_q packs
// q, o and lse, and cu_seqlens_k then k_new and v_new. max_seqlen_k is the most keys of any sequence after
// the append; default: what the cache has room for. The workspace grows with it.
//
// In an 8-bit cache a number is what is stored times its key head's scale; what is appended is divided by it.
struct Decode {
  Tensor q;
  Tensor k_cache, v_cache;          // q's dtype, or both float8_e4m3fn or int8; written to if k_new is given
  Tensor k_scale, v_scale;          // optional, with an 8-bit cache; float32 (num_heads_k): default 1
  Tensor cache_seqlens;             // int32 (batch): keys in the cache before the append
  Tensor page_table;                // optional; int32 (batch, max_pages): page i / page_size has key i
  Tensor cache_batch_idx;           // optional, contiguous only; int32 (batch): default b
  Tensor leftpad_k;                 // optional, contiguous only; int32 (batch): a sequence's first key
  Tensor k_new, v_new;              // optional; q's dtype (batch, seqlen_new, num_heads_k, dim)
  Tensor rotary_cos, rotary_sin;    // optional, with k_new; float32 or q's dtype (positions, rotary_dim / 2)
  bool rotary_interleaved = false;  // pairs (2i, 2i + 1); otherwise (i, i + rotary_dim / 2)
  Tensor o;                         // q's dtype or float32
  Tensor lse;                       // optional; float32, as in Forward
  std::int64_t num_splits = 0;      // parts that a sequence's keys are cut into, at most; 0: automatic
  Options options;
  Workspace workspace;
};

// Two results over different keys of the same queries to the one over all of them. All o and all lse have the
// shapes of Forward's, dense or packed. o may be o_a or o_b itself, lse lse_a or lse_b.
struct MergeStates {
  Tensor o_a, lse_a, o_b, lse_b;  // o: any floating dtype each; lse: float32
  Tensor o;                       // any floating dtype
  Tensor lse;                     // optional; float32
  Options options;                // kernel, num_threads and stream; the others mean nothing here
};

[[nodiscard]] TESSERA_EXPORT Status forward(const Forward& call);
[[nodiscard]] TESSERA_EXPORT Status backward(const Backward& call);
[[nodiscard]] TESSERA_EXPORT Status decode(const Decode& call);
[[nodiscard]] TESSERA_EXPORT Status merge_states(const MergeStates& call);

// Compiles and loads what the call needs and runs nothing: afterwards the call compiles nothing, and is safe
// under CUDA-graph capture. Neither the workspace nor any tensor's memory is looked at, but which kernel fits
// may depend on the alignment of addresses. CPU kernels have nothing to prepare.
[[nodiscard]] TESSERA_EXPORT Status prepare(const Forward& call);
[[nodiscard]] TESSERA_EXPORT Status prepare(const Backward& call);
[[nodiscard]] TESSERA_EXPORT Status prepare(const Decode& call);
[[nodiscard]] TESSERA_EXPORT Status prepare(const MergeStates& call);

// Bytes of workspace the call needs, 0 included. The workspace itself is not looked at.
[[nodiscard]] TESSERA_EXPORT Result<std::size_t> workspace_size(const Forward& call);
[[nodiscard]] TESSERA_EXPORT Result<std::size_t> workspace_size(const Backward& call);
[[nodiscard]] TESSERA_EXPORT Result<std::size_t> workspace_size(const Decode& call);

// What would run, and why. Data pointers are read only for cu_seqlens, seqused and the int32 tensors of
// Decode, and on a GPU not even there: its sequences are counted as if they were equally long and fully used.
struct Explanation {
  struct Refusal {
    std::string kernel;
    std::string reason;
  };
  std::string kernel;  // empty: every kernel refused
  std::int64_t block_m = 0, block_n = 0;
  int threads = 0;
  double flops = 0;        // of the (row, key) pairs that the mask leaves
  double dense_flops = 0;  // as if nothing were masked
  double bytes = 0;        // every tensor once, and the workspace once
  std::size_t workspace = 0;
  // Of a GPU kernel, else 0 and empty.
  int registers = 0;               // a thread
  std::int64_t shared_memory = 0;  // bytes a block
  double occupancy = 0;            // share of a multiprocessor's warps
  std::string cubin;               // where it came from: "pack", "cache" or "compiled"
  double cubin_seconds = 0;        // that getting it took
  std::vector<Refusal> refusals;

  [[nodiscard]] TESSERA_EXPORT std::string to_string() const;
  [[nodiscard]] TESSERA_EXPORT std::string to_json() const;
};
[[nodiscard]] TESSERA_EXPORT Result<Explanation> explain(const Forward& call);
[[nodiscard]] TESSERA_EXPORT Result<Explanation> explain(const Backward& call);
[[nodiscard]] TESSERA_EXPORT Result<Explanation> explain(const Decode& call);

// The kernels in the order in which dispatch asks them.
struct KernelInfo {
  std::string name;
  std::string description;
  std::string device;      // of the tensors it takes: "cpu" or "cuda"
  bool available = false;  // on this machine
  std::string why_not;     // if not
};
[[nodiscard]] TESSERA_EXPORT std::vector<KernelInfo> kernels();

// The name of the kernel that this thread's last successful call ran; empty before the first.
[[nodiscard]] TESSERA_EXPORT std::string last_kernel();

[[nodiscard]] TESSERA_EXPORT std::string version();

}  // namespace tessera
