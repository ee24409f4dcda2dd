// What calls on a Hopper GPU ask of the driver, on a fake one: which kernel, its grid and its tensor maps.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "cuda/driver/driver.h"
#include "fake_cuda.h"
#include "tessera/tessera.hpp"

namespace tessera::cuda {
namespace {

fake::Control& fake_driver() {
  void* library = ::dlopen(TESSERA_FAKE_CUDA, RTLD_NOW);
  return *reinterpret_cast<fake::Control* (*)()>(::dlsym(library, "fake_control"))();
}

// Never read: only the addresses matter.
void* address(int tensor, int offset = 0) {
  return reinterpret_cast<void*>(0x10000000ULL * static_cast<unsigned>(tensor + 1) +
                                 static_cast<unsigned>(offset));
}

// (batch, seqlen, heads, dim), compact, on the device of compute capability 9.0.
Forward call_of(std::int64_t seqlen, std::int64_t head_dim, std::int64_t head_dim_v) {
  const auto tensor = [&](int number, std::int64_t heads, std::int64_t dim) {
    Tensor t(address(number), DType::bfloat16, {2, seqlen, heads, dim});
    t.device = {kDLCUDA, 1};
    return t;
  };
  Forward call;
  call.q = tensor(0, 8, head_dim);
  call.k = tensor(1, 2, head_dim);
  call.v = tensor(2, 2, head_dim_v);
  call.o = tensor(3, 8, head_dim_v);
  return call;
}

Backward backward_of(std::int64_t seqlen, std::int64_t head_dim, std::int64_t head_dim_v) {
  const Forward forward = call_of(seqlen, head_dim, head_dim_v);
  const auto at = [](int number, const Tensor& like) {
    Tensor t = like;
    t.data = address(number);
    return t;
  };
  Backward call;
  call.q = forward.q;
  call.k = forward.k;
  call.v = forward.v;
  call.o = forward.o;
  call.lse = Tensor(address(4), DType::float32, {2, 8, seqlen});
  call.lse.device = forward.q.device;
  call.dout = at(5, forward.o);
  call.dq = at(6, forward.q);
  call.dk = at(7, forward.k);
  call.dv = at(8, forward.v);
  call.workspace = {address(9), workspace_size(call).or_throw()};
  return call;
}

class HopperLaunch : public testing::Test {
 protected:
  void SetUp() override {
    if (compiler_version().empty()) GTEST_SKIP() << "no NVRTC";
  }
};

std::string ran(const Forward& call) {
  fake_driver().maps = fake_driver().launches = 0;
  const Status status = forward(call);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(fake_driver().launches, 1);
  return last_kernel();
}

void expect_ran(const Backward& call, int maps) {
  fake_driver().maps = fake_driver().launches = 0;
  const Status status = backward(call);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(fake_driver().launches, 3);
  EXPECT_EQ(last_kernel(), "cuda_sm90");
  EXPECT_EQ(fake_driver().maps, maps);
}

void expect_map(const fake::Control::Map& map, int tensor, std::int64_t seqlen, unsigned long long heads,
                unsigned long long dim, unsigned box_cols, unsigned box_rows) {
  EXPECT_EQ(map.data, address(tensor));
  EXPECT_EQ(map.extents[0], dim);
  EXPECT_EQ(map.extents[1], static_cast<unsigned long long>(seqlen));
  EXPECT_EQ(map.extents[2], heads);
  EXPECT_EQ(map.extents[3], 2U);
  EXPECT_EQ(map.strides[0], heads * dim * 2);
  EXPECT_EQ(map.strides[1], dim * 2);
  EXPECT_EQ(map.strides[2], static_cast<unsigned long long>(seqlen) * heads * dim * 2);
  EXPECT_EQ(map.box[0], box_cols);
  EXPECT_EQ(map.box[1], box_rows);
  EXPECT_EQ(map.box[2], 1U);
  EXPECT_EQ(map.box[3], 1U);
  EXPECT_EQ(map.swizzle, box_cols == 64 ? 3 : 2);
}

TEST_F(HopperLaunch, MapsAreOfTheTensorsAndTheTiles) {
  Forward call = call_of(1000, 128, 96);
  call.options.causal = true;
  EXPECT_EQ(ran(call), "cuda_sm90");
  const fake::Control& driver = fake_driver();
  EXPECT_EQ(driver.blocks, 96U);  // 6 tiles of each head
  EXPECT_EQ(driver.threads, 512U);
  ASSERT_EQ(driver.maps, 4);
  expect_map(driver.map[0], 0, 1000, 8, 128, 64, 64);
  expect_map(driver.map[1], 1, 1000, 2, 128, 64, 64);
  expect_map(driver.map[2], 2, 1000, 2, 96, 32, 64);
  expect_map(driver.map[3], 3, 1000, 8, 96, 32, 16);
}

TEST_F(HopperLaunch, WhatTmaCannotCopyRunsOnTheOtherKernel) {
  Forward odd = call_of(64, 60, 64);
  EXPECT_EQ(ran(odd), "cuda_sm80");
  Forward late = call_of(64, 64, 64);
  late.k.data = address(1, 2);
  EXPECT_EQ(ran(late), "cuda_sm80");
  late.options.kernel = "cuda_sm90";
  EXPECT_NE(forward(late).message().find("k does not begin at a multiple of 16 bytes"), std::string::npos)
      << forward(late).message();
  Forward expanded = call_of(64, 64, 64);
  expanded.v.stride[0] = 0;
  EXPECT_EQ(ran(expanded), "cuda_sm80");
}

// o needs no map: it can be stored without.
TEST_F(HopperLaunch, AnOutputThatTmaCannotStore) {
  Forward call = call_of(64, 64, 64);
  call.o.data = address(3, 2);
  EXPECT_EQ(ran(call), "cuda_sm90");
  EXPECT_EQ(fake_driver().maps, 3);
}

TEST_F(HopperLaunch, NoKeysAtAll) {
  Forward call = call_of(64, 64, 64);
  for (Tensor* tensor : {&call.k, &call.v}) {
    tensor->shape[1] = 0;
    tensor->data = nullptr;
  }
  EXPECT_EQ(ran(call), "cuda_sm90");
  EXPECT_EQ(fake_driver().map[1].extents[1], 1U);
  EXPECT_NE(fake_driver().map[1].data, nullptr);
}

TEST_F(HopperLaunch, BackwardsMapsAreOfTheTensorsAndTheTiles) {
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    SCOPED_TRACE(head_dim);
    const unsigned cols = head_dim == 96 ? 32 : 64, rows = head_dim == 64 ? 128 : 64,
                   keys = head_dim > 128 ? 64 : 128;
    const auto dim = static_cast<unsigned long long>(head_dim);
    expect_ran(backward_of(1000, head_dim, head_dim), 4);
    const fake::Control& driver = fake_driver();
    expect_map(driver.map[0], 0, 1000, 8, dim, cols, rows);
    expect_map(driver.map[1], 1, 1000, 2, dim, cols, keys);
    expect_map(driver.map[2], 2, 1000, 2, dim, cols, keys);
    expect_map(driver.map[3], 5, 1000, 8, dim, cols, rows);
  }
}

// (batch, 1, 32, 128) against (batch, room, 8, 128).
Decode decode_of(std::int64_t batch, std::int64_t room, int device) {
  const auto on = [&](Tensor t) {
    t.device = {kDLCUDA, device};
    return t;
  };
  Decode call;
  call.q = on({address(0), DType::bfloat16, {batch, 1, 32, 128}});
  call.k_cache = on({address(1), DType::bfloat16, {batch, room, 8, 128}});
  call.v_cache = on({address(2), DType::bfloat16, {batch, room, 8, 128}});
  call.o = on({address(3), DType::bfloat16, {batch, 1, 32, 128}});
  call.cache_seqlens = on({address(4), DType::int32, {batch}});
  call.workspace = {address(9), workspace_size(call).or_throw()};
  return call;
}

TEST_F(HopperLaunch, DecodeJoinsItsSplitsInOneLaunchOrInTwo) {
  const auto launches_of = [](const Decode& call) {
    fake_driver().launches = fake_driver().early = 0;
    const Status status = decode(call);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(fake_driver().early, fake_driver().launches);
    return fake_driver().launches;
  };
  Decode call = decode_of(1, 2048, 1);
  EXPECT_EQ(call.workspace.bytes, 0u);
  EXPECT_EQ(launches_of(call), 1);
  EXPECT_EQ(last_kernel(), "cuda_sm90");
  EXPECT_EQ(fake_driver().blocks, 64U);
  EXPECT_EQ(fake_driver().threads, 128U);

  call.options.kernel = "cuda_sm80";
  call.workspace.bytes = workspace_size(call).or_throw();
  EXPECT_GT(call.workspace.bytes, 0u);
  EXPECT_EQ(launches_of(call), 2);
  EXPECT_EQ(last_kernel(), "cuda_sm80");

  // One block: nothing to join.
  call.options.max_seqlen_k = 64;
  EXPECT_EQ(workspace_size(call).or_throw(), 0u);
  EXPECT_EQ(launches_of(call), 1);
  EXPECT_EQ(fake_driver().blocks, 8U);

  call.k_new = call.v_new = Tensor(address(5), DType::bfloat16, {1, 1, 8, 128});
  call.k_new.device = call.v_new.device = {kDLCUDA, 1};
  EXPECT_EQ(launches_of(call), 2);
}

TEST_F(HopperLaunch, BackwardWithoutMapsIsTheOtherKernels) {
  Backward expanded = backward_of(64, 64, 64);
  expanded.dout.stride[0] = 0;
  expect_ran(expanded, 0);
}

// Its tensors have no tiles for Hopper's kernel: the one of every GPU runs, once it is prepared without
// compiling.
TEST_F(HopperLaunch, MergeStates) {
  const auto tensor = [](int number, DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor t(address(number), dtype, shape);
    t.device = {kDLCUDA, 1};
    return t;
  };
  MergeStates call;
  call.o_a = tensor(0, DType::bfloat16, {2, 5, 8, 64});
  call.lse_a = tensor(1, DType::float32, {2, 8, 5});
  call.o_b = tensor(2, DType::float32, {2, 5, 8, 64});
  call.lse_b = tensor(3, DType::float32, {2, 8, 5});
  call.o = tensor(4, DType::float16, {2, 5, 8, 64});
  fake_driver().launches = 0;
  ASSERT_TRUE(prepare(call).ok()) << prepare(call).message();
  EXPECT_EQ(fake_driver().launches, 0);
  ASSERT_TRUE(merge_states(call).ok()) << merge_states(call).message();
  EXPECT_EQ(fake_driver().launches, 1);
  EXPECT_EQ(last_kernel(), "cuda_sm80");
}

}  // namespace
}  // namespace tessera::cuda
