// Calls at the edge that are valid, and the normal form that validation brings calls into.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "core/world.h"
#include "verify/tensors.h"

namespace tessera {
namespace {

constexpr std::int64_t i64_max = std::numeric_limits<std::int64_t>::max();
constexpr Base dense = Base::dense, packed = Base::packed;

template <class Call>
void expect_valid(const Call& x) {
  const Result<Problem> problem = validate(x);
  EXPECT_TRUE(problem.ok()) << problem.status().message();
}

// And runs: a workspace of the size that is asked for is enough.
template <class Call>
void expect_runs(const Call& x, Status (*function)(const Call&)) {
  expect_valid(x);
  const Status status = verify::run_call(x, function);
  EXPECT_TRUE(status.ok()) << status.message();
}

struct Good {
  const char* what;
  Base base;
  std::function<void(Parts&)> change;
};

// clang-format off
const std::vector<Good>& good_cases() {
  static const std::vector<Good> cases = {
    {"as it is", dense, [](Parts&) {}},
    {"packed, as it is", packed, [](Parts&) {}},
    {"expanded keys", dense, [](Parts& x) { x.k.stride = {0, 0, 0, 1}; x.v.stride = {0, 12, 0, 1}; }},
    {"expanded queries", packed, [](Parts& x) { x.q.stride = {0, 0, 1}; }},
    {"padded rows", dense, [](Parts& x) { x.k = Tensor(x.world.take(4096), DType::float32, {2, 4, 2, 8}, {200, 40, 11, 1}); }},
    {"heads before rows", dense, [](Parts& x) { x.q.stride = {96, 8, 24, 1}; }},
    {"keys that are values", dense, [](Parts& x) { x.k.shape[3] = x.q.shape[3] = 6; x.v.data = x.k.data; }},
    {"another CPU", dense, [](Parts& x) { x.k.device = {kDLCPU, 1}; }},
    {"largest window", dense, [](Parts& x) { x.options.window_left = x.options.window_right = i64_max; }},
    {"empty window", dense, [](Parts& x) { x.options.window_left = x.options.window_right = 0; }},
    {"causal and a right side", dense, [](Parts& x) { x.options.causal = true; x.options.window_right = 5; }},
    {"top left", dense, [](Parts& x) { x.options.causal = true; x.options.alignment = Alignment::top_left; }},
    {"negative scale", dense, [](Parts& x) { x.options.softmax_scale = -2.0; }},
    {"zero scale", dense, [](Parts& x) { x.options.softmax_scale = 0.0; }},
    {"softcap", dense, [](Parts& x) { x.options.softcap = 30.0; }},
    {"drop nothing", dense, [](Parts& x) { x.options.dropout_p = 0.0; x.options.offset = Philox::max_offset; }},
    {"drop all", dense, [](Parts& x) { x.options.dropout_p = 1.0; x.options.seed = ~0ULL; }},
    {"most threads", dense, [](Parts& x) { x.options.num_threads = 4096; }},
    {"one slope for all heads", dense, [](Parts& x) { x.options.alibi_slopes = Tensor(x.world.take(4), DType::float32, {4}, {0}); }},
    {"slopes for each batch", dense, [](Parts& x) { x.options.alibi_slopes = x.world.make(DType::float32, {2, 4}); }},
    {"slopes for each sequence", packed, [](Parts& x) { x.options.alibi_slopes = x.world.make(DType::float32, {3, 4}); }},
    {"bias (1)", dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {1}); }},
    {"bias (seqlen_k)", dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {4}); }},
    {"bias (1, 4, 3, 1)", dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {1, 4, 3, 1}); }},
    {"full bias", dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {2, 4, 3, 4}); }},
    {"transposed bias", dense, [](Parts& x) { x.options.bias = Tensor(x.world.take(256), DType::float32, {3, 4}, {1, 3}); }},
    {"expanded bias", dense, [](Parts& x) { x.options.bias = Tensor(x.world.take(256), DType::float32, {2, 4, 3, 4}, {0, 0, 4, 1}); }},
    {"packed bias", packed, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {3, 1, 4, 4}); }},
    {"packed bias of a longer max_seqlen", packed, [](Parts& x) {
       x.options.max_seqlen_q = 5;
       x.options.max_seqlen_k = 7;
       x.options.bias = x.world.make(DType::float32, {5, 7});
     }},
    {"sinks, strided", dense, [](Parts& x) { x.options.sinks = Tensor(x.world.take(64), DType::float32, {4}, {3}); }},
    {"seqused", dense, [](Parts& x) { x.options.seqused_q = x.world.ints({0, 3}); x.options.seqused_k = x.world.ints({4, 0}); }},
    {"seqused, packed", packed, [](Parts& x) { x.options.seqused_q = x.world.ints({2, 0, 1}); x.options.seqused_k = x.world.ints({0, 2, 4}); }},
    {"exact max_seqlen", packed, [](Parts& x) { x.options.max_seqlen_q = x.options.max_seqlen_k = 4; }},
    {"all sequences empty", packed, [](Parts& x) { for (int i : {1, 2, 3}) { set(x.options.cu_seqlens_q, i, 0); } }},
    {"no sequence", packed, [](Parts& x) { x.options.cu_seqlens_q.shape[0] = x.options.cu_seqlens_k.shape[0] = 1; }},
    {"seqused of no sequence", packed, [](Parts& x) {
       x.options.cu_seqlens_q.shape[0] = x.options.cu_seqlens_k.shape[0] = 1;
       x.options.seqused_k = Tensor(nullptr, DType::int32, {0});
     }},
  };
  return cases;
}
// clang-format on

TEST(Validation, TakesValidCalls) {
  for (const Good& good : good_cases()) {
    SCOPED_TRACE(good.what);
    World world(good.base);
    Parts parts = parts_of(world, world.forward);
    good.change(parts);
    expect_runs<Forward>(world.forward, forward);

    World other(good.base);
    Parts other_parts = parts_of(other, other.backward);
    good.change(other_parts);
    // The gradients of a changed head_dim have its size.
    other.backward.dq.shape = other.backward.q.shape;
    other.backward.dk.shape = other.backward.k.shape;
    expect_runs<Backward>(other.backward, backward);
  }
}

TEST(Validation, OptionalTensorsMayBeAbsent) {
  World world(dense);
  world.forward.lse = {};
  expect_valid(world.forward);
  world.backward.dlse = {};
  expect_valid(world.backward);
  EXPECT_FALSE(validate(world.forward).value().lse.given());
  EXPECT_FALSE(validate(world.backward).value().dlse.given());
}

TEST(Validation, EmptyTensorsNeedNoMemory) {
  World world(dense);
  Forward x;
  x.q = world.make(DType::float32, {2, 3, 4, 8});
  x.k = Tensor(nullptr, DType::float32, {2, 0, 2, 8});
  x.v = Tensor(nullptr, DType::float32, {2, 0, 2, 6}, {-1, -1, -1, 9});
  x.o = world.make(DType::float32, {2, 3, 4, 6});
  x.options.bias = Tensor(nullptr, DType::float32, {3, 0});
  expect_valid(x);

  for (const std::int64_t batch : {0, 2}) {
    const std::int64_t rows = batch == 0 ? 3 : 0;
    Forward empty;
    empty.q = Tensor(nullptr, DType::float16, {batch, rows, 4, 8});
    empty.k = empty.v = Tensor(nullptr, DType::float16, {batch, rows, 4, 8});
    empty.o = Tensor(nullptr, DType::float16, {batch, rows, 4, 8});
    empty.lse = Tensor(nullptr, DType::float32, {batch, 4, rows});
    expect_valid(empty);
  }
}

TEST(Validation, TakesTheLargestSizes) {
  const auto valid = [](const Forward& x) {
    const Result<Problem> problem = validate(x, Pointers::optional);
    EXPECT_TRUE(problem.ok()) << problem.status().message();
  };
  const auto shaped = [](std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    Forward x;
    x.q = x.k = x.v = x.o = Tensor(nullptr, DType::bfloat16, {batch, rows, heads, dim});
    return x;
  };
  valid(shaped(1, 1, 1, 256));
  valid(shaped(1, 1, 1, 1));
  valid(shaped(1, (1LL << 31) - 1, 8, 128));
  valid(shaped((1LL << 32) - 1, 1, 1, 64));
  valid(shaped(1, 1, (1LL << 32) - 1, 64));
}

TEST(Validation, StridesOfSizeOneAreIgnored) {
  World world(dense);
  Forward& x = world.forward;
  x.q = Tensor(x.q.data, DType::float32, {1, 3, 1, 1}, {-5, 7, i64_max, 99});
  x.k = Tensor(x.k.data, DType::float32, {1, 4, 1, 1}, {i64_max, 2, -1, -1});
  x.v = Tensor(x.v.data, DType::float32, {1, 4, 1, 6}, {0, 6, -1, 1});
  x.o = Tensor(x.o.data, DType::float32, {1, 3, 1, 6}, {0, 6, 0, 1});
  x.lse = Tensor(x.lse.data, DType::float32, {1, 1, 3}, {0, 0, 2});
  const Result<Problem> problem = validate(x);
  ASSERT_TRUE(problem.ok()) << problem.status().message();
  EXPECT_EQ(problem.value().q.batch, 0);
  EXPECT_EQ(problem.value().q.seq, 7);
  EXPECT_EQ(problem.value().q.head, 0);
  EXPECT_EQ(problem.value().k.seq, 2);
  EXPECT_EQ(problem.value().lse.seq, 2);
}

TEST(Validation, SlicesOfOneBufferDoNotAlias) {
  World world(dense);
  Backward& x = world.backward;
  // dq (4 heads), dk and dv (2 each) as slices of one (2, 4, 8, 8) buffer, q, k and v of another.
  const auto slices = [&](Tensor& q, Tensor& k, Tensor& v) {
    auto* buffer = static_cast<float*>(world.take(2 * 4 * 8 * 8 * sizeof(float)));
    q = Tensor(buffer, DType::float32, {2, 4, 4, 8}, {256, 64, 8, 1});
    k = Tensor(buffer + 32, DType::float32, {2, 4, 2, 8}, {256, 64, 8, 1});
    v = Tensor(buffer + 48, DType::float32, {2, 4, 2, 8}, {256, 64, 8, 1});
  };
  slices(x.q, x.k, x.v);
  slices(x.dq, x.dk, x.dv);
  x.o = world.make(DType::float32, {2, 4, 4, 8});
  x.dout = world.make(DType::float32, {2, 4, 4, 8});
  x.lse = world.make(DType::float32, {2, 4, 4});
  x.dlse = {};
  expect_valid(x);
  x.dk.data = x.dv.data;
  EXPECT_EQ(validate(x).status().message(), "dk: shares memory with dv, expected memory of its own");
}

// --- the normal form ---

TEST(Validation, NormalFormOfADenseCall) {
  World world(dense);
  Forward& x = world.forward;
  x.options.causal = true;
  x.options.window_left = 2;
  x.options.bias = world.make(DType::float32, {4, 1, 4});
  x.options.stream = &world;
  const Problem problem = validate(x).or_throw();
  EXPECT_EQ(problem.stream, &world);
  EXPECT_TRUE(problem.on_host());
  EXPECT_EQ(problem.direction, Direction::forward);
  EXPECT_EQ(problem.batch, 2);
  EXPECT_EQ(problem.num_heads_q, 4);
  EXPECT_EQ(problem.num_heads_k, 2);
  EXPECT_EQ(problem.group_size, 2);
  EXPECT_EQ(problem.head_dim, 8);
  EXPECT_EQ(problem.head_dim_v, 6);
  EXPECT_EQ(problem.rows_q, 3);
  EXPECT_EQ(problem.rows_k, 4);
  EXPECT_EQ(problem.max_seqlen_q, 3);
  EXPECT_EQ(problem.max_seqlen_k, 4);
  EXPECT_FALSE(problem.packed);
  EXPECT_DOUBLE_EQ(problem.softmax_scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(problem.window_left, 2);
  EXPECT_EQ(problem.window_right, 0);
  EXPECT_EQ(problem.q.offset(1, 2, 3), 1 * 96 + 2 * 32 + 3 * 8);
  EXPECT_EQ(problem.lse.offset(1, 2, 3), 1 * 12 + 3 * 3 + 2);
  EXPECT_EQ(problem.bias.offset(1, 2, 2, 3), 2 * 4 + 3);
  EXPECT_EQ(problem.bias.extent[0], 1);
  EXPECT_EQ(problem.bias.extent[1], 4);
  EXPECT_EQ(problem.bias.extent[2], 1);
  EXPECT_EQ(problem.bias.extent[3], 4);
  EXPECT_EQ(problem.mask(problem.sequence(0)).shift, 1);
}

TEST(Validation, NormalFormOfAPackedCall) {
  World world(packed);
  Forward& x = world.forward;
  x.options.seqused_k = world.ints({1, 2, 3});
  x.options.alignment = Alignment::top_left;
  const Problem problem = validate(x).or_throw();
  EXPECT_TRUE(problem.packed);
  EXPECT_EQ(problem.batch, 3);
  EXPECT_EQ(problem.rows_q, 7);
  EXPECT_EQ(problem.max_seqlen_q, 4);
  const Sequence sequence = problem.sequence(2);
  EXPECT_EQ(sequence.q_begin, 2);
  EXPECT_EQ(sequence.k_begin, 5);
  EXPECT_EQ(sequence.seqlen_q, 4);
  EXPECT_EQ(sequence.seqlen_k, 3);
  EXPECT_EQ(sequence.allocated_k, 4);
  EXPECT_EQ(problem.mask(sequence).shift, 0);
  EXPECT_EQ(problem.q.offset(2, 3, 1), 3 * 32 + 8);
  EXPECT_EQ(problem.lse.offset(2, 3, 1), 1 * 7 + 3);
}

TEST(Validation, ReadsDLTensors) {
  std::vector<float> memory(64);
  std::int64_t shape[5] = {2, 3, 4, 1, 1};
  DLTensor tensor{memory.data(), {kDLCPU, 0}, 3, {kDLFloat, 32, 1}, shape, nullptr, 8};
  const Tensor view(tensor);
  EXPECT_EQ(view.data, memory.data() + 2);
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[2], 1);
  tensor.ndim = 5;
  EXPECT_EQ(Tensor(tensor).rank, 5);
  tensor.ndim = 0;
  EXPECT_TRUE(Tensor(tensor).given()) << "a scalar must not pass for an absent tensor";
}

}  // namespace
}  // namespace tessera
