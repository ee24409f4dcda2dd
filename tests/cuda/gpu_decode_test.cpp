// Decode, what only a GPU can show: graphs with lengths that change, many repeats. Its cases run on a GPU
// through verify/mirror.h, in tessera_cpu_test.
#include <algorithm>
#include <functional>

#include "cuda/resident.h"
#include "verify/decode.h"

namespace tessera::verify {
namespace {

using GpuDecode = GpuTest;
using DecodeSanitizer = GpuTest;
TESSERA_FOR_EACH_GPU_KERNEL(GpuDecode);
TESSERA_FOR_EACH_GPU_KERNEL(DecodeSanitizer);

// A case of decode in device memory.
class ResidentDecode {
 public:
  ResidentDecode(const DecodeTensors& host, void* stream) : call(as_planned(host.call())) {
    call.options.stream = stream;
    for (const Argument& argument : arguments(call)) {
      if (!argument.tensor->given()) continue;
      const std::size_t bytes = static_cast<std::size_t>(bytes_spanned(*argument.tensor).value_or(0));
      memory_.emplace_back(bytes);
      EXPECT_NE(memory_.back().data(), nullptr) << memory_.back().why_not();
      const_cast<Tensor*>(argument.tensor)->data = memory_.back().data();
    }
    const Result<std::size_t> bytes = workspace_size(call);
    expect_ok(bytes.status());
    workspace_.emplace(bytes.ok() ? bytes.value() : 0);
    call.workspace = {workspace_->data(), workspace_->bytes()};
    upload(host);
    expect_ok(cuda::synchronize(stream));
  }

  Decode call;

  void upload(const DecodeTensors& host) const {
    copy(host, [&](std::byte* there, std::byte* here, std::size_t bytes) {
      return cuda::copy_to_device(there, here, bytes, call.options.stream);
    });
    if (workspace_->bytes() != 0)
      expect_ok(cuda::fill(workspace_->data(), 0xFF, workspace_->bytes(), call.options.stream));
  }
  void download(const DecodeTensors& host) const {
    copy(host, [&](std::byte* there, std::byte* here, std::size_t bytes) {
      return cuda::copy_to_host(here, there, bytes, call.options.stream);
    });
    expect_ok(cuda::synchronize(call.options.stream));
  }

 private:
  template <class Body>
  void copy(const DecodeTensors& host, Body body) const {
    const Decode on_host = host.call();
    std::size_t i = 0;
    for (const Argument& argument : arguments(on_host)) {
      if (!argument.tensor->given()) continue;
      const DeviceMemory& memory = memory_[i++];
      if (memory.bytes() != 0)
        expect_ok(body(memory.data(), static_cast<std::byte*>(argument.tensor->data), memory.bytes()));
    }
  }

  std::vector<DeviceMemory> memory_;
  std::optional<DeviceMemory> workspace_;
};

DecodeCase decode_case(const std::string& kernel) {
  DecodeCase c;
  c.cache_seqlens = {2000, 100, 0, 700};
  c.num_heads_q = 8;
  c.num_heads_k = 2;
  c.dtype = c.o_dtype = DType::bfloat16;
  c.kernel = kernel;
  return c;
}

// The host knows no lengths: a captured call serves whatever they become.
TEST_P(GpuDecode, ADecodeGraphReplaysWithOtherLengths) {
  for (const std::int64_t page : {0, 16}) {
    for (const bool appends : {false, true}) {
      DecodeCase c = decode_case(GetParam().name);
      c.page_size = page;
      c.seqlen_new = appends ? 1 : 0;
      c.rotary_dim = appends ? 64 : 0;
      DecodeTensors tensors(c);
      const Stream stream;
      ResidentDecode device(tensors, stream.get());
      expect_ok(prepare(device.call));
      const Graph graph(stream.get(), [&] { expect_ok(decode(device.call)); });
      for (const int step : {0, 1, 2}) {
        SCOPED_TRACE("page " + std::to_string(page) + ", step " + std::to_string(step));
        // Shorter each time: what was in use is other data, but no padding.
        for (std::int32_t& length : tensors.settings.cache_seqlens) length /= step + 1;
        tensors.set_lengths();
        tensors.o.poison();
        tensors.lse.poison();
        EXPECT_EQ(judge(tensors,
                        [&] {
                          device.upload(tensors);
                          graph.launch(stream.get());
                          device.download(tensors);
                          return Status();
                        }),
                  "");
      }
    }
  }
}

// What is worked out early counts only if it still holds when the kernel before has ended.
TEST_P(GpuDecode, LengthsAndPagesMayChangeUntilTheKernelBeforeHasEnded) {
  struct Late {
    std::byte* to[2];
    const std::byte* from[2];
    int numbers[2];
  };
  constexpr const char* text = R"(
struct Late { int* to[2]; const int* from[2]; int numbers[2]; };
extern "C" __global__ void tessera_test_late(const __grid_constant__ Late late) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const long long begin = clock64();
  while (clock64() - begin < 1000000) {}  // until those that follow are there
  for (int which = 0; which < 2; ++which) {
    for (int i = threadIdx.x; i < late.numbers[which]; i += blockDim.x) late.to[which][i] = late.from[which][i];
  }
})";
  const Result<cuda::Context> context = cuda::Context::enter(0);
  ASSERT_TRUE(context.ok()) << context.status().message();
  const auto kernel = cuda::load(context.value(), "tessera_test_late", 0, [&] { return std::string(text); });
  ASSERT_TRUE(kernel.ok()) << kernel.status().message();
  const auto expect_right = [&](const DecodeCase& c, std::uint8_t before) {
    DecodeTensors tensors(c);
    const Stream stream;
    const ResidentDecode device(tensors, stream.get());
    expect_ok(prepare(device.call));
    const auto run_late = [&] {
      device.upload(tensors);
      Late late{};
      std::vector<DeviceMemory> right;
      for (const auto& [there, here] : {std::pair(&device.call.cache_seqlens, &tensors.cache_seqlens),
                                        std::pair(&device.call.page_table, &tensors.page_table)}) {
        if (!there->given()) continue;
        const std::size_t bytes = static_cast<std::size_t>(here->size()) * sizeof(std::int32_t);
        right.emplace_back(bytes);
        expect_ok(cuda::copy_to_device(right.back().data(), here->tensor().data, bytes, stream.get()));
        expect_ok(cuda::fill(there->data, before, bytes, stream.get()));
        const std::size_t which = right.size() - 1;
        late.to[which] = static_cast<std::byte*>(there->data);
        late.from[which] = right.back().data();
        late.numbers[which] = static_cast<int>(here->size());
      }
      expect_ok(cuda::launch(*kernel.value(), 1, 128, 0, stream.get(), &late));
      expect_ok(decode(device.call));
      device.download(tensors);
      return Status();
    };
    EXPECT_EQ(judge(tensors, run_late), "");
  };
  for (const std::int64_t page : {0, 1, 16}) {
    for (const bool appends : {false, true}) {
      for (const DType dtype : {DType::bfloat16, DType::float8_e4m3fn}) {
        for (const int before : {0x00, 0x7F}) {  // none, or all there is room for
          SCOPED_TRACE("page " + std::to_string(page) + (appends ? ", appends, " : ", ") +
                       std::to_string(before));
          DecodeCase c = decode_case(GetParam().name);
          c.cache_dtype = dtype;
          c.page_size = page;
          c.seqlen_new = appends ? 1 : 0;
          c.rotary_dim = appends ? 64 : 0;
          expect_right(c, static_cast<std::uint8_t>(before));
        }
      }
    }
  }
}

TEST_P(GpuDecode, DecodeGivesTheSameBitsFiftyTimes) {
  DecodeTensors tensors(decode_case(GetParam().name));
  const Stream stream;
  const ResidentDecode device(tensors, stream.get());
  std::optional<AlignedBytes> first;
  for (int i = 0; i < 50; ++i) {
    tensors.o.poison();
    device.upload(tensors);
    expect_ok(decode(device.call));
    device.download(tensors);
    if (!first) first = tensors.o.bytes();
    EXPECT_EQ(tensors.o.bytes(), *first) << i;
  }
}

// In a large batch a block has many parts of a sequence, alone each has its own.
TEST_P(GpuDecode, ALargeBatchHasTheBitsOfEachSequenceAlone) {
  for (const std::int64_t heads_q : {8, 20}) {
    DecodeCase c = decode_case(GetParam().name);
    c.num_heads_q = heads_q;
    c.head_dim = c.head_dim_v = 128;
    const std::vector<std::int32_t> lengths = c.cache_seqlens;
    for (int i = 0; i < 16; ++i) {
      for (const std::int32_t length : lengths) c.cache_seqlens.push_back(std::max(length - 37 * i, 0));
    }
    DecodeTensors tensors(c);
    const Stream stream;
    const ResidentDecode device(tensors, stream.get());
    expect_ok(decode(device.call));
    device.download(tensors);
    const AlignedBytes o = tensors.o.bytes(), lse = tensors.lse.bytes();
    tensors.o.poison();
    tensors.lse.poison();
    device.upload(tensors);
    for (std::int64_t b = 0; b < tensors.batch(); ++b) {
      Decode one = device.call;
      for (Tensor* tensor : {&one.q, &one.k_cache, &one.v_cache, &one.o, &one.lse, &one.cache_seqlens})
        *tensor = slice(*tensor, 0, b, 1);
      expect_ok(decode(one));
    }
    device.download(tensors);
    EXPECT_EQ(tensors.o.bytes(), o) << heads_q;
    EXPECT_EQ(tensors.lse.bytes(), lse) << heads_q;
  }
}

// The sequence's rows of a packed tensor as a batch of one; queries: which dimension they are.
Tensor rows_alone(const Tensor& packed, int queries, std::int64_t first, std::int64_t rows) {
  const Tensor part = slice(packed, queries, first, rows);
  Tensor one = part;
  one.rank = part.rank + 1;
  one.shape[0] = one.stride[0] = 1;
  std::copy_n(part.shape.begin(), part.rank, one.shape.begin() + 1);
  std::copy_n(part.stride.begin(), part.rank, one.stride.begin() + 1);
  return one;
}

// Alone the blocks of a short sequence are a cluster where there are any; beside a prompt no warp joins
// parts.
TEST_P(GpuDecode, APackedBatchHasTheBitsOfEachSequenceAlone) {
  for (const std::int64_t head_dim : {64, 128}) {
    DecodeCase c = decode_case(GetParam().name);
    c.cache_seqlens = {2000, 100, 1300, 700, 33};
    c.lengths_q = {1, 60, 2, 1, 1};
    c.head_dim = c.head_dim_v = head_dim;
    c.causal = true;
    DecodeTensors tensors(c);
    const Stream stream;
    const ResidentDecode device(tensors, stream.get());
    expect_ok(decode(device.call));
    device.download(tensors);
    const AlignedBytes o = tensors.o.bytes(), lse = tensors.lse.bytes();
    tensors.o.poison();
    tensors.lse.poison();
    device.upload(tensors);
    std::vector<DeviceMemory> workspaces;
    std::int64_t first = 0;
    for (std::size_t b = 0; b < c.lengths_q.size(); first += c.lengths_q[b++]) {
      Decode one = device.call;
      one.options.cu_seqlens_q = {};
      one.q = rows_alone(one.q, 0, first, c.lengths_q[b]);
      one.o = rows_alone(one.o, 0, first, c.lengths_q[b]);
      one.lse = rows_alone(one.lse, 1, first, c.lengths_q[b]);
      for (Tensor* tensor : {&one.k_cache, &one.v_cache, &one.cache_seqlens})
        *tensor = slice(*tensor, 0, static_cast<std::int64_t>(b), 1);
      workspaces.emplace_back(workspace_size(one).or_throw());  // alone it may be more than of all together
      one.workspace = {workspaces.back().data(), workspaces.back().bytes()};
      if (one.workspace.bytes != 0)
        expect_ok(cuda::fill(one.workspace.data, 0xFF, one.workspace.bytes, stream.get()));
      expect_ok(decode(one));
    }
    device.download(tensors);
    EXPECT_EQ(tensors.o.bytes(), o) << head_dim;
    EXPECT_EQ(tensors.lse.bytes(), lse) << head_dim;
  }
}

// In a tile of two queries.
TEST_P(GpuDecode, SequencesOfAFewQueriesInAPackedBatch) {
  for (const std::int32_t keys : {150, 1500}) {  // of a cluster, if there are any
    DecodeCase c = decode_case(GetParam().name);
    c.cache_seqlens = {keys, keys / 2, 0, keys - 3};
    c.lengths_q = {1, 2, 1, 0};
    c.head_dim = c.head_dim_v = 128;
    EXPECT_EQ(judge(c), "") << keys;
  }
}

TEST_P(DecodeSanitizer, ContiguousAndPaged) {
  DecodeCase c = decode_case(GetParam().name);
  for (const std::int64_t page : {0, 3}) {
    c.page_size = page;
    c.seqlen_new = page;
    EXPECT_EQ(judge(c), "") << page;
  }
}

TEST_P(DecodeSanitizer, SingleTokensBesideAPrompt) {
  DecodeCase c = decode_case(GetParam().name);
  c.lengths_q = {1, 60, 0, 1};
  EXPECT_EQ(judge(c), "");
}

}  // namespace
}  // namespace tessera::verify
