#include "verify/mirror.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "core/arguments.h"
#include "core/layout.h"
#include "core/problem.h"
#if defined(TESSERA_CUDA)
#include "cuda/driver/driver.h"
#endif

namespace tessera::verify {
namespace {

// What the host knows of the lengths and a GPU call has to be told, since nobody reads its cu_seqlens: they
// give bias its extents. Without one, the default is as good, and is taken every other time.
template <class Call>
void tell_lengths(Call& call, const Problem& problem, bool always) {
  if (!problem.packed || (!always && !problem.bias.given())) return;
  call.options.max_seqlen_q = problem.max_seqlen_q;
  call.options.max_seqlen_k = problem.max_seqlen_k;
}

template <class Call>
Call planned(Call call) {
  if (!on_gpu(call.options.kernel)) return call;
  // A call that is not valid stays as it is: the caller meets the same error.
  const Result<Problem> problem = validate(call, Pointers::optional);
  if (!problem.ok()) return call;
  tell_lengths(call, problem.value(), true);
  for (const Argument& argument : arguments(call)) {
    if (argument.tensor->given()) const_cast<Tensor*>(argument.tensor)->device = {kDLCUDA, 0};
  }
  return call;
}

#if defined(TESSERA_CUDA)

constexpr std::size_t alignment = 256;    // of device memory; what is kept of a host address
constexpr std::size_t guard_bytes = 512;  // on each side, at least
constexpr std::uint8_t scratch_byte = 0xFF;

// As around the host's tensors: NaN in every dtype.
std::byte pattern_byte(std::size_t at) { return at % 2 == 0 ? std::byte{0xE5} : std::byte{0x7F}; }

// ---- Device memory that is used again: to allocate some waits for the device, and cases come by the
// thousand.

struct Block {
  std::uint64_t context = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

class Pool {
 public:
  [[nodiscard]] Result<Block> take(const cuda::Context& context, std::size_t bytes) {
    const auto fits = [&](const Block& block) {
      return block.context == context.id() && block.bytes >= bytes;
    };
    {
      const std::scoped_lock lock(mutex_);
      const auto found = std::find_if(free_.begin(), free_.end(), fits);
      if (found != free_.end()) {
        const Block block = *found;
        free_.erase(found);
        return block;
      }
    }
    const std::size_t rounded = std::max(bytes, smallest);
    const Result<void*> data = cuda::allocate(rounded);
    if (!data.ok()) return data.status();
    return Block{context.id(), static_cast<std::byte*>(data.value()), rounded};
  }

  // Only while the block's context is current.
  void give_back(const Block& block) {
    const std::scoped_lock lock(mutex_);
    if (block.bytes > largest || free_.size() >= most) {
      (void)cuda::free(block.data);
    } else {
      free_.push_back(block);
    }
  }

 private:
  static constexpr std::size_t smallest = 4u << 20, largest = 256u << 20, most = 64;
  std::mutex mutex_;
  std::vector<Block> free_;
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: the driver goes first, and takes the memory along
  return *instance;
}

// ---- One call's memory.

// A tensor and its copy. The device has [front guard][span][back guard] at offset of the block.
struct Copy {
  const char* name = nullptr;
  std::vector<Tensor*> tensors;  // of the device's call: all that lie there
  std::byte* host = nullptr;
  std::size_t bytes = 0;   // from the first element to the end of the last
  std::size_t offset = 0;  // in the block
  std::size_t front = 0;
  std::vector<std::byte> sent;  // guards included
};

std::size_t round_up(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

class Mirror {
 public:
  // The call's tensors then have device addresses.
  template <class Call>
  explicit Mirror(Call& call) {
    for (const Argument& argument : arguments(call)) {
      if (!argument.tensor->given()) continue;
      // The table views a call that is ours to change.
      auto* tensor = const_cast<Tensor*>(argument.tensor);
      tensor->device = {kDLCUDA, 0};
      Copy copy;
      copy.name = argument.name;
      copy.tensors = {tensor};
      copy.host = static_cast<std::byte*>(tensor->data);
      copy.bytes = static_cast<std::size_t>(bytes_spanned(*tensor).value_or(0));
      const auto same = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& other) {
        return copy.bytes > 0 && other.host == copy.host && other.bytes == copy.bytes;
      });
      if (same != copies_.end()) {
        same->tensors.push_back(tensor);
        continue;
      }
      copy.offset = tensor_bytes_;
      copy.front = guard_bytes + reinterpret_cast<std::uintptr_t>(copy.host) % alignment;
      tensor_bytes_ += round_up(copy.front + copy.bytes + guard_bytes);
      copies_.push_back(std::move(copy));
    }
  }
  ~Mirror() {
    for (const Block& block : {tensors_, scratch_}) {
      if (block.data != nullptr) pool().give_back(block);
    }
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  [[nodiscard]] Status send(const cuda::Context& context, void* stream);
  [[nodiscard]] Status make_scratch(const cuda::Context& context, std::size_t bytes, void* stream,
                                    Workspace& workspace);
  // Waits, too. What changed inside a span changes on the host, be it an element or not.
  [[nodiscard]] Status fetch(void* stream);

 private:
  [[nodiscard]] static Status fetch_tensor(const Copy& copy, const std::vector<std::byte>& received);

  std::vector<Copy> copies_;
  std::size_t tensor_bytes_ = 0, scratch_bytes_ = 0;
  Block tensors_, scratch_;
};

Status Mirror::send(const cuda::Context& context, void* stream) {
  const Result<Block> block = pool().take(context, tensor_bytes_);
  if (!block.ok()) return block.status();
  tensors_ = block.value();
  for (Copy& copy : copies_) {
    copy.sent.resize(copy.front + copy.bytes + guard_bytes);
    for (std::size_t i = 0; i < copy.front; ++i) copy.sent[i] = pattern_byte(i);
    if (copy.bytes != 0) std::memcpy(copy.sent.data() + copy.front, copy.host, copy.bytes);
    for (std::size_t i = copy.front + copy.bytes; i < copy.sent.size(); ++i) copy.sent[i] = pattern_byte(i);
    std::byte* target = tensors_.data + copy.offset;
    if (Status s = cuda::copy_to_device(target, copy.sent.data(), copy.sent.size(), stream); !s.ok())
      return s;
    for (Tensor* tensor : copy.tensors) {
      if (copy.host != nullptr) tensor->data = target + copy.front;
    }
  }
  return {};
}

Status Mirror::make_scratch(const cuda::Context& context, std::size_t bytes, void* stream,
                            Workspace& workspace) {
  const Result<Block> block = pool().take(context, bytes + 2 * guard_bytes);
  if (!block.ok()) return block.status();
  scratch_ = block.value();
  scratch_bytes_ = bytes;
  workspace = {scratch_.data + guard_bytes, bytes};
  return cuda::fill(scratch_.data, scratch_byte, bytes + 2 * guard_bytes, stream);
}

Status Mirror::fetch(void* stream) {
  std::vector<std::vector<std::byte>> received;
  for (const Copy& copy : copies_) {
    std::vector<std::byte>& bytes = received.emplace_back(copy.sent.size());
    if (Status s = cuda::copy_to_host(bytes.data(), tensors_.data + copy.offset, bytes.size(), stream);
        !s.ok())
      return s;
  }
  std::array<std::byte, 2 * guard_bytes> guards{};
  if (scratch_.data != nullptr) {
    std::byte* back = scratch_.data + guard_bytes + scratch_bytes_;
    if (Status s = cuda::copy_to_host(guards.data(), scratch_.data, guard_bytes, stream); !s.ok()) return s;
    if (Status s = cuda::copy_to_host(guards.data() + guard_bytes, back, guard_bytes, stream); !s.ok())
      return s;
  }
  if (Status s = cuda::synchronize(stream); !s.ok()) return s;

  for (std::size_t i = 0; i < copies_.size(); ++i)
    if (Status s = fetch_tensor(copies_[i], received[i]); !s.ok()) return s;
  const auto untouched = [](std::byte b) { return b == std::byte{scratch_byte}; };
  if (scratch_.data != nullptr && !std::all_of(guards.begin(), guards.end(), untouched))
    return {Code::internal, "memory around the workspace was overwritten"};
  return {};
}

Status Mirror::fetch_tensor(const Copy& copy, const std::vector<std::byte>& received) {
  const std::byte *sent = copy.sent.data(), *got = received.data();
  const std::size_t end = copy.front + copy.bytes;
  if (std::memcmp(sent, got, copy.front) != 0 || std::memcmp(sent + end, got + end, guard_bytes) != 0)
    return {Code::internal, std::string(copy.name) + ": memory around it was overwritten"};
  if (std::memcmp(sent, got, copy.sent.size()) == 0) return {};
  // Only what changed: tensors may interleave on the host, as dq, dk and dv of one buffer do.
  for (std::size_t i = 0; i < copy.bytes; ++i) {
    if (sent[copy.front + i] != got[copy.front + i]) copy.host[i] = got[copy.front + i];
  }
  return {};
}

// The two streams that need not be made. CU_STREAM_PER_THREAD is the thread's own.
void* next_stream() {
  static std::atomic<unsigned> turn{0};
  constexpr std::uintptr_t per_thread = 2;
  return turn++ % 2 == 0 ? nullptr
                         : reinterpret_cast<void*>(per_thread);  // NOLINT(performance-no-int-to-ptr)
}

template <class Call>
Status run_on_device(Call call, Status (*function)(const Call&)) {
  const Result<Problem> problem = validate(call);
  if (!problem.ok()) return problem.status();
  const Result<cuda::Context> context = cuda::Context::enter(0);
  if (!context.ok()) return context.status();
  void* stream = next_stream();
  tell_lengths(call, problem.value(), stream == nullptr);
  call.options.stream = stream;

  Mirror mirror(call);
  if (Status s = mirror.send(context.value(), stream); !s.ok()) return s;
  if constexpr (requires { call.workspace; }) {
    const Result<std::size_t> bytes = workspace_size(call);
    if (!bytes.ok()) return bytes.status();
    if (Status s = mirror.make_scratch(context.value(), bytes.value(), stream, call.workspace); !s.ok())
      return s;
  }
  const Status status = function(call);
  // Nothing of a call that failed may still be under way when its memory goes back.
  const Status fetched = mirror.fetch(stream);
  return status.ok() ? fetched : status;
}

#else

template <class Call>
Status run_on_device(const Call&, Status (*)(const Call&)) {
  return {Code::unsupported, "this build has no GPU backend"};
}

#endif

}  // namespace

bool on_gpu(std::string_view kernel) {
  static const std::vector<KernelInfo> list = kernels();
  return std::any_of(list.begin(), list.end(),
                     [&](const KernelInfo& info) { return info.name == kernel && info.device == "cuda"; });
}

Forward as_planned(Forward call) { return planned(std::move(call)); }
Backward as_planned(Backward call) { return planned(std::move(call)); }
Decode as_planned(Decode call) { return planned(std::move(call)); }

Status run_mirrored(const Forward& call, Status (*function)(const Forward&)) {
  return run_on_device(call, function);
}
Status run_mirrored(const Backward& call, Status (*function)(const Backward&)) {
  return run_on_device(call, function);
}
Status run_mirrored(const Decode& call, Status (*function)(const Decode&)) {
  return run_on_device(call, function);
}
Status run_mirrored(const MergeStates& call, Status (*function)(const MergeStates&)) {
  return run_on_device(call, function);
}

}  // namespace tessera::verify
