// What the GPU's tests share: the CUDA functions they need beyond src/cuda/driver, and calls whose tensors
// live in device memory.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/arguments.h"
#include "core/layout.h"
#include "cpu/kernel_test.h"
#include "cuda/driver/driver.h"

namespace tessera::verify {

// Of libcuda, by their names there. Streams, graphs and contexts are opaque pointers, device memory an
// integer.
struct Cuda {
  using Address = unsigned long long;
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*graph_instantiate)(void** instance, void* graph, unsigned long long flags);
  int (*graph_launch)(void* instance, void* stream);
  int (*graph_exec_destroy)(void* instance);
  int (*graph_destroy)(void* graph);
  int (*context_create)(void** context, unsigned flags, int device);
  int (*context_destroy)(void* context);
  int (*copy)(Address to, Address from, std::size_t bytes, void* stream);

  static const Cuda& get() {
    static const Cuda functions = load();
    return functions;
  }

 private:
  static Cuda load() {
    Cuda cuda{};
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    EXPECT_NE(library, nullptr) << dlerror();
    const auto find = [&](auto& function, const char* name) {
      void* symbol = library == nullptr ? nullptr : dlsym(library, name);
      EXPECT_NE(symbol, nullptr) << name;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    find(cuda.stream_create, "cuStreamCreate");
    find(cuda.stream_destroy, "cuStreamDestroy_v2");
    find(cuda.begin_capture, "cuStreamBeginCapture_v2");
    find(cuda.end_capture, "cuStreamEndCapture");
    find(cuda.graph_instantiate, "cuGraphInstantiateWithFlags");
    find(cuda.graph_launch, "cuGraphLaunch");
    find(cuda.graph_exec_destroy, "cuGraphExecDestroy");
    find(cuda.graph_destroy, "cuGraphDestroy");
    find(cuda.context_create, "cuCtxCreate_v2");
    find(cuda.context_destroy, "cuCtxDestroy_v2");
    find(cuda.copy, "cuMemcpyDtoDAsync_v2");
    return cuda;
  }
};

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }
inline void expect_done(int result, const char* what) { EXPECT_EQ(result, 0) << what; }

// One that does not wait for the default stream, nor it for this.
class Stream {
 public:
  Stream() {
    constexpr unsigned non_blocking = 1;
    expect_done(Cuda::get().stream_create(&stream_, non_blocking), "cuStreamCreate");
  }
  ~Stream() { Cuda::get().stream_destroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] void* get() const { return stream_; }

 private:
  void* stream_ = nullptr;
};

// What a stream was told, as an instance that can be launched.
class Graph {
 public:
  template <class Body>
  Graph(void* stream, Body body) {
    const Cuda& cuda = Cuda::get();
    constexpr int global = 0;  // any unsafe call of any thread ends the capture
    expect_done(cuda.begin_capture(stream, global), "cuStreamBeginCapture");
    body();
    void* graph = nullptr;
    expect_done(cuda.end_capture(stream, &graph), "cuStreamEndCapture");
    if (graph == nullptr) return;
    expect_done(cuda.graph_instantiate(&instance_, graph, 0), "cuGraphInstantiate");
    cuda.graph_destroy(graph);
  }
  ~Graph() {
    if (instance_ != nullptr) Cuda::get().graph_exec_destroy(instance_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(void* stream) const {
    ASSERT_NE(instance_, nullptr);
    expect_done(Cuda::get().graph_launch(instance_, stream), "cuGraphLaunch");
  }

 private:
  void* instance_ = nullptr;
};

// An allocation of its own, of exactly that size, so that compute-sanitizer sees every step outside. Without
// memory, data() is null.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    const Result<void*> found = cuda::allocate(bytes == 0 ? 1 : bytes);
    if (found.ok()) data_ = static_cast<std::byte*>(found.value());
    if (!found.ok()) why_not_ = found.status().message();
  }
  ~DeviceMemory() {
    if (data_ != nullptr) (void)cuda::free(data_);
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(other.bytes_),
        why_not_(std::move(other.why_not_)) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] const std::string& why_not() const { return why_not_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::string why_not_;
};

// A case in device memory: forward and backward on one set of tensors.
class Resident {
 public:
  explicit Resident(const Tensors& host) {
    Backward on_host = host.backward_call();
    backward = as_planned(on_host);
    for (const Argument& argument : arguments(backward)) {
      if (!argument.tensor->given()) continue;
      const std::size_t bytes = static_cast<std::size_t>(bytes_spanned(*argument.tensor).value_or(0));
      memory_.emplace_back(bytes);
      EXPECT_NE(memory_.back().data(), nullptr) << memory_.back().why_not();
      const_cast<Tensor*>(argument.tensor)->data = memory_.back().data();
    }
    forward = {backward.q, backward.k, backward.v, backward.o, backward.lse, backward.options, {}};
    forward.workspace = make_workspace(workspace_size(forward));
    backward.workspace = make_workspace(workspace_size(backward));
    upload(host, nullptr);
    expect_ok(cuda::synchronize(nullptr));
  }

  Forward forward;
  Backward backward;

  // Every tensor, outputs and the gaps between rows included.
  void upload(const Tensors& from, void* stream) const {
    for_each(from, [&](std::byte* host, const DeviceMemory& device) {
      if (device.bytes() != 0) expect_ok(cuda::copy_to_device(device.data(), host, device.bytes(), stream));
    });
  }
  void download(Tensors& to, void* stream) const {
    for_each(to, [&](std::byte* host, const DeviceMemory& device) {
      if (device.bytes() != 0) expect_ok(cuda::copy_to_host(host, device.data(), device.bytes(), stream));
    });
    expect_ok(cuda::synchronize(stream));
  }
  void set_stream(void* stream) { forward.options.stream = backward.options.stream = stream; }
  void fill_workspaces(std::uint8_t value, void* stream) const {
    for (const DeviceMemory& memory : workspaces_) {
      if (memory.bytes() != 0) expect_ok(cuda::fill(memory.data(), value, memory.bytes(), stream));
    }
  }
  void run() const {
    expect_ok(tessera::forward(forward));
    expect_ok(tessera::backward(backward));
  }
  [[nodiscard]] const std::vector<DeviceMemory>& tensors() const { return memory_; }

 private:
  Workspace make_workspace(const Result<std::size_t>& bytes) {
    expect_ok(bytes.status());
    workspaces_.emplace_back(bytes.ok() ? bytes.value() : 0);
    return {workspaces_.back().data(), workspaces_.back().bytes()};
  }

  // The host's tensors in the order of ours.
  template <class Body>
  void for_each(const Tensors& host, Body body) const {
    const Backward call = host.backward_call();
    std::size_t i = 0;
    for (const Argument& argument : arguments(call)) {
      if (!argument.tensor->given()) continue;
      ASSERT_LT(i, memory_.size());
      ASSERT_EQ(memory_[i].bytes(), static_cast<std::size_t>(bytes_spanned(*argument.tensor).value_or(0)));
      body(static_cast<std::byte*>(argument.tensor->data), memory_[i]);
      ++i;
    }
  }

  std::vector<DeviceMemory> memory_, workspaces_;
};

// Each test once a GPU kernel of tessera::kernels(), in a context of device 0; skipped, with the reason,
// where there is no GPU or where the kernel does not run on it.
class GpuTest : public testing::TestWithParam<KernelInfo> {
 protected:
  void SetUp() override {
    if (!cuda::unavailable().empty()) GTEST_SKIP() << cuda::unavailable();
    if (!GetParam().available) GTEST_SKIP() << GetParam().name << ": " << GetParam().why_not;
    context_.emplace(cuda::Context::enter(0));
    ASSERT_TRUE(context_->ok()) << context_->status().message();
  }

  static Case forced(const std::string& line) { return verify::forced(parsed(line), GetParam().name); }

  // What lies in tensors, after forward and backward.
  static void expect_right(Tensors& tensors) {
    Verdict verdict;
    verdict.settings = tensors.settings;
    const Expected expected = expect(tensors);
    compare(tensors, expected, Direction::forward, verdict);
    compare(tensors, expected, Direction::backward, verdict);
    EXPECT_TRUE(verdict.ok()) << verdict.to_string();
  }
  // The bytes of every output.
  static Snapshot outputs_of(Tensors& tensors) {
    Snapshot snapshot;
    for (const Direction direction : {Direction::forward, Direction::backward}) {
      for (const auto& [name, buffer] : tensors.outputs(direction)) snapshot.push_back(buffer->bytes());
    }
    return snapshot;
  }

 private:
  std::optional<Result<cuda::Context>> context_;
};

inline std::vector<KernelInfo> gpu_kernels() {
  std::vector<KernelInfo> list = kernels();
  std::erase_if(list, [](const KernelInfo& info) { return info.device != "cuda"; });
  return list;
}

}  // namespace tessera::verify

#define TESSERA_FOR_EACH_GPU_KERNEL(Suite)              \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite); \
  INSTANTIATE_TEST_SUITE_P(Kernels, Suite, testing::ValuesIn(gpu_kernels()), kernel_name)
