// The CUDA driver and its compiler, opened at run time. Knows nothing of attention.
//
//   Result<Context> context = Context::enter(device_id);   // current for this scope
//   Result<const LoadedKernel*> kernel = load(context.value(), "my_kernel", shared_bytes, [] {
//     return std::string("extern \"C\" __global__ void my_kernel(const __grid_constant__ Params p) { ... }");
//   });
//   launch(*kernel.value(), blocks, threads, shared_bytes, stream, &params);
//
// Neither libcuda nor libnvrtc is needed to build or to load the library. Where they are absent,
// unavailable() says why, and so does every error of a call that asked for a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::cuda {

// ---- Devices.

// Why no GPU can be used on this machine; empty: one can. The answer is found once.
[[nodiscard]] const std::string& unavailable();

struct DeviceFacts {
  int id = 0;
  std::string name;
  int arch = 0;  // 80, 86, 89, 90, ...
  int multiprocessors = 0;
  int threads_per_multiprocessor = 0;
  std::int64_t shared_per_block = 0;  // at most, opted in
  std::int64_t shared_per_multiprocessor = 0;
  std::int64_t l2_bytes = 0;
};
[[nodiscard]] int device_count();  // 0 where unavailable() says why
[[nodiscard]] Result<const DeviceFacts*> device_facts(int device_id);
[[nodiscard]] std::string driver_version();    // "13.0"; empty where there is no driver
[[nodiscard]] std::string compiler_version();  // of libnvrtc; empty where there is none

// A context of the device, current in this thread until the end of the scope: the thread's own current one
// if it is of that device, else the device's primary one.
class Context {
 public:
  [[nodiscard]] static Result<Context> enter(int device_id);
  Context(Context&& other) noexcept;
  Context& operator=(Context&&) = delete;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  [[nodiscard]] std::uint64_t id() const { return id_; }  // never used again after the context is destroyed
  [[nodiscard]] const DeviceFacts& facts() const { return *facts_; }

 private:
  Context(std::uint64_t id, const DeviceFacts* facts, bool pushed)
      : id_(id), facts_(facts), pushed_(pushed) {}
  std::uint64_t id_ = 0;
  const DeviceFacts* facts_ = nullptr;
  bool pushed_ = false;  // to be popped
};

// ---- Compiling. Needs no GPU.

struct Resources {
  int registers = 0;
  int spill_bytes = 0;  // stores and loads of registers that did not fit
  int stack_bytes = 0;
  int shared_bytes = 0;  // static; dynamic shared memory is the launch's
};

// What a program is compiled for: "sm_80", "sm_90a".
[[nodiscard]] std::string arch_name(int arch);  // of a device: 90 is sm_90a, every other plain

struct Cubin {
  std::vector<std::byte> image;
  std::string log;  // of the compiler and of ptxas -v
  Resources resources;
};
// The text may include every file of embedded_sources(). An error carries the compiler's log.
[[nodiscard]] Result<Cubin> compile(std::string_view name, std::string_view text, std::string_view arch);

// The kernels' sources and what they include, part of the library.
struct EmbeddedFile {
  const char* name;  // as it is included: "sm80/forward.cuh", "core/mask.h", "cute/arch/mma_sm80.hpp"
  const char* text;
};
[[nodiscard]] const std::vector<EmbeddedFile>& embedded_sources();

// ---- Loading and launching.

enum class Origin : std::uint8_t { pack, cache, compiled };
[[nodiscard]] const char* name_of(Origin origin);

struct LoadedKernel {
  void* function = nullptr;  // CUfunction
  std::string name;
  Resources resources;
  Origin origin = Origin::compiled;
  double seconds = 0;  // that getting it took, the first time
};

// The kernel of that name in this context, from memory, the pack, the disk cache or the compiler, in this
// order. The name identifies the program within this version of the library (its text is made only when it
// is not in memory), and is that of its extern "C" __global__ function. dynamic_shared bytes can be launched
// afterwards. One thread loads, others wait for it. The result lives as long as the process.
[[nodiscard]] Result<const LoadedKernel*> load(const Context& context, std::string_view name,
                                               int dynamic_shared, const std::function<std::string()>& text);

// params is the kernel's one parameter. Asynchronous, on the stream (null: the default stream). early: its
// blocks may be there before the stream's kernel before it has ended; it waits by itself
// (kernels/ptx/launch.cuh), which takes compute capability 9.0.
[[nodiscard]] Status launch(const LoadedKernel& kernel, unsigned blocks, unsigned threads, int dynamic_shared,
                            void* stream, const void* params, bool early = false);
// Blocks of the kernel that fit a multiprocessor at once.
[[nodiscard]] Result<int> occupancy(const LoadedKernel& kernel, int threads, int dynamic_shared);

// ---- Tensor maps: what the copy engine of Hopper knows of a tensor.

// Of 16-bit numbers, in four dimensions, the contiguous one first.
struct TensorMapSpec {
  void* data = nullptr;                   // at a multiple of 16
  std::array<std::int64_t, 4> extents{};  // above 0
  std::array<std::int64_t, 3> strides{};  // of the others, in bytes: multiples of 16
  int box_cols = 0, box_rows = 0;  // of the first two; a row of 64 or 128 bytes, permuted as wgmma has it
};
[[nodiscard]] bool has_tensor_maps();  // the driver knows them
// Writes the 128 bytes of a map, at a multiple of 64. Reads and writes no memory of the GPU.
[[nodiscard]] Status encode_tensor_map(const TensorMapSpec& spec, void* map);

// ---- Memory, for tests and tools; the library itself allocates none.

[[nodiscard]] Result<void*> allocate(std::size_t bytes);
[[nodiscard]] Status free(void* data);
[[nodiscard]] Status fill(void* data, std::uint8_t value, std::size_t bytes, void* stream);
[[nodiscard]] Status copy_to_device(void* to, const void* from, std::size_t bytes, void* stream);
[[nodiscard]] Status copy_to_host(void* to, const void* from, std::size_t bytes, void* stream);
[[nodiscard]] Status synchronize(void* stream);

}  // namespace tessera::cuda
