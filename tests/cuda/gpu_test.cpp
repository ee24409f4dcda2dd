// What only a GPU can show: graphs, streams, contexts, tensors beyond 2^31 elements. The cases that every
// kernel is held to run on a GPU through verify/mirror.h, in tessera_cpu_test.
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "cuda/resident.h"

namespace tessera::verify {
namespace {

using Gpu = GpuTest;
using Sanitizer = GpuTest;
using Mirror = GpuTest;
TESSERA_FOR_EACH_GPU_KERNEL(Gpu);
TESSERA_FOR_EACH_GPU_KERNEL(Sanitizer);
TESSERA_FOR_EACH_GPU_KERNEL(Mirror);

constexpr const char* typical =
    "batch=2 seqlen_q=150 seqlen_k=200 num_heads_q=4 num_heads_k=2 head_dim=64 head_dim_v=64 causal=1 "
    "alibi=1 "
    "seqused_q=1 seqused_k=1 deterministic=1 ";

// ---- Graphs.

TEST_P(Gpu, AGraphReplaysWithNewData) {
  Tensors first(forced(std::string(typical) + "seed=4"));
  Resident device(first);
  const Stream stream;
  device.set_stream(stream.get());
  expect_ok(prepare(device.forward));
  expect_ok(prepare(device.backward));
  const Graph graph(stream.get(), [&] { device.run(); });
  Tensors untouched(first.settings);
  device.download(untouched, stream.get());
  for (const auto& [name, buffer] : untouched.outputs(Direction::forward))
    EXPECT_TRUE(buffer->unwritten(0)) << name << ": capturing ran something";

  graph.launch(stream.get());
  device.download(first, stream.get());
  expect_right(first);

  Case other = first.settings;  // other data, other lengths
  other.seed += 4;
  Tensors second(other);
  device.upload(second, stream.get());
  device.fill_workspaces(0xFF, stream.get());
  graph.launch(stream.get());
  device.download(second, stream.get());
  expect_right(second);
}

TEST_P(Gpu, APreparedCallCompilesNothing) {
  for (const int head_dim : {64, 104, 256}) {
    SCOPED_TRACE(head_dim);
    Case c = forced("seqlen_q=70 seqlen_k=90 num_heads_q=2 bias=1hqk dbias=1 sinks=1 dsinks=1");
    c.head_dim = c.head_dim_v = head_dim;
    Tensors tensors(c);
    Resident device(tensors);
    const Stream stream;
    device.set_stream(stream.get());
    expect_ok(prepare(device.forward));
    expect_ok(prepare(device.backward));
    const Graph graph(stream.get(), [&] { device.run(); });
    graph.launch(stream.get());
    device.download(tensors, stream.get());
    expect_right(tensors);
  }
}

// ---- Numbers that are none.

// A key that is NaN or infinite reaches no query that does not see it, in whichever block of keys it comes,
// and NaN every one that does.
TEST_P(Gpu, SpoiledKeysReachThoseWhoSeeThem) {
  constexpr std::int64_t length = 600;
  for (const char* options : {"", " softcap=30"}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const std::int64_t key : {3, 300, 590}) {
        for (const double spoiled : {std::nan(""), double{INFINITY}}) {
          Case c = forced("seqlen_q=600 seqlen_k=600 causal=1 dtype=bfloat16" + std::string(options));
          c.head_dim = c.head_dim_v = head_dim;
          SCOPED_TRACE(to_string(c) + ", key " + std::to_string(key) + " " + std::to_string(spoiled));
          Tensors tensors(c);
          tensors.k.set(key * head_dim + 1, spoiled);
          const Resident device(tensors);
          device.run();
          device.download(tensors, nullptr);
          for (std::int64_t row = 0; row < length; ++row) {
            const double o = tensors.o.get(row * head_dim), lse = tensors.lse.get(row);
            if (row < key) {
              ASSERT_TRUE(std::isfinite(o) && std::isfinite(lse)) << row << ": " << o << ", " << lse;
            } else if (std::isnan(spoiled)) {
              ASSERT_TRUE(std::isnan(o) && std::isnan(lse)) << row << ": " << o << ", " << lse;
            }
          }
        }
      }
    }
  }
}

// ---- The order of tiles.

// Tiles that see less than the others of a window are taken apart, heads of several sequences side by side.
TEST_P(Gpu, WindowsOfManyTiles) {
  for (const char* sizes : {"batch=2 num_heads_q=16 num_heads_k=2", "batch=8 num_heads_q=1 num_heads_k=1",
                            "num_heads_q=11 num_heads_k=11"}) {
    Tensors tensors(
        forced(std::string(sizes) +
               " seqlen_q=1100 seqlen_k=1100 head_dim=64 head_dim_v=64 causal=1 window_left=100"));
    const Resident device(tensors);
    device.run();
    device.download(tensors, nullptr);
    expect_right(tensors);
  }
}

// ---- Streams, threads, contexts.

// The stream is busy when the call comes: whatever were put on another stream would come too early, and meet
// NaN in the inputs, or have its work in the workspace overwritten.
TEST_P(Gpu, EverythingGoesOnTheCallsStream) {
  Tensors tensors(forced(std::string(typical) + "sinks=1 dsinks=1 bias=1hqk dbias=1 seed=9"));
  const Resident source(tensors);
  Resident device(tensors);
  expect_ok(prepare(device.forward));
  expect_ok(prepare(device.backward));
  for (const DeviceMemory& memory : device.tensors())
    expect_ok(cuda::fill(memory.data(), 0xFF, memory.bytes(), nullptr));
  // Lengths must be lengths at any time.
  for (const Tensor* lengths : {&device.backward.options.seqused_q, &device.backward.options.seqused_k})
    expect_ok(cuda::fill(lengths->data, 0, 2 * sizeof(std::int32_t), nullptr));
  const auto copy_all = [&](void* stream) {
    for (std::size_t i = 0; i < device.tensors().size(); ++i) {
      const DeviceMemory &from = source.tensors()[i], &to = device.tensors()[i];
      expect_done(Cuda::get().copy(reinterpret_cast<Cuda::Address>(to.data()),
                                   reinterpret_cast<Cuda::Address>(from.data()), from.bytes(), stream),
                  "cuMemcpyDtoDAsync");
    }
  };
  const DeviceMemory ballast(std::size_t{1} << 30);
  ASSERT_NE(ballast.data(), nullptr) << ballast.why_not();
  expect_ok(cuda::synchronize(nullptr));

  const Stream stream;
  device.set_stream(stream.get());
  for (int i = 0; i < 16; ++i) expect_ok(cuda::fill(ballast.data(), 1, ballast.bytes(), stream.get()));
  copy_all(stream.get());
  device.fill_workspaces(0xFF, stream.get());
  device.run();
  device.download(tensors, stream.get());
  expect_right(tensors);
}

TEST_P(Gpu, TwoThreadsOnTwoStreams) {
  constexpr int callers = 2;
  std::vector<Tensors> tensors;
  for (int i = 0; i < callers; ++i) {
    Case c = forced(typical);
    c.head_dim = c.head_dim_v = 88;  // not loaded yet: both threads ask for it at once
    c.seed = static_cast<std::uint64_t>(i);
    tensors.emplace_back(c);
  }
  const auto work = [&](int who) {
    const Result<cuda::Context> context = cuda::Context::enter(0);
    ASSERT_TRUE(context.ok()) << context.status().message();
    Resident device(tensors[who]);
    const Stream stream;
    device.set_stream(stream.get());
    for (int repeat = 0; repeat < 20; ++repeat) {
      device.fill_workspaces(0xFF, stream.get());
      device.run();
      EXPECT_EQ(last_kernel(), GetParam().name);
    }
    device.download(tensors[who], stream.get());
  };
  std::vector<std::thread> threads;
  threads.reserve(callers);
  for (int i = 0; i < callers; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  for (Tensors& each : tensors) expect_right(each);
}

// Kernels belong to a context: a second one gets its own, and so does a third where the second was.
TEST_P(Gpu, ASecondContext) {
  for (int repeat = 0; repeat < 3; ++repeat) {
    SCOPED_TRACE(repeat);
    Tensors tensors(forced(typical));
    {
      const Resident device(tensors);  // the primary context
      device.run();
      device.download(tensors, nullptr);
      expect_right(tensors);
    }
    void* context = nullptr;
    ASSERT_EQ(Cuda::get().context_create(&context, 0, 0), 0);
    {
      Tensors again(tensors.settings);
      const Resident device(again);
      device.run();
      device.download(again, nullptr);
      expect_right(again);
    }
    expect_done(Cuda::get().context_destroy(context), "cuCtxDestroy");  // and it is current no longer
  }
}

// ---- Which kernel, and what it says of itself.

TEST_P(Gpu, TheForcedKernelRunsAndExplainsItself) {
  const Tensors tensors(
      forced("batch=2 seqlen_q=300 seqlen_k=300 num_heads_q=2 num_heads_k=2 head_dim=128 head_dim_v=128"));
  const Resident device(tensors);
  device.run();
  EXPECT_EQ(last_kernel(), GetParam().name);
  const auto expect_facts = [&](const Explanation& explanation) {
    EXPECT_EQ(explanation.kernel, GetParam().name);
    EXPECT_GT(explanation.block_m, 0);
    EXPECT_GT(explanation.block_n, 0);
    EXPECT_GT(explanation.registers, 0);
    EXPECT_LE(explanation.registers, 255);
    EXPECT_GT(explanation.shared_memory, 0);
    EXPECT_GT(explanation.occupancy, 0);
    EXPECT_LE(explanation.occupancy, 1);
    EXPECT_GE(explanation.cubin_seconds, 0);
    const std::string& origin = explanation.cubin;
    EXPECT_TRUE(origin == "pack" || origin == "cache" || origin == "compiled") << origin;
    EXPECT_NE(explanation.to_string().find("occupancy"), std::string::npos);
    EXPECT_NE(explanation.to_json().find("\"registers\""), std::string::npos);
  };
  expect_facts(explain(device.forward).or_throw());
  expect_facts(explain(device.backward).or_throw());
  const double tensor = 2.0 * 300 * 2 * 128;
  EXPECT_EQ(explain(device.forward).or_throw().flops, 4 * tensor * 300);
  EXPECT_EQ(explain(device.forward).or_throw().bytes,
            4 * tensor * 2 + 2.0 * 2 * 300 * 4 + static_cast<double>(device.forward.workspace.bytes));
}

TEST_P(Gpu, NoSuchDevice) {
  const Tensors tensors(forced("seqlen_q=16 seqlen_k=16"));
  Resident device(tensors);
  for (const int id : {cuda::device_count(), 4711, -1}) {
    Forward call = device.forward;
    for (Tensor* tensor : {&call.q, &call.k, &call.v, &call.o, &call.lse}) tensor->device.device_id = id;
    for (const Status& status : {forward(call), prepare(call), workspace_size(call).status()}) {
      EXPECT_FALSE(status.ok()) << id;
      EXPECT_NE(status.code(), Code::internal) << status.message();
      EXPECT_NE(status.message().find("cuda:" + std::to_string(id)), std::string::npos) << status.message();
    }
  }
  // One tensor elsewhere.
  Forward call = device.forward;
  call.v.device.device_id = 1;
  EXPECT_EQ(forward(call).message(), "v.device: cuda:1, expected q's cuda:0");
}

TEST_P(Gpu, AFailedCallWritesNothing) {
  Tensors tensors(forced("seqlen_q=40 seqlen_k=40"));
  Resident device(tensors);
  Forward call = device.forward;
  call.options.softcap = -1;
  EXPECT_EQ(forward(call).code(), Code::invalid_argument);
  Backward backward_call = device.backward;
  if (backward_call.workspace.bytes > 0) {
    backward_call.workspace.bytes -= 1;
    EXPECT_EQ(backward(backward_call).code(), Code::invalid_argument);
  }
  device.download(tensors, nullptr);
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    for (const auto& [name, buffer] : tensors.outputs(direction)) {
      for (std::int64_t i = 0; i < buffer->size(); ++i) ASSERT_TRUE(buffer->unwritten(i)) << name << ' ' << i;
    }
  }
}

// ---- Alignment. Every tensor in turn starts at an odd element and has rows of an odd stride.

TEST_P(Gpu, EachTensorMisaligned) {
  for (const char* tensor : {"q", "k", "v", "o", "dout", "dq", "dk", "dv", "lse", "bias", "dbias"}) {
    for (const char* layout : {"misaligned", "qkv", "bhsd"}) {
      const Case c = forced(
          "batch=2 seqlen_q=70 seqlen_k=130 num_heads_q=2 num_heads_k=1 head_dim=64 head_dim_v=64 causal=1 "
          "bias=1hqk dbias=1 dlse=1 " +
          (std::string(tensor) + "_layout=" + layout));
      const Verdict verdict = judge(c);
      EXPECT_TRUE(verdict.ok()) << verdict.to_string();
    }
  }
}

// ---- Sizes.

// Stride 2^30 in each dimension in turn: the last element lies beyond 2^31. The bits are those of the compact
// tensors.
TEST_P(Gpu, LargeStrides) {
  constexpr std::int64_t large = std::int64_t{1} << 30, n = 3, dim = 8;
  Tensors compact(forced(
      "batch=3 seqlen_q=3 seqlen_k=3 num_heads_q=3 num_heads_k=3 head_dim=8 head_dim_v=8 dtype=bfloat16 "
      "o_dtype=bfloat16 grad_dtype=bfloat16 deterministic=1"));
  const Resident near(compact);
  near.run();
  near.download(compact, nullptr);
  expect_right(compact);

  std::vector<DeviceMemory> memory;
  for (int i = 0; i < 8; ++i) {
    memory.emplace_back(static_cast<std::size_t>(2 * large + 4096) * 2);
    if (memory.back().data() == nullptr) GTEST_SKIP() << memory.back().why_not();
  }
  for (int dimension = 0; dimension < 3; ++dimension) {
    SCOPED_TRACE(dimension);
    Backward call = near.backward;
    const std::array<Tensor*, 8> tensors = {&call.q,    &call.k,  &call.v,  &call.o,
                                            &call.dout, &call.dq, &call.dk, &call.dv};
    const std::array<const Buffer*, 8> hosts = {&compact.q,    &compact.k,  &compact.v,  &compact.o,
                                                &compact.dout, &compact.dq, &compact.dk, &compact.dv};
    // body(host, device) for every row of a tensor.
    const auto for_each_row = [&](std::size_t which, const auto& body) {
      const Tensor& tensor = *tensors[which];
      ASSERT_EQ(tensor.dtype.bits, 16);
      auto* host = static_cast<std::byte*>(hosts[which]->tensor().data);
      for (std::int64_t i = 0; i < n * n * n; ++i) {
        const std::int64_t at =
            i / (n * n) * tensor.stride[0] + i / n % n * tensor.stride[1] + i % n * tensor.stride[2];
        body(host + i * dim * 2, static_cast<std::byte*>(tensor.data) + at * 2);
      }
    };
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors[i]->data = memory[i].data();
      tensors[i]->stride[dimension] = large;
      for_each_row(i, [&](std::byte* host, std::byte* device) {
        if (tensors[i] == &call.q || tensors[i] == &call.k || tensors[i] == &call.v ||
            tensors[i] == &call.dout) {
          expect_ok(cuda::copy_to_device(device, host, dim * 2, nullptr));
        } else {
          expect_ok(cuda::fill(device, 0xFF, dim * 2, nullptr));
        }
      });
    }
    Forward forward_call{call.q, call.k, call.v, call.o, call.lse, call.options, near.forward.workspace};
    expect_ok(forward(forward_call));
    expect_ok(backward(call));
    std::array<std::byte, dim * 2> row{};
    for (const std::size_t i : {3, 5, 6, 7}) {
      for_each_row(i, [&](const std::byte* host, const std::byte* device) {
        expect_ok(cuda::copy_to_host(row.data(), device, row.size(), nullptr));
        expect_ok(cuda::synchronize(nullptr));
        EXPECT_EQ(std::memcmp(row.data(), host, row.size()), 0) << "tensor " << i;
      });
    }
  }
}

// Tensors of 2^31 + 8 M elements. A window keeps the work linear, and a few rows at a time a problem of their
// own for the oracle: rows begin .. end of q, and the keys that they see.
class Long {
 public:
  static constexpr std::int64_t seqlen = (1 << 20) + 4096, heads = 16, dim = 128, window = 100;
  static constexpr std::int64_t row = heads * dim;
  static constexpr std::size_t bytes = static_cast<std::size_t>(seqlen * row) * 2;

  // q, k, v, dout, o, dq, dk, dv
  Long() {
    for (int i = 0; i < 8; ++i) memory_.emplace_back(bytes);
    memory_.emplace_back(static_cast<std::size_t>(seqlen * heads) * 4);  // lse
  }
  [[nodiscard]] std::string why_not() const {
    std::string reason;
    for (const DeviceMemory& each : memory_) reason += each.why_not();
    return reason;
  }
  [[nodiscard]] const DeviceMemory& of(int which) const { return memory_[which]; }
  [[nodiscard]] Tensor tensor(int which) const {
    Tensor t(memory_[which].data(), DType::bfloat16, {1, seqlen, heads, dim});
    if (which == 8) t = Tensor(memory_[which].data(), DType::float32, {1, heads, seqlen});
    t.device = {kDLCUDA, 0};
    return t;
  }
  // Random numbers of a period that is prime, so that an address that lost its upper bits reads other ones.
  void fill_inputs() const {
    constexpr std::size_t period = 33'554'393;
    static_assert(period < static_cast<std::size_t>(seqlen * row));
    std::vector<std::uint16_t> host(period);
    for (int which = 0; which < 4; ++which) {
      std::uint64_t state = 88172645463325252u + static_cast<std::uint64_t>(which);
      for (std::uint16_t& x : host) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Sign and 7 bits of mantissa at random, magnitudes from 2^-3 to 2.
        x = static_cast<std::uint16_t>((state & 0x807F) | (124 + (state >> 32) % 4) << 7);
      }
      std::byte* data = memory_[which].data();
      expect_ok(cuda::copy_to_device(data, host.data(), period * 2, nullptr));
      for (std::size_t done = period * 2; done < bytes;) {
        const std::size_t part = std::min(done, bytes - done) / (period * 2) * (period * 2);
        const std::size_t size = part == 0 ? bytes - done : part;
        expect_done(Cuda::get().copy(reinterpret_cast<Cuda::Address>(data + done),
                                     reinterpret_cast<Cuda::Address>(data), size, nullptr),
                    "cuMemcpyDtoDAsync");
        done += size;
      }
    }
    for (int which = 4; which < 9; ++which)
      expect_ok(cuda::fill(memory_[which].data(), 0xFF, memory_[which].bytes(), nullptr));
  }
  // Rows begin .. begin + count of one tensor, to where a compact tensor of a sub-problem has them.
  void fetch(int which, std::int64_t begin, std::int64_t count, const Buffer& into, std::int64_t at) const {
    auto* host = static_cast<std::byte*>(into.tensor().data);
    if (which != 8) {
      expect_ok(cuda::copy_to_host(host + at * row * 2, memory_[which].data() + begin * row * 2,
                                   static_cast<std::size_t>(count * row) * 2, nullptr));
    } else {
      for (std::int64_t h = 0; h < heads; ++h) {
        expect_ok(cuda::copy_to_host(host + (h * into.tensor().shape[2] + at) * 4,
                                     memory_[which].data() + (h * seqlen + begin) * 4,
                                     static_cast<std::size_t>(count) * 4, nullptr));
      }
    }
    expect_ok(cuda::synchronize(nullptr));
  }

 private:
  std::vector<DeviceMemory> memory_;
};

TEST_P(Gpu, MoreThan2To31Elements) {
  const Long big;
  if (!big.why_not().empty()) GTEST_SKIP() << big.why_not();
  big.fill_inputs();
  Backward call;
  call.q = big.tensor(0);
  call.k = big.tensor(1);
  call.v = big.tensor(2);
  call.dout = big.tensor(3);
  call.o = big.tensor(4);
  call.dq = big.tensor(5);
  call.dk = big.tensor(6);
  call.dv = big.tensor(7);
  call.lse = big.tensor(8);
  call.options.causal = true;
  call.options.window_left = Long::window;
  call.options.kernel = GetParam().name;
  Forward forward_call{call.q, call.k, call.v, call.o, call.lse, call.options, {}};
  const DeviceMemory forward_workspace(workspace_size(forward_call).or_throw());
  const DeviceMemory backward_workspace(workspace_size(call).or_throw());
  if (backward_workspace.data() == nullptr) GTEST_SKIP() << backward_workspace.why_not();
  forward_call.workspace = {forward_workspace.data(), forward_workspace.bytes()};
  call.workspace = {backward_workspace.data(), backward_workspace.bytes()};
  expect_ok(forward(forward_call));
  expect_ok(backward(call));
  expect_ok(cuda::synchronize(nullptr));

  constexpr std::int64_t window = Long::window, rows = 24;
  // Around element 2^31 of q, which is row 2^20; byte 2^32 is the same place. And at both ends.
  for (const std::int64_t begin : {std::int64_t{0}, (std::int64_t{1} << 19) + 77,
                                   (std::int64_t{1} << 20) - 12, Long::seqlen - window - rows}) {
    SCOPED_TRACE(begin);
    // Queries begin .. end + window see the keys from first on; the gradients of keys begin .. end come from
    // them.
    const std::int64_t first = std::max<std::int64_t>(begin - window, 0);
    const std::int64_t count_q = rows + window, count_k = begin + count_q - first;
    Case c = parsed(
        "num_heads_q=16 num_heads_k=16 head_dim=128 head_dim_v=128 dtype=bfloat16 o_dtype=bfloat16 "
        "grad_dtype=bfloat16 causal=1 window_left=100");
    c.seqlen_q = count_q;
    c.seqlen_k = count_k;
    Tensors part(c);
    big.fetch(0, begin, count_q, part.q, 0);
    big.fetch(1, first, count_k, part.k, 0);
    big.fetch(2, first, count_k, part.v, 0);
    big.fetch(3, begin, count_q, part.dout, 0);
    big.fetch(4, begin, count_q, part.o, 0);
    big.fetch(5, begin, count_q, part.dq, 0);
    big.fetch(6, first, count_k, part.dk, 0);
    big.fetch(7, first, count_k, part.dv, 0);
    big.fetch(8, begin, count_q, part.lse, 0);
    for (const auto& [name, buffer] : part.inputs()) buffer->freeze();
    const Expected expected = expect(part);
    Verdict verdict;
    verdict.settings = c;
    compare(part, expected, Direction::forward, verdict);
    EXPECT_TRUE(verdict.ok()) << verdict.to_string();

    // Elements from .. to of a gradient, by the rule of docs/semantics.md.
    const auto expect_close = [&](const char* name, const Buffer& buffer, const std::vector<double>& exact,
                                  const std::vector<double>& plain, std::int64_t from, std::int64_t to) {
      double error = 0, plain_error = 0, largest = 0;
      for (std::int64_t i = from * Long::row; i < to * Long::row; ++i) {
        const double difference = std::abs(buffer.get(i) - exact[i]);
        if (!(difference <= error)) error = difference;  // NaN stays
        plain_error = std::max(plain_error, std::abs(plain[i] - exact[i]));
        largest = std::max(largest, std::abs(exact[i]));
      }
      EXPECT_LE(error, 2 * plain_error + 1e-5) << name << ", up to " << largest;
    };
    const reference::Gradients &exact = expected.gradients, &plain = expected.plain_gradients;
    expect_close("dq", part.dq, exact.dq, plain.dq, 0, count_q);
    // Keys before begin are seen by queries that the part lacks, those behind its first rows by later ones.
    const std::int64_t skip = begin - first;
    const std::int64_t last = begin + count_q == Long::seqlen ? count_k : skip + rows;
    expect_close("dk", part.dk, exact.dk, plain.dk, skip, last);
    expect_close("dv", part.dv, exact.dv, plain.dv, skip, last);
  }
}

// ---- The mirror must be able to condemn.

TEST_P(Mirror, SeesWhatItShould) {
  Tensors tensors(forced("seqlen_q=20 seqlen_k=20 head_dim=24 head_dim_v=24 o_layout=qkv"));
  const auto run_with = [&](Status (*function)(const Forward&)) {
    return run_call<Forward>(tensors.forward_call(), function);
  };
  expect_ok(run_with(forward));
  using Bytes = std::byte*;
  const auto before = [](const Forward& call) {
    return cuda::fill(static_cast<Bytes>(call.o.data) - 1, 0, 1, call.options.stream);
  };
  EXPECT_EQ(run_with(before).message(), "o: memory around it was overwritten");
  const auto behind = [](const Forward& call) {
    const std::int64_t bytes = bytes_spanned(call.q).value_or(0);
    return cuda::fill(static_cast<Bytes>(call.q.data) + bytes, 0, 1, call.options.stream);
  };
  EXPECT_EQ(run_with(behind).message(), "q: memory around it was overwritten");
  const auto workspace = [](const Forward& call) {
    return cuda::fill(static_cast<Bytes>(call.workspace.data) + call.workspace.bytes, 0, 1,
                      call.options.stream);
  };
  EXPECT_EQ(run_with(workspace).message(), "memory around the workspace was overwritten");

  // Between rows, and in an input: the host's buffers show it.
  EXPECT_TRUE(tensors.o.guards_intact());
  const auto between = [](const Forward& call) {
    return cuda::fill(static_cast<Bytes>(call.o.data) + 24 * 2, 0, 1, call.options.stream);
  };
  expect_ok(run_with(between));
  EXPECT_FALSE(tensors.o.guards_intact());
  EXPECT_TRUE(tensors.k.unchanged());
  const auto input = [](const Forward& call) { return cuda::fill(call.k.data, 0, 2, call.options.stream); };
  expect_ok(run_with(input));
  EXPECT_FALSE(tensors.k.unchanged());
}

// ---- A small set for compute-sanitizer: allocations of exact size, a workspace that nobody has written.

void expect_right_exactly(Tensors tensors, const std::function<void(Tensors&)>& judge_it) {
  const Resident device(tensors);
  device.run();
  device.download(tensors, nullptr);
  judge_it(tensors);
}

TEST_P(Sanitizer, Plain) {
  for (const char* line :
       {"batch=2 seqlen_q=130 seqlen_k=130 num_heads_q=2 num_heads_k=1 head_dim=64 head_dim_v=64 causal=1",
        "seqlen_q=70 seqlen_k=200 num_heads_q=2 num_heads_k=2 head_dim=128 head_dim_v=128 deterministic=1",
        "seqlen_q=65 seqlen_k=66 head_dim=256 head_dim_v=256 seed=1",
        "batch=2 seqlen_q=700 seqlen_k=700 num_heads_q=2 num_heads_k=1 head_dim=64 head_dim_v=64 causal=1 "
        "window_left=100",
        "batch=2 seqlen_q=500 seqlen_k=300 head_dim=128 head_dim_v=128 softcap=30 alignment=top_left"})
    expect_right_exactly(Tensors(forced(line)), expect_right);
}

TEST_P(Sanitizer, EveryOption) {
  for (const char* line :
       {"batch=2 seqlen_q=90 seqlen_k=100 num_heads_q=4 num_heads_k=2 head_dim=72 head_dim_v=40 causal=1 "
        "window_left=50 softcap=20 alibi=1 bias=1hqk dbias=1 sinks=1 dsinks=1 dropout_p=0.2 dlse=1 "
        "deterministic=1 seqused_k=1",
        "packed=1 batch=4 tail=3 seqlen_q=80 seqlen_k=90 num_heads_q=2 num_heads_k=1 head_dim=64 "
        "head_dim_v=64 "
        "seqused_q=1 bias=bhqk dbias=1 sinks=1 dsinks=1 dropout_p=0.1 alibi=2 seed=3"})
    expect_right_exactly(Tensors(forced(line)), expect_right);
}

TEST_P(Sanitizer, OddEverything) {
  for (const char* line :
       {"seqlen_q=33 seqlen_k=47 num_heads_q=3 num_heads_k=3 head_dim=37 head_dim_v=51 q_layout=misaligned "
        "k_layout=misaligned v_layout=misaligned o_layout=misaligned dq_layout=misaligned "
        "dk_layout=misaligned "
        "dv_layout=misaligned dout_layout=misaligned lse_layout=misaligned",
        "seqlen_q=1 seqlen_k=1 head_dim=1 head_dim_v=1", "seqlen_q=3 seqlen_k=0 head_dim=8 head_dim_v=8"})
    expect_right_exactly(Tensors(forced(line)), expect_right);
}

}  // namespace
}  // namespace tessera::verify
