// Sizes that break 32-bit offsets, 16-bit grids and quadratic memory.
#include <sys/mman.h>

#include <memory>

#include "cpu/kernel_test.h"

namespace tessera::verify {
namespace {

using Size = KernelTest;
TESSERA_FOR_EACH_KERNEL(Size);

TEST_P(Size, MoreThan65535Heads) {
  expect_right(parsed(
      "batch=33000 num_heads_q=2 num_heads_k=1 seqlen_q=1 seqlen_k=2 head_dim=3 head_dim_v=2 threads=2"));
  expect_right(
      parsed("num_heads_q=66000 num_heads_k=33000 seqlen_q=1 seqlen_k=2 head_dim=2 head_dim_v=2 causal=1"));
}

TEST_P(Size, ManyPackedSequences) {
  expect_right(
      parsed("packed=1 batch=80000 seqlen_q=1 seqlen_k=2 head_dim=2 head_dim_v=2 tail=1 causal=1 threads=2"));
}

TEST_P(Size, MoreThanAMillionTokens) {
  expect_right(parsed("seqlen_q=1 seqlen_k=1100000 head_dim=2 head_dim_v=1 causal=1 threads=2"));
  expect_right(
      parsed("seqlen_q=1100000 seqlen_k=2 head_dim=1 head_dim_v=2 alignment=top_left causal=1 threads=2"));
}

// Memory that is promised but, except for the pages that are touched, not there.
class Sparse {
 public:
  explicit Sparse(std::size_t bytes) : bytes_(bytes) {
    data_ =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (given()) ::munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  [[nodiscard]] bool given() const { return data_ != MAP_FAILED; }
  [[nodiscard]] void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

// Every tensor's stride over one dimension is 2^30 elements, so that the last entry lies beyond 2^31. The
// bits are those of the compact tensors.
TEST_P(Size, LargeStrides) {
  if (on_gpu()) GTEST_SKIP() << "no gigabytes are copied to and fro; Gpu.LargeStrides has them there";
  constexpr std::int64_t large = std::int64_t{1} << 30;
  Tensors compact(forced(
      parsed("batch=3 seqlen_q=3 seqlen_k=3 num_heads_q=3 num_heads_k=3 head_dim=8 head_dim_v=8 threads=1")));
  (void)run_both(compact);
  for (int dimension = 0; dimension < 3; ++dimension) {
    SCOPED_TRACE(dimension);
    std::vector<std::unique_ptr<Sparse>> memory;
    const auto spread = [&](const Tensor& t) {
      memory.push_back(
          std::make_unique<Sparse>(static_cast<std::size_t>(2 * large + 4096) * t.dtype.bits / 8));
      Tensor far = t;
      far.stride[dimension] = large;
      far.data = memory.back()->data();
      return far;
    };
    Backward call = compact.backward_call();
    for (Tensor* t : {&call.q, &call.k, &call.v, &call.dout}) {
      const Tensor near = *t;
      *t = spread(near);
      if (!memory.back()->given()) GTEST_SKIP() << "mmap refuses 2^31 elements without reservation";
      copy_elements(near, *t);
    }
    for (Tensor* t : {&call.o, &call.dq, &call.dk, &call.dv}) {
      *t = spread(*t);
      if (!memory.back()->given()) GTEST_SKIP() << "mmap refuses 2^31 elements without reservation";
    }
    const Owned lse(call.lse);
    call.lse = lse.tensor;
    const Status forward_status =
        run_call<Forward>({call.q, call.k, call.v, call.o, call.lse, call.options, {}}, forward);
    ASSERT_TRUE(forward_status.ok()) << forward_status.message();
    EXPECT_EQ(differences(call.o, compact.o.tensor()), 0);
    EXPECT_EQ(differences(call.lse, compact.lse.tensor()), 0);
    const Status backward_status = run_call<Backward>(call, backward);
    ASSERT_TRUE(backward_status.ok()) << backward_status.message();
    EXPECT_EQ(differences(call.dq, compact.dq.tensor()), 0);
    EXPECT_EQ(differences(call.dk, compact.dk.tensor()), 0);
    EXPECT_EQ(differences(call.dv, compact.dv.tensor()), 0);
  }
}

}  // namespace
}  // namespace tessera::verify
