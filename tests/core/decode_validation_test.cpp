// Every kind of bad decode and merge_states call: its message, and that it left all memory as it was. And how
// keys are split.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/split.h"
#include "core/world.h"

namespace tessera {
namespace {

// A valid call: batch 3, seqlen_q 2, 4 query heads, 2 key heads, head_dim 8, head_dim_v 6; lengths (5, 0, 9)
// in a cache of 4 rows of 12 slots, or 9 pages of 4 slots; 2 new keys, rotary_dim 4.
class DecodeWorld {
 public:
  enum class Cache : std::uint8_t { contiguous, paged };

  explicit DecodeWorld(Cache cache) {
    call.q = world.make(DType::float32, {3, 2, 4, 8});
    const bool paged = cache == Cache::paged;
    const std::int64_t blocks = paged ? 9 : 4, slots = paged ? 4 : 12;
    call.k_cache = world.make(DType::float32, {blocks, slots, 2, 8});
    call.v_cache = world.make(DType::float32, {blocks, slots, 2, 6});
    call.cache_seqlens = world.ints({5, 0, 9});
    if (paged) {
      call.page_table = world.ints({0, 1, -1, 2, -1, -1, 3, 4, 5});
      call.page_table.rank = 2;
      call.page_table.shape = {3, 3};
      call.page_table.stride = {3, 1};
    }
    call.k_new = world.make(DType::float32, {3, 2, 2, 8});
    call.v_new = world.make(DType::float32, {3, 2, 2, 6});
    call.rotary_cos = world.make(DType::float32, {12, 2});
    call.rotary_sin = world.make(DType::float32, {12, 2});
    call.o = world.make(DType::float32, {3, 2, 4, 6});
    call.lse = world.make(DType::float32, {3, 4, 2});
    call.options.causal = true;
    workspace.resize(1 << 22);
    call.workspace = {workspace.data(), workspace.size()};
  }

  // The cache in an 8-bit dtype.
  void narrow(DType dtype) {
    call.k_cache = world.make(dtype, {4, 12, 2, 8});
    call.v_cache = world.make(dtype, {4, 12, 2, 6});
  }
  Tensor scales(std::initializer_list<float> values) {
    const Tensor tensor = world.make(DType::float32, {static_cast<std::int64_t>(values.size())});
    std::copy(values.begin(), values.end(), static_cast<float*>(tensor.data));
    return tensor;
  }

  World world{Base::dense};
  std::vector<std::byte> workspace;
  Decode call;
};

constexpr DLDevice cuda0{kDLCUDA, 0};

void move_to(Decode& x, DLDevice device) {
  for (Tensor* tensor : {&x.q, &x.k_cache, &x.v_cache, &x.cache_seqlens, &x.page_table, &x.k_new, &x.v_new,
                         &x.rotary_cos, &x.rotary_sin, &x.o, &x.lse}) {
    tensor->device = device;
  }
}

struct BadDecode {
  DecodeWorld::Cache base;
  std::function<void(DecodeWorld&)> spoil;
  const char* message;
};

constexpr auto contiguous = DecodeWorld::Cache::contiguous, paged = DecodeWorld::Cache::paged;
using W = DecodeWorld;

// clang-format off
const std::vector<BadDecode> bad_calls = {
    // What belongs together.
    {contiguous, [](W& w) { w.call.q = {}; }, "q: not given"},
    {contiguous, [](W& w) { w.call.v_cache = {}; }, "v_cache: not given"},
    {contiguous, [](W& w) { w.call.cache_seqlens = {}; }, "cache_seqlens: not given"},
    {contiguous, [](W& w) { w.call.k_new = {}; }, "k_new: not given, expected with v_new"},
    {contiguous, [](W& w) { w.call.v_new = {}; }, "v_new: not given, expected with k_new"},
    {contiguous, [](W& w) { w.call.rotary_cos = {}; }, "rotary_cos: not given, expected with rotary_sin"},
    {contiguous, [](W& w) { w.call.rotary_sin = {}; }, "rotary_sin: not given, expected with rotary_cos"},
    {contiguous, [](W& w) { w.call.k_new = w.call.v_new = {}; }, "k_new: not given, expected with rotary_cos"},
    {paged, [](W& w) { w.call.cache_batch_idx = w.world.ints({0, 1, 2}); }, "cache_batch_idx: given, expected none with page_table"},
    {paged, [](W& w) { w.call.leftpad_k = w.world.ints({0, 0, 0}); }, "leftpad_k: given, expected none with page_table"},
    // Options that decode does not have.
    {contiguous, [](W& w) { w.call.options.bias = w.world.make(DType::float32, {1}); }, "bias: given, expected none in decode"},
    {contiguous, [](W& w) { w.call.options.seqused_q = w.world.ints({1, 1, 1}); }, "seqused_q: given, expected none in decode"},
    {contiguous, [](W& w) { w.call.options.seqused_k = w.world.ints({1, 1, 1}); }, "seqused_k: given, expected none in decode"},
    {contiguous, [](W& w) { w.call.options.dropout_p = 0.5; }, "dropout_p: 0.5, expected 0 in decode"},
    {contiguous, [](W& w) { w.call.options.alignment = Alignment::top_left; }, "alignment: top_left, expected bottom_right in decode"},
    {contiguous, [](W& w) { w.call.num_splits = -1; }, "num_splits: -1, expected 0 (automatic) to 65536"},
    {contiguous, [](W& w) { w.call.num_splits = 65537; }, "num_splits: 65537, expected 0 (automatic) to 65536"},
    {contiguous, [](W& w) { w.call.options.softcap = -1; }, "softcap: -1, expected 0 (off) or a positive finite float32 number"},
    // Devices, dtypes, ranks.
    {contiguous, [](W& w) { w.call.v_cache.device = cuda0; }, "v_cache.device: cuda:0, expected q's cpu"},
    {contiguous, [](W& w) { w.call.k_cache.dtype = {kDLBfloat, 16, 1}; }, "k_cache.dtype: bfloat16, expected q's float32, float8_e4m3fn or int8"},
    {contiguous, [](W& w) { w.call.k_cache.dtype = {kDLInt, 16, 1}; }, "k_cache.dtype: int16, expected q's float32, float8_e4m3fn or int8"},
    {contiguous, [](W& w) { w.narrow(DType::float8_e4m3fn); w.call.v_cache.dtype = {kDLInt, 8, 1}; },
     "v_cache.dtype: int8, expected k_cache's float8_e4m3fn"},
    {contiguous, [](W& w) { w.call.k_cache.dtype = {kDLInt, 8, 1}; }, "v_cache.dtype: float32, expected k_cache's int8"},
    {contiguous, [](W& w) { w.call.q.dtype = {kDLInt, 8, 1}; }, "q.dtype: int8, expected float32, float16 or bfloat16"},
    {contiguous, [](W& w) { w.call.k_scale = w.world.make(DType::float32, {2}); },
     "k_scale: given, expected only with a cache of float8_e4m3fn or int8"},
    {contiguous, [](W& w) { w.narrow(DType::int8); w.call.v_scale = w.world.make(DType::float32, {3}); }, "v_scale: shape (3), expected (2)"},
    {contiguous, [](W& w) { w.narrow(DType::int8); w.call.k_scale = w.world.make(DType::bfloat16, {2}); },
     "k_scale.dtype: bfloat16, expected float32"},
    {contiguous, [](W& w) { w.narrow(DType::int8); w.call.k_scale = w.scales({1, 0}); },
     "k_scale[1]: 0, expected a positive normal float32 number"},
    {contiguous, [](W& w) { w.narrow(DType::int8); w.call.v_scale = w.scales({-1, 1}); },
     "v_scale[0]: -1, expected a positive normal float32 number"},
    {contiguous, [](W& w) { w.narrow(DType::int8); w.call.v_scale = w.scales({1, NAN}); },
     "v_scale[1]: nan, expected a positive normal float32 number"},
    {contiguous, [](W& w) { w.narrow(DType::int8); w.call.k_new.dtype = {kDLInt, 8, 1}; }, "k_new.dtype: int8, expected q's float32"},
    {contiguous, [](W& w) { w.narrow(DType::int8); w.call.o.dtype = {kDLInt, 8, 1}; }, "o.dtype: int8, expected float32"},
    {contiguous, [](W& w) { w.call.cache_seqlens.dtype = {kDLInt, 64, 1}; }, "cache_seqlens.dtype: int64, expected int32"},
    {paged, [](W& w) { w.call.page_table.dtype = {kDLInt, 64, 1}; }, "page_table.dtype: int64, expected int32"},
    {contiguous, [](W& w) { w.call.rotary_cos.dtype = {kDLFloat, 16, 1}; }, "rotary_cos.dtype: float16, expected float32"},
    {contiguous, [](W& w) { w.call.k_cache.rank = 3; }, "k_cache: rank 3, expected 4"},
    {paged, [](W& w) { w.call.page_table.rank = 1; }, "page_table: rank 1, expected 2"},
    {contiguous, [](W& w) { w.call.k_cache.stride[3] = 2; }, "k_cache: stride (192, 16, 8, 2), expected a last stride of 1"},
    {contiguous, [](W& w) { w.call.v_cache.stride[0] = 0; },
     "v_cache: shape (4, 12, 2, 6) with stride (0, 12, 6, 1), expected an output whose elements do not overlap"},
    {contiguous, [](W& w) { w.call.k_cache.data = nullptr; }, "k_cache.data: null, expected an address"},
    // Shapes.
    {contiguous, [](W& w) { w.call.k_cache.shape[3] = 7; }, "k_cache: shape (4, 12, 2, 7), expected (batch_cache, seqlen_cache, num_heads_k, 8)"},
    {paged, [](W& w) { w.call.k_cache.shape[3] = 7; }, "k_cache: shape (9, 4, 2, 7), expected (num_pages, page_size, num_heads_k, 8)"},
    {paged, [](W& w) { w.call.k_cache.shape[1] = 0; w.call.v_cache.shape[1] = 0; },
     "k_cache: shape (9, 0, 2, 8), expected page_size from 1 to 2147483647"},
    {contiguous, [](W& w) { w.call.k_cache.shape[2] = 3; w.call.k_cache.stride = {288, 24, 8, 1}; },
     "k_cache: shape (4, 12, 3, 8), expected num_heads to divide q's 4"},
    {contiguous, [](W& w) { w.call.v_cache.shape[1] = 11; }, "v_cache: shape (4, 11, 2, 6), expected (4, 12, 2, head_dim_v)"},
    {contiguous, [](W& w) { w.call.k_cache.shape[0] = w.call.v_cache.shape[0] = 2; },
     "k_cache: shape (2, 12, 2, 8), expected batch_cache of at least q's 3, or cache_batch_idx"},
    {paged, [](W& w) { w.call.page_table.shape[0] = 2; }, "page_table: shape (2, 3), expected (3, max_pages)"},
    {contiguous, [](W& w) { w.call.cache_seqlens.shape[0] = 2; }, "cache_seqlens: shape (2), expected (3)"},
    {contiguous, [](W& w) { w.call.cache_batch_idx = w.world.ints({0, 1}); }, "cache_batch_idx: shape (2), expected (3)"},
    {contiguous, [](W& w) { w.call.leftpad_k = w.world.ints({0, 1}); }, "leftpad_k: shape (2), expected (3)"},
    {contiguous, [](W& w) { w.call.k_new.shape[2] = 1; }, "k_new: shape (3, 2, 1, 8), expected (3, seqlen_new, 2, 8)"},
    {contiguous, [](W& w) { w.call.v_new.shape[1] = 1; }, "v_new: shape (3, 1, 2, 6), expected (3, 2, 2, 6)"},
    {contiguous, [](W& w) { w.call.rotary_cos.shape[1] = 5; }, "rotary_cos: shape (12, 5), expected rotary_dim / 2 from 1 to 4"},
    {contiguous, [](W& w) { w.call.rotary_sin.shape[1] = 1; }, "rotary_sin: shape (12, 1), expected (12, 2)"},
    {contiguous, [](W& w) { w.call.o.shape[3] = 5; }, "o: shape (3, 2, 4, 5), expected (3, 2, 4, 6)"},
    {contiguous, [](W& w) { w.call.lse.shape[2] = 1; }, "lse: shape (3, 4, 1), expected (3, 4, 2)"},
    {contiguous, [](W& w) { w.call.options.sinks = w.world.make(DType::float32, {3}); }, "sinks: shape (3), expected (4)"},
    // Lengths and tables.
    {contiguous, [](W& w) { set(w.call.cache_seqlens, 2, 11); }, "cache_seqlens[2]: 11, expected 0 to 10 with the 2 of k_new"},
    {contiguous, [](W& w) { set(w.call.cache_seqlens, 0, -1); }, "cache_seqlens[0]: -1, expected 0 to 10 with the 2 of k_new"},
    {paged, [](W& w) { set(w.call.cache_seqlens, 2, 11); }, "cache_seqlens[2]: 11, expected 0 to 10 with the 2 of k_new"},
    {contiguous, [](W& w) { w.call.k_new = w.call.v_new = w.call.rotary_cos = w.call.rotary_sin = {}; set(w.call.cache_seqlens, 1, 13); },
     "cache_seqlens[1]: 13, expected 0 to 12"},
    {contiguous, [](W& w) { w.call.k_cache.shape[1] = w.call.v_cache.shape[1] = 1; set(w.call.cache_seqlens, 0, 0); },
     "cache_seqlens[0]: 0, expected a cache of more slots than 1 with the 2 of k_new"},
    {contiguous, [](W& w) { w.call.leftpad_k = w.world.ints({0, 0, 10}); }, "leftpad_k[2]: 10, expected 0 to cache_seqlens[2], 9"},
    {contiguous, [](W& w) { w.call.leftpad_k = w.world.ints({-1, 0, 0}); }, "leftpad_k[0]: -1, expected 0 to cache_seqlens[0], 5"},
    {contiguous, [](W& w) { w.call.cache_batch_idx = w.world.ints({0, 1, 4}); }, "cache_batch_idx[2]: 4, expected an index of k_cache, 0 to 3"},
    {contiguous, [](W& w) { w.call.cache_batch_idx = w.world.ints({0, -1, 2}); }, "cache_batch_idx[1]: -1, expected an index of k_cache, 0 to 3"},
    {contiguous, [](W& w) { w.call.cache_batch_idx = w.world.ints({3, 0, 3}); set(w.call.cache_seqlens, 0, 8); },
     "cache_batch_idx[2]: 3, expected no slot to append to that sequence 0 appends to"},
    {paged, [](W& w) { set(w.call.page_table, 1, 9); }, "page_table[0][1]: 9, expected a page of k_cache, 0 to 8"},
    {paged, [](W& w) { set(w.call.page_table, 3, -1); }, "page_table[1][0]: -1, expected a page of k_cache, 0 to 8"},
    {paged, [](W& w) { set(w.call.page_table, 1, 5); }, "page_table[2]: page 5, expected no slot to append to that sequence 0 appends to"},
    {contiguous, [](W& w) { w.call.rotary_cos.shape[0] = w.call.rotary_sin.shape[0] = 10; },
     "rotary_cos: shape (10, 2), expected at least 11 positions, for sequence 2"},
    {contiguous, [](W& w) { w.call.options.max_seqlen_k = 10; }, "max_seqlen_k: 10, expected at least 11, the keys of sequence 2"},
    {contiguous, [](W& w) { w.call.options.max_seqlen_k = -1; }, "max_seqlen_k: -1, expected at least 0"},
    {contiguous, [](W& w) { w.call.options.max_seqlen_q = 2; }, "max_seqlen_q: 2, expected only with cu_seqlens_q"},
    // Packed.
    {contiguous, [](W& w) { w.call.options.cu_seqlens_q = w.world.ints({0, 1, 2, 3}); }, "cu_seqlens_k: not given, expected with cu_seqlens_q and k_new"},
    {contiguous, [](W& w) { w.call.options.cu_seqlens_k = w.world.ints({0, 1, 2, 3}); }, "cu_seqlens_q: not given, expected with cu_seqlens_k"},
    {contiguous, [](W& w) { w.call.options.cu_seqlens_q = w.call.options.cu_seqlens_k = w.world.ints({0, 1, 2, 3}); },
     "q: rank 4, expected 3 with cu_seqlens_q"},
    // Memory.
    {contiguous, [](W& w) { w.call.o.data = w.call.k_cache.data; }, "k_cache: shares memory with o, expected memory of its own"},
    {contiguous, [](W& w) { w.call.v_new.data = w.call.v_cache.data; }, "v_cache: shares memory with v_new, expected memory of its own"},
    {contiguous, [](W& w) { w.call.workspace.data = w.call.q.data; w.call.workspace.bytes = 64; },
     "workspace: shares memory with q, expected memory of its own"},
};
// clang-format on

TEST(DecodeValidation, TheBaseCallsAreValid) {
  for (const auto base : {contiguous, paged}) {
    DecodeWorld w(base);
    const Status status = decode(w.call);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(DecodeValidation, EightBitCachesAreValid) {
  for (const DType dtype : {DType::float8_e4m3fn, DType::int8}) {
    DecodeWorld w(contiguous);
    w.narrow(dtype);
    EXPECT_TRUE(decode(w.call).ok()) << decode(w.call).message();
    w.call.k_scale = w.scales({0.5f, 2.0f});
    EXPECT_TRUE(decode(w.call).ok()) << "v_scale alone may be missing: " << decode(w.call).message();
    w.call.k_cache.data = static_cast<std::byte*>(w.call.k_cache.data) + 1;
    w.call.k_cache.shape[0] = 3;
    w.call.v_cache.shape[0] = 3;
    EXPECT_TRUE(decode(w.call).ok()) << "bytes need no alignment: " << decode(w.call).message();
  }
}

TEST(DecodeValidation, BadCallsAreRefusedAndWriteNothing) {
  for (const BadDecode& bad : bad_calls) {
    SCOPED_TRACE(bad.message);
    DecodeWorld w(bad.base);
    bad.spoil(w);
    const std::vector<std::byte> before = w.world.snapshot();
    const Status status = decode(w.call);
    EXPECT_EQ(status.message(), bad.message);
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_TRUE(w.world.snapshot() == before) << "memory was written";
  }
}

TEST(DecodeValidation, AWorkspaceThatIsTooSmallIsRefused) {
  DecodeWorld w(contiguous);
  const std::size_t bytes = workspace_size(w.call).or_throw();
  w.call.workspace.bytes = bytes - 1;
  const std::vector<std::byte> before = w.world.snapshot();
  EXPECT_EQ(decode(w.call).message(),
            "workspace: " + std::to_string(bytes - 1) + " bytes, expected at least " + std::to_string(bytes));
  EXPECT_TRUE(w.world.snapshot() == before) << "memory was written";
}

// Sharing is fine where nobody writes: prefixes, and rows of the cache.
TEST(DecodeValidation, SharedPagesAndRowsMayBeRead) {
  DecodeWorld w(paged);
  set(w.call.page_table, 0, 3);  // sequences 0 and 2 begin alike
  EXPECT_TRUE(decode(w.call).ok()) << decode(w.call).message();
  DecodeWorld rows(contiguous);
  rows.call.cache_batch_idx = rows.world.ints({2, 2, 2});
  EXPECT_TRUE(decode(rows.call).ok()) << "they append to slots 5, 0 and 9: " << decode(rows.call).message();
}

// Addresses that would fault: of a GPU nothing is read, and every kernel says why it does not take the call.
TEST(DecodeValidation, NoMemoryOfAGpuIsRead) {
  for (const auto base : {contiguous, paged}) {
    DecodeWorld w(base);
    move_to(w.call, cuda0);
    std::uintptr_t address = 4096;
    for (Tensor* tensor :
         {&w.call.q, &w.call.k_cache, &w.call.v_cache, &w.call.cache_seqlens, &w.call.page_table,
          &w.call.k_new, &w.call.v_new, &w.call.rotary_cos, &w.call.rotary_sin, &w.call.o, &w.call.lse}) {
      tensor->data = reinterpret_cast<void*>(address);
      address += 1 << 20;
    }
    w.call.workspace = {};
    const Result<Problem> problem = validate(w.call);
    ASSERT_TRUE(problem.ok()) << problem.status().message();
    EXPECT_EQ(problem.value().max_seqlen_k, 12);
    const Status status = decode(w.call);
    EXPECT_EQ(status.code(), Code::unsupported);
    EXPECT_NE(status.message().find("cpu_baseline: the tensors are not in CPU memory"), std::string::npos)
        << status.message();
  }
}

TEST(MergeValidation, BadCalls) {
  World world(Base::dense);
  const auto make = [&] {
    MergeStates x;
    x.o_a = world.make(DType::float32, {2, 3, 4, 6});
    x.o_b = world.make(DType::bfloat16, {2, 3, 4, 6});
    x.lse_a = world.make(DType::float32, {2, 4, 3});
    x.lse_b = world.make(DType::float32, {2, 4, 3});
    x.o = world.make(DType::float16, {2, 3, 4, 6});
    x.lse = world.make(DType::float32, {2, 4, 3});
    return x;
  };
  const MergeStates good = make();
  EXPECT_TRUE(merge_states(good).ok()) << merge_states(good).message();
  const auto expect = [&](const std::function<void(MergeStates&)>& spoil, const char* message) {
    MergeStates x = good;
    spoil(x);
    const std::vector<std::byte> before = world.snapshot();
    EXPECT_EQ(merge_states(x).message(), message);
    EXPECT_TRUE(world.snapshot() == before) << "memory was written";
  };
  expect([](MergeStates& x) { x.lse_b = {}; }, "lse_b: not given");
  expect(
      [](MergeStates& x) {
        x.o_a.dtype = {kDLInt, 32, 1};
      },
      "o_a.dtype: int32, expected float32, float16 or bfloat16");
  expect([](MergeStates& x) { x.o_b.shape[1] = 2; }, "o_b: shape (2, 2, 4, 6), expected (2, 3, 4, 6)");
  expect([](MergeStates& x) { x.lse_a.shape[1] = 3; }, "lse_a: shape (2, 3, 3), expected (2, 4, 3)");
  expect([](MergeStates& x) { x.o_b.device = cuda0; }, "o_b.device: cuda:0, expected o_a's cpu");
  expect(
      [](MergeStates& x) {
        x.o.data = x.o_b.data;
        x.o.dtype = x.o_b.dtype;
        x.o.shape[3] = 5;
      },
      "o: shape (2, 3, 4, 5), expected (2, 3, 4, 6)");
  expect([](MergeStates& x) { x.o.data = x.o_a.data; },
         "o: shares memory with o_a, expected memory of its own");
}

// ---- Splits.

TEST(Splits, CoverTheKeysAndStayWithinTheirBound) {
  const Splits::Rule rule{64, 512, 64};
  for (long long keys = 0; keys < 100000; keys = keys * 3 / 2 + 1) {
    for (const long long given : {0LL, 1LL, 2LL, 7LL, 64LL, 65536LL}) {
      const Splits splits = Splits::of(keys, given, rule);
      EXPECT_GE(splits.count, 1);
      EXPECT_EQ(splits.keys % rule.unit, 0);
      EXPECT_GE(splits.count * splits.keys, keys);
      EXPECT_TRUE(splits.count == 1 || (splits.count - 1) * splits.keys < keys) << "an empty part";
      if (given > 0) {
        EXPECT_LE(splits.count, given);
      }
      for (const long long most : {keys, keys + 1, 2 * keys, keys + 100000})
        EXPECT_LE(splits.count, Splits::most(most, given, rule)) << keys << " of " << most;
    }
  }
  EXPECT_EQ(Splits::of(512, 0, rule).count, 1);
  EXPECT_EQ(Splits::of(513, 0, rule).count, 2);
}

}  // namespace
}  // namespace tessera
