// The public C++ functions: validate, then dispatch.
#include <algorithm>
#include <limits>

#include "core/layout.h"
#include "core/problem.h"
#include "dispatch/dispatch.h"

namespace tessera {
namespace {

// Row-major strides. What does not fit saturates: validation then refuses the tensor for its extent.
void make_compact(Tensor& tensor) {
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.stride[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(tensor.shape[i], 1), &stride)) {
      stride = std::numeric_limits<std::int64_t>::max();
    }
  }
}

template <class Call>
Status execute(const Call& call) {
  const Result<Problem> problem = validate(call);
  if (!problem.ok()) return problem.status();
  return run(problem.value(), forced_kernel(call.options), call.workspace);
}

template <class Call>
Status prepare_call(const Call& call) {
  const Result<Problem> problem = validate(call, Pointers::optional);
  if (!problem.ok()) return problem.status();
  return prepare_problem(problem.value(), forced_kernel(call.options));
}

template <class Call>
Result<std::size_t> size_workspace(const Call& call) {
  const Result<Problem> problem = validate(call, Pointers::optional);
  if (!problem.ok()) return problem.status();
  const Result<Choice> choice = choose(problem.value(), forced_kernel(call.options));
  if (!choice.ok()) return choice.status();
  return choice.value().plan.workspace;
}

template <class Call>
Result<Explanation> explain_call(const Call& call) {
  const Result<Problem> problem = validate(call, Pointers::optional);
  if (!problem.ok()) return problem.status();
  return explain_problem(problem.value(), forced_kernel(call.options));
}

}  // namespace

Tensor::Tensor(const void* address, DType type, std::initializer_list<std::int64_t> sizes,
               std::initializer_list<std::int64_t> strides)
    : data(const_cast<void*>(address)),
      dtype(dlpack_type(type)),
      rank(sizes.size() == 0 ? -1 : static_cast<int>(sizes.size())) {
  // A scalar is no tensor of ours, and not "not given" either: validation refuses the rank.
  if (rank < 0 || rank > max_rank) return;
  std::copy(sizes.begin(), sizes.end(), shape.begin());
  if (strides.size() == 0) {
    make_compact(*this);
  } else if (strides.size() == sizes.size()) {
    std::copy(strides.begin(), strides.end(), stride.begin());
  } else {
    stride.fill(-1);  // a list of another length: validation refuses negative strides
  }
}

Tensor::Tensor(const DLTensor& tensor) : data(tensor.data), dtype(tensor.dtype), device(tensor.device) {
  if (data != nullptr) data = static_cast<std::byte*>(data) + tensor.byte_offset;
  // A scalar is given, and wrong everywhere: rank 0 would hide it.
  rank = tensor.ndim > 0 && tensor.shape != nullptr ? tensor.ndim : -1;
  if (rank < 0 || rank > max_rank) return;
  std::copy_n(tensor.shape, rank, shape.begin());
  if (tensor.strides == nullptr) {
    make_compact(*this);
  } else {
    std::copy_n(tensor.strides, rank, stride.begin());
  }
}

Status forward(const Forward& call) { return execute(call); }
Status backward(const Backward& call) { return execute(call); }
Status decode(const Decode& call) { return execute(call); }

Status merge_states(const MergeStates& call) {
  const Result<Problem> problem = validate(call);
  if (!problem.ok()) return problem.status();
  return run(problem.value(), forced_kernel(call.options), {});
}

Status prepare(const Forward& call) { return prepare_call(call); }
Status prepare(const Backward& call) { return prepare_call(call); }
Status prepare(const Decode& call) { return prepare_call(call); }
Status prepare(const MergeStates& call) { return prepare_call(call); }

Result<std::size_t> workspace_size(const Forward& call) { return size_workspace(call); }
Result<std::size_t> workspace_size(const Backward& call) { return size_workspace(call); }
Result<std::size_t> workspace_size(const Decode& call) { return size_workspace(call); }

Result<Explanation> explain(const Forward& call) { return explain_call(call); }
Result<Explanation> explain(const Backward& call) { return explain_call(call); }
Result<Explanation> explain(const Decode& call) { return explain_call(call); }

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> list;
  for (const Kernel& kernel : all_kernels()) {
    std::string reason = kernel.unavailable();
    list.push_back({kernel.name, kernel.description, kernel.device, reason.empty(), std::move(reason)});
  }
  return list;
}

std::string last_kernel() { return last_kernel_name(); }

std::string version() { return TESSERA_VERSION; }

}  // namespace tessera
