// merge_states against the oracle, and of two halves of the keys against the whole.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/decode_kernel_test.h"
#include "reference/decode.h"

namespace tessera::verify {
namespace {

using Merge = KernelTest;
// Those that have it; the others are refused.
std::vector<KernelInfo> merging(bool having) {
  std::vector<KernelInfo> some;
  for (const KernelInfo& kernel : kernels()) {
    const bool of_bfloat16 = kernel.name.starts_with("cpu_amx") || kernel.name == "cpu_avx512_bf16";
    const bool has = kernel.name == "cuda_sm80" || (kernel.device == "cpu" && !of_bfloat16);
    if (has == having) some.push_back(kernel);
  }
  return some;
}
INSTANTIATE_TEST_SUITE_P(Kernels, Merge, testing::ValuesIn(merging(true)), kernel_name);

Status run_merge(const MergeStates& call) {
  return on_gpu(call.options.kernel) ? run_mirrored(call, merge_states) : merge_states(call);
}

struct MergeWorld {
  Buffer o_a, lse_a, o_b, lse_b, o, lse;
  MergeStates call;
  bool packed;

  MergeWorld(DType a, DType b, DType to, bool is_packed, std::int64_t dim = 37) : packed(is_packed) {
    std::mt19937_64 random(3);
    std::normal_distribution<double> normal;
    const auto tokens = [&](DType dtype, Buffer::Role role) {
      return Buffer(role, dtype,
                    packed ? Tensor(nullptr, dtype, {7, 3, dim}) : Tensor(nullptr, dtype, {2, 7, 3, dim}), 0);
    };
    const auto rows = [&](Buffer::Role role) {
      return Buffer(
          role, DType::float32,
          packed ? Tensor(nullptr, DType::float32, {3, 7}) : Tensor(nullptr, DType::float32, {2, 3, 7}), 0);
    };
    o_a = tokens(a, Buffer::Role::input);
    o_b = tokens(b, Buffer::Role::input);
    lse_a = rows(Buffer::Role::input);
    lse_b = rows(Buffer::Role::input);
    o = tokens(to, Buffer::Role::output);
    lse = rows(Buffer::Role::output);
    for (Buffer* buffer : {&o_a, &o_b, &lse_a, &lse_b}) {
      for (std::int64_t i = 0; i < buffer->size(); ++i) buffer->set(i, normal(random));
    }
    const double none = -std::numeric_limits<double>::infinity();
    lse_a.set(0, none);
    lse_b.set(1, none);
    lse_a.set(2, none);
    lse_b.set(2, none);
    lse_a.set(3, 3000);
    lse_b.set(4, -3000);
    call = {o_a.tensor(), lse_a.tensor(), o_b.tensor(), lse_b.tensor(), o.tensor(), lse.tensor(), {}};
  }
};

TEST(MergeStates, OtherKernelsAreRefused) {
  for (const KernelInfo& kernel : merging(false)) {
    MergeWorld world(DType::bfloat16, DType::bfloat16, DType::bfloat16, false);
    world.call.options.kernel = kernel.name;
    EXPECT_EQ(merge_states(world.call).code(), Code::unsupported) << kernel.name;
    EXPECT_TRUE(world.o.unwritten(0)) << kernel.name;
  }
}

TEST_P(Merge, GivesTheJointResult) {
  const DType types[] = {DType::float32, DType::float16, DType::bfloat16};
  for (const bool packed : {false, true}) {
    for (const DType a : types) {
      for (const DType to : types) {
        MergeWorld world(a, types[static_cast<int>(to)], to, packed);
        world.call.options.kernel = GetParam().name;
        const Status status = run_merge(world.call);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(last_kernel(), GetParam().name);
        const Problem problem = validate(world.call).or_throw();
        const reference::Outputs expected = reference::merge_states(problem);
        for (std::int64_t i = 0; i < world.lse.size(); ++i) {
          const double exact = expected.lse[i], actual = world.lse.get(i);
          EXPECT_TRUE(actual == exact || std::abs(actual - exact) <= 1e-5 + 1e-5 * std::abs(exact)) << i;
        }
        const double unit = to == DType::bfloat16 ? 0x1p-8 : to == DType::float16 ? 0x1p-11 : 0x1p-20;
        for (std::int64_t i = 0; i < world.o.size(); ++i)
          EXPECT_NEAR(world.o.get(i), expected.o[i], 1e-6 + unit * std::abs(expected.o[i])) << i;
        EXPECT_TRUE(world.o.guards_intact() && world.lse.guards_intact());
      }
    }
  }
}

// A side without keys may hold anything in its o.
TEST_P(Merge, TheOtherSideOfAnEmptyOneIsKept) {
  MergeWorld world(DType::float32, DType::float32, DType::float32, true);
  world.call.options.kernel = GetParam().name;
  for (std::int64_t c = 0; c < 37; ++c)
    world.o_a.set(c, std::nan(""));  // row 0 of head 0, where lse_a is -inf
  const Status status = run_merge(world.call);
  ASSERT_TRUE(status.ok()) << status.message();
  for (std::int64_t c = 0; c < 37; ++c) EXPECT_EQ(world.o.get(c), world.o_b.get(c));
  EXPECT_EQ(world.lse.get(0), world.lse_b.get(0));
  EXPECT_EQ(world.lse.get(1), world.lse_a.get(1));
  EXPECT_EQ(world.lse.get(2), -std::numeric_limits<double>::infinity());
}

TEST_P(Merge, InPlace) {
  MergeWorld apart(DType::float32, DType::bfloat16, DType::float32, false);
  MergeWorld together(DType::float32, DType::bfloat16, DType::float32, false);
  apart.call.options.kernel = together.call.options.kernel = GetParam().name;
  together.call.o = together.call.o_a;
  together.call.lse = together.call.lse_a;
  const Status status = run_merge(apart.call);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(run_merge(together.call).ok());
  EXPECT_EQ(differences(apart.call.o, together.call.o), 0);
  EXPECT_EQ(differences(apart.call.lse, together.call.lse), 0);
}

// Rows that are whole pieces of 16 bytes are read as such.
TEST_P(Merge, AlignedRows) {
  const DType types[] = {DType::float32, DType::float16, DType::bfloat16};
  for (const DType a : types) {
    for (const DType to : types) {
      MergeWorld world(a, types[(static_cast<int>(a) + 1) % 3], to, false, 200);
      world.call.options.kernel = GetParam().name;
      const Status status = run_merge(world.call);
      ASSERT_TRUE(status.ok()) << status.message();
      const reference::Outputs expected = reference::merge_states(validate(world.call).or_throw());
      const double unit = to == DType::bfloat16 ? 0x1p-8 : to == DType::float16 ? 0x1p-11 : 0x1p-20;
      for (std::int64_t i = 0; i < world.o.size(); ++i)
        EXPECT_NEAR(world.o.get(i), expected.o[i], 1e-6 + unit * std::abs(expected.o[i])) << i;
    }
  }
}

// Attention to the two halves of the keys, merged, is attention to all of them.
TEST_P(Merge, TwoHalvesOfTheKeys) {
  DecodeCase c;
  c.cache_seqlens = {200};
  c.num_heads_q = 3;
  c.num_heads_k = 3;
  const DecodeTensors tensors(c);
  Decode call = tensors.call();
  Forward whole{call.q, slice(call.k_cache, 0, 0, 1), slice(call.v_cache, 0, 0, 1), call.o, call.lse, {}, {}};
  whole.k = slice(whole.k, 1, 0, 200);
  whole.v = slice(whole.v, 1, 0, 200);
  ASSERT_TRUE(run_call<Forward>(whole, forward).ok());
  Owned o_a(call.o), o_b(call.o), lse_a(call.lse), lse_b(call.lse), o(call.o), lse(call.lse);
  Forward first = whole, second = whole;
  first.k = slice(whole.k, 1, 0, 77);
  first.v = slice(whole.v, 1, 0, 77);
  first.o = o_a.tensor;
  first.lse = lse_a.tensor;
  second.k = slice(whole.k, 1, 77, 123);
  second.v = slice(whole.v, 1, 77, 123);
  second.o = o_b.tensor;
  second.lse = lse_b.tensor;
  ASSERT_TRUE(run_call<Forward>(first, forward).ok() && run_call<Forward>(second, forward).ok());
  MergeStates merge{o_a.tensor, lse_a.tensor, o_b.tensor, lse_b.tensor, o.tensor, lse.tensor, {}};
  merge.options.kernel = GetParam().name;
  const Status status = run_merge(merge);
  ASSERT_TRUE(status.ok()) << status.message();
  for (std::int64_t i = 0; i < size_of(o.tensor); ++i) {
    float joint = 0, merged = 0;
    std::memcpy(&joint, element_of(call.o, i), 4);
    std::memcpy(&merged, element_of(o.tensor, i), 4);
    EXPECT_NEAR(joint, merged, 2e-6);
  }
}

}  // namespace
}  // namespace tessera::verify
