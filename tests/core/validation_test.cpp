// Every kind of bad call: its code, its exact message, and that it left all memory as it was.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/world.h"

namespace tessera {
namespace {

constexpr std::int64_t i64_max = std::numeric_limits<std::int64_t>::max();
constexpr double inf = std::numeric_limits<double>::infinity();

template <class Target>
struct Bad {
  Base base;
  std::function<void(Target&)> spoil;
  const char* message;
  Code code = Code::invalid_argument;
};

template <class Call>
void expect_refused(const World& world, const Call& x, const char* message, Code code) {
  SCOPED_TRACE(message);
  const std::vector<std::byte> before = world.snapshot();
  const Status status = call(x);
  EXPECT_EQ(status.message(), message);
  EXPECT_EQ(status.code(), code);
  EXPECT_TRUE(world.snapshot() == before) << "memory was written";
}

// The rule of every message: the argument, its value, and what was expected (or that there is none).
void expect_form(const std::string& message) {
  EXPECT_NE(message.find(": "), std::string::npos) << message;
  const bool says = message.find(", expected ") != std::string::npos || message.ends_with(": not given");
  EXPECT_TRUE(says) << message;
}

constexpr Base dense = Base::dense, packed = Base::packed;
constexpr DLDataType float64{kDLFloat, 64, 1}, float16{kDLFloat, 16, 1}, bfloat{kDLBfloat, 16, 1};
constexpr DLDataType int32{kDLInt, 32, 1}, int64{kDLInt, 64, 1};
constexpr DLDevice cuda0{kDLCUDA, 0}, cuda1{kDLCUDA, 1}, managed0{kDLCUDAManaged, 0}, pinned0{kDLCUDAHost, 0};

void all_to(Parts& x, DLDevice device) {
  for (Tensor* tensor : {&x.q, &x.k, &x.v, &x.o, &x.lse}) tensor->device = device;
}
void all_sixteen_bit(Parts& x, DLDataType type) {
  for (Tensor* tensor : {&x.q, &x.k, &x.v, &x.o}) tensor->dtype = type;
}

void move_to(Forward& x, DLDevice device) {
  for (Tensor* tensor : {&x.q, &x.k, &x.v, &x.o, &x.lse, &x.options.cu_seqlens_q, &x.options.cu_seqlens_k})
    tensor->device = device;
}

// clang-format off
const std::vector<Bad<Parts>>& common_cases() {
  static const std::vector<Bad<Parts>> cases = {
    // Presence.
    {dense, [](Parts& x) { x.q = {}; }, "q: not given"},
    {dense, [](Parts& x) { x.k = {}; }, "k: not given"},
    {dense, [](Parts& x) { x.v = {}; }, "v: not given"},
    {dense, [](Parts& x) { x.o = {}; }, "o: not given"},
    {packed, [](Parts& x) { x.q = {}; }, "q: not given"},
    {packed, [](Parts& x) { x.options.cu_seqlens_q = {}; }, "cu_seqlens_q: not given, expected with cu_seqlens_k"},
    {packed, [](Parts& x) { x.options.cu_seqlens_k = {}; }, "cu_seqlens_k: not given, expected with cu_seqlens_q"},
    // Devices.
    {dense, [](Parts& x) { x.k.device = cuda0; }, "k.device: cuda:0, expected q's cpu"},
    {dense, [](Parts& x) { x.q.device = cuda1; }, "k.device: cpu, expected q's cuda:1"},
    {dense, [](Parts& x) { x.lse.device = cuda0; }, "lse.device: cuda:0, expected q's cpu"},
    {dense, [](Parts& x) { all_to(x, cuda0); x.v.device = cuda1; }, "v.device: cuda:1, expected q's cuda:0"},
    {dense, [](Parts& x) { x.o.device = {kDLMetal, 0}; }, "o.device: type 8:0, expected q's cpu"},
    {dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {1}); x.options.bias.device = cuda0; },
     "bias.device: cuda:0, expected q's cpu"},
    {packed, [](Parts& x) { x.options.cu_seqlens_q.device = cuda0; }, "cu_seqlens_q.device: cuda:0, expected q's cpu"},
    {dense, [](Parts& x) { x.k.device = managed0; }, "k.device: cuda_managed:0, expected q's cpu"},
    {dense, [](Parts& x) { all_to(x, cuda1); x.k.device = managed0; }, "k.device: cuda_managed:0, expected q's cuda:1"},
    {dense, [](Parts& x) { x.q.device = pinned0; }, "k.device: cpu, expected q's cuda_host:0"},
    // Dtypes.
    {dense, [](Parts& x) { x.q.dtype = int32; }, "q.dtype: int32, expected float32, float16 or bfloat16"},
    {dense, [](Parts& x) { x.q.dtype = float64; }, "q.dtype: float64, expected float32, float16 or bfloat16"},
    {dense, [](Parts& x) { x.q.dtype = {kDLFloat, 32, 4}; }, "q.dtype: float32x4, expected float32, float16 or bfloat16"},
    {dense, [](Parts& x) { x.q.dtype = {kDLUInt, 8, 1}; }, "q.dtype: uint8, expected float32, float16 or bfloat16"},
    {dense, [](Parts& x) { x.q.dtype = {kDLComplex, 64, 1}; }, "q.dtype: complex64, expected float32, float16 or bfloat16"},
    {dense, [](Parts& x) { x.q.dtype = {99, 32, 1}; }, "q.dtype: code99_32, expected float32, float16 or bfloat16"},
    {dense, [](Parts& x) { x.k.dtype = float16; }, "k.dtype: float16, expected q's float32"},
    {dense, [](Parts& x) { x.v.dtype = bfloat; }, "v.dtype: bfloat16, expected q's float32"},
    {dense, [](Parts& x) { all_sixteen_bit(x, bfloat); x.v.dtype = float16; }, "v.dtype: float16, expected q's bfloat16"},
    {dense, [](Parts& x) { x.o.dtype = float16; }, "o.dtype: float16, expected float32"},
    {dense, [](Parts& x) { all_sixteen_bit(x, float16); x.o.dtype = bfloat; }, "o.dtype: bfloat16, expected q's float16 or float32"},
    {dense, [](Parts& x) { x.lse.dtype = float16; }, "lse.dtype: float16, expected float32"},
    {dense, [](Parts& x) { x.lse.dtype = float64; }, "lse.dtype: float64, expected float32"},
    {packed, [](Parts& x) { x.options.cu_seqlens_q.dtype = int64; }, "cu_seqlens_q.dtype: int64, expected int32"},
    {packed, [](Parts& x) { x.options.cu_seqlens_k.dtype = int64; }, "cu_seqlens_k.dtype: int64, expected int32"},
    {dense, [](Parts& x) { x.options.seqused_q = x.world.ints({1, 1}); x.options.seqused_q.dtype = {kDLUInt, 32, 1}; },
     "seqused_q.dtype: uint32, expected int32"},
    {dense, [](Parts& x) { x.options.alibi_slopes = x.world.make(DType::float16, {4}); },
     "alibi_slopes.dtype: float16, expected float32"},
    {dense, [](Parts& x) { x.options.bias = x.world.make(DType::bfloat16, {4}); }, "bias.dtype: bfloat16, expected float32"},
    {dense, [](Parts& x) { all_sixteen_bit(x, float16); x.options.sinks = x.world.make(DType::bfloat16, {4}); },
     "sinks.dtype: bfloat16, expected q's float16 or float32"},
    // Ranks.
    {dense, [](Parts& x) { x.q.rank = 3; }, "q: rank 3, expected 4"},
    {dense, [](Parts& x) { x.k.rank = 2; }, "k: rank 2, expected 4"},
    {dense, [](Parts& x) { x.v.rank = 5; }, "v: rank 5, expected 4"},
    {dense, [](Parts& x) { x.q.rank = -1; }, "q: rank 0, expected 4"},
    {dense, [](Parts& x) { x.o.rank = 1; }, "o: rank 1, expected 4"},
    {dense, [](Parts& x) { x.lse.rank = 2; }, "lse: rank 2, expected 3"},
    {packed, [](Parts& x) { x.q = x.world.make(DType::float32, {1, 7, 4, 8}); }, "q: rank 4, expected 3 with cu_seqlens_q"},
    {packed, [](Parts& x) { x.lse = x.world.make(DType::float32, {1, 4, 7}); }, "lse: rank 3, expected 2 with cu_seqlens_q"},
    {packed, [](Parts& x) { x.options.cu_seqlens_k = x.world.make(DType::int32, {4, 1}); }, "cu_seqlens_k: rank 2, expected 1"},
    {dense, [](Parts& x) { x.options.alibi_slopes = x.world.make(DType::float32, {1, 2, 4}); }, "alibi_slopes: rank 3, expected 1 to 2"},
    {dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {1, 1, 1, 1, 1}); }, "bias: rank 5, expected 1 to 4"},
    {dense, [](Parts& x) { x.options.sinks = x.world.make(DType::float32, {1, 4}); }, "sinks: rank 2, expected 1"},
    {dense, [](Parts& x) { x.options.seqused_k = x.world.make(DType::int32, {2, 1}); }, "seqused_k: rank 2, expected 1"},
    // Sizes and strides of one tensor.
    {dense, [](Parts& x) { x.q.shape[1] = -3; }, "q: shape (2, -3, 4, 8), expected sizes of at least 0"},
    {dense, [](Parts& x) { x.lse.shape[0] = -1; }, "lse: shape (-1, 4, 3), expected sizes of at least 0"},
    {dense, [](Parts& x) { x.q.stride[0] = -96; }, "q: stride (-96, 32, 8, 1), expected strides of at least 0"},
    {dense, [](Parts& x) { x.v.stride[3] = -1; }, "v: stride (48, 12, 6, -1), expected strides of at least 0"},
    {dense, [](Parts& x) { x.q.stride[3] = 2; }, "q: stride (96, 32, 8, 2), expected a last stride of 1"},
    {dense, [](Parts& x) { x.k.stride[3] = 0; }, "k: stride (64, 16, 8, 0), expected a last stride of 1"},
    {dense, [](Parts& x) { x.o.stride[3] = 3; }, "o: stride (72, 24, 6, 3), expected a last stride of 1"},
    {dense, [](Parts& x) { x.q = Tensor(x.q.data, DType::float32, {2, 3, 4, 8}, {8, 1}); },
     "q: stride (-1, -1, -1, -1), expected strides of at least 0"},
    {packed, [](Parts& x) { x.options.cu_seqlens_q.stride[0] = 2; }, "cu_seqlens_q: stride (2), expected a last stride of 1"},
    {dense, [](Parts& x) { x.options.seqused_q = x.world.ints({1, 1}); x.options.seqused_q.stride[0] = 0; },
     "seqused_q: stride (0), expected a last stride of 1"},
    {dense, [](Parts& x) { x.k.stride[0] = i64_max; },
     "k: shape (2, 4, 2, 8) with stride (9223372036854775807, 16, 8, 1), expected less than 2^63 bytes"},
    {dense, [](Parts& x) { x.k.stride[0] = i64_max / 4; },
     "k: shape (2, 4, 2, 8) with stride (2305843009213693951, 16, 8, 1), expected less than 2^63 bytes"},
    {dense, [](Parts& x) { x.q = Tensor(x.q.data, DType::float32, {i64_max, i64_max, 4, 8}); },
     "q: shape (9223372036854775807, 9223372036854775807, 4, 8) with stride (9223372036854775807, 32, 8, 1), "
     "expected less than 2^63 bytes"},
    {dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {3, 4}); x.options.bias.stride[1] = -1; },
     "bias: stride (4, -1), expected strides of at least 0"},
    {dense, [](Parts& x) { x.options.alibi_slopes = x.world.make(DType::float32, {4}); x.options.alibi_slopes.stride[0] = -2; },
     "alibi_slopes: stride (-2), expected strides of at least 0"},
    // Pointers.
    {dense, [](Parts& x) { x.q.data = nullptr; }, "q.data: null, expected an address"},
    {dense, [](Parts& x) { x.o.data = nullptr; }, "o.data: null, expected an address"},
    {dense, [](Parts& x) { x.lse.data = nullptr; }, "lse.data: null, expected an address"},
    {packed, [](Parts& x) { x.options.cu_seqlens_k.data = nullptr; }, "cu_seqlens_k.data: null, expected an address"},
    {dense, [](Parts& x) { x.options.sinks = Tensor(nullptr, DType::float32, {4}); }, "sinks.data: null, expected an address"},
    {dense, [](Parts& x) { shift(x.q, 1); }, "q.data: an address 1 past a multiple of 4, expected a multiple of 4"},
    {dense, [](Parts& x) { shift(x.v, 2); }, "v.data: an address 2 past a multiple of 4, expected a multiple of 4"},
    {dense, [](Parts& x) { all_sixteen_bit(x, float16); shift(x.k, 3); },
     "k.data: an address 1 past a multiple of 2, expected a multiple of 2"},
    {dense, [](Parts& x) { shift(x.lse, 2); }, "lse.data: an address 2 past a multiple of 4, expected a multiple of 4"},
    {packed, [](Parts& x) { shift(x.options.cu_seqlens_q, 3); },
     "cu_seqlens_q.data: an address 3 past a multiple of 4, expected a multiple of 4"},
    // Numbers.
    {dense, [](Parts& x) { x.options.softmax_scale = std::nan(""); }, "softmax_scale: nan, expected a finite float32 number"},
    {dense, [](Parts& x) { x.options.softmax_scale = inf; }, "softmax_scale: inf, expected a finite float32 number"},
    {dense, [](Parts& x) { x.options.softmax_scale = -inf; }, "softmax_scale: -inf, expected a finite float32 number"},
    {dense, [](Parts& x) { x.options.softmax_scale = 1e39; }, "softmax_scale: 1e+39, expected a finite float32 number"},
    {dense, [](Parts& x) { x.options.softcap = -1; }, "softcap: -1, expected 0 (off) or a positive finite float32 number"},
    {dense, [](Parts& x) { x.options.softcap = inf; }, "softcap: inf, expected 0 (off) or a positive finite float32 number"},
    {dense, [](Parts& x) { x.options.softcap = std::nan(""); }, "softcap: nan, expected 0 (off) or a positive finite float32 number"},
    {dense, [](Parts& x) { x.options.softcap = 1e-300; }, "softcap: 1e-300, expected 0 (off) or a positive finite float32 number"},
    {dense, [](Parts& x) { x.options.softcap = 3e38; }, "softcap: 3e+38, expected 0 (off), or at most 1e+30"},
    {dense, [](Parts& x) { x.options.softmax_scale = 1e-39; }, "softmax_scale: 1e-39, expected 0 or a normal float32 number"},
    {dense, [](Parts& x) { x.options.softcap = 1e-37; x.options.softmax_scale = 1e3; },
     "softcap: 1e-37, expected 0 (off), or softmax_scale / softcap a finite float32 number"},
    {dense, [](Parts& x) { x.options.bias = Tensor(x.world.make(DType::float32, {1}).data, DType::float32, {}); },
     "bias: rank 0, expected 1 to 4"},
    {dense, [](Parts& x) { x.options.dropout_p = -0.1; }, "dropout_p: -0.1, expected a number from 0 to 1"},
    {dense, [](Parts& x) { x.options.dropout_p = 1.5; }, "dropout_p: 1.5, expected a number from 0 to 1"},
    {dense, [](Parts& x) { x.options.dropout_p = std::nan(""); }, "dropout_p: nan, expected a number from 0 to 1"},
    {dense, [](Parts& x) { x.options.offset = 1ULL << 36; }, "offset: 68719476736, expected a number below 2^36"},
    {dense, [](Parts& x) { x.options.offset = ~0ULL; }, "offset: 18446744073709551615, expected a number below 2^36"},
    {dense, [](Parts& x) { x.options.window_left = -1; }, "window_left: -1, expected at least 0, or none for no bound"},
    {dense, [](Parts& x) { x.options.window_right = -7; }, "window_right: -7, expected at least 0, or none for no bound"},
    {dense, [](Parts& x) { x.options.causal = true; x.options.window_right = -1; },
     "window_right: -1, expected at least 0, or none for no bound"},
    {dense, [](Parts& x) { x.options.num_threads = -1; }, "num_threads: -1, expected 0 to 4096"},
    {dense, [](Parts& x) { x.options.num_threads = 4097; }, "num_threads: 4097, expected 0 to 4096"},
    // q, k and v against each other.
    {dense, [](Parts& x) { x.q.shape[3] = 0; }, "q: shape (2, 3, 4, 0), expected head_dim from 1 to 256"},
    {dense, [](Parts& x) { x.q = Tensor(x.q.data, DType::float32, {2, 3, 4, 257}); },
     "q: shape (2, 3, 4, 257), expected head_dim from 1 to 256"},
    {dense, [](Parts& x) { x.q.shape[2] = 0; }, "q: shape (2, 3, 0, 8), expected num_heads_q from 1 to 4294967295"},
    {dense, [](Parts& x) { x.q = Tensor(x.q.data, DType::float32, {2, 1LL << 31, 4, 8}, {0, 0, 8, 1}); },
     "q: shape (2, 2147483648, 4, 8), expected seqlen_q from 0 to 2147483647"},
    {packed, [](Parts& x) { x.q = Tensor(x.q.data, DType::float32, {1LL << 31, 4, 8}, {0, 8, 1}); },
     "q: shape (2147483648, 4, 8), expected total_q from 0 to 2147483647"},
    {dense, [](Parts& x) { x.q = Tensor(x.q.data, DType::float32, {1LL << 30, 3, 4, 8}, {0, 32, 8, 1}); },
     "q: shape (1073741824, 3, 4, 8), expected batch (1073741824) * num_heads_q below 2^32"},
    {dense, [](Parts& x) { x.k.shape[0] = 1; }, "k: shape (1, 4, 2, 8), expected (2, seqlen_k, num_heads_k, 8)"},
    {dense, [](Parts& x) { x.k.shape[3] = 7; }, "k: shape (2, 4, 2, 7), expected (2, seqlen_k, num_heads_k, 8)"},
    {packed, [](Parts& x) { x.k.shape[2] = 7; }, "k: shape (9, 2, 7), expected (total_k, num_heads_k, 8)"},
    {dense, [](Parts& x) { x.k = Tensor(x.k.data, DType::float32, {2, 1LL << 31, 2, 8}, {0, 0, 8, 1}); },
     "k: shape (2, 2147483648, 2, 8), expected seqlen_k from 0 to 2147483647"},
    {dense, [](Parts& x) { x.k = x.world.make(DType::float32, {2, 4, 3, 8}); },
     "k: shape (2, 4, 3, 8), expected num_heads to divide q's 4"},
    {dense, [](Parts& x) { x.k.shape[2] = 0; }, "k: shape (2, 4, 0, 8), expected num_heads to divide q's 4"},
    {dense, [](Parts& x) { x.k = x.world.make(DType::float32, {2, 4, 8, 8}); },
     "k: shape (2, 4, 8, 8), expected num_heads to divide q's 4"},
    {dense, [](Parts& x) { x.v.shape[0] = 1; }, "v: shape (1, 4, 2, 6), expected (2, 4, 2, head_dim_v)"},
    {dense, [](Parts& x) { x.v.shape[1] = 3; }, "v: shape (2, 3, 2, 6), expected (2, 4, 2, head_dim_v)"},
    {dense, [](Parts& x) { x.v.shape[2] = 1; }, "v: shape (2, 4, 1, 6), expected (2, 4, 2, head_dim_v)"},
    {packed, [](Parts& x) { x.v.shape[0] = 8; }, "v: shape (8, 2, 6), expected (9, 2, head_dim_v)"},
    {dense, [](Parts& x) { x.v.shape[3] = 0; }, "v: shape (2, 4, 2, 0), expected head_dim_v from 1 to 256"},
    {dense, [](Parts& x) { x.v = Tensor(x.v.data, DType::float32, {2, 4, 2, 300}); },
     "v: shape (2, 4, 2, 300), expected head_dim_v from 1 to 256"},
    {dense, [](Parts& x) { x.o.shape[3] = 5; }, "o: shape (2, 3, 4, 5), expected (2, 3, 4, 6)"},
    {dense, [](Parts& x) { x.o.shape[1] = 2; }, "o: shape (2, 2, 4, 6), expected (2, 3, 4, 6)"},
    {packed, [](Parts& x) { x.o.shape[0] = 6; }, "o: shape (6, 4, 6), expected (7, 4, 6)"},
    {dense, [](Parts& x) { x.lse = Tensor(x.lse.data, DType::float32, {2, 3, 4}); }, "lse: shape (2, 3, 4), expected (2, 4, 3)"},
    {packed, [](Parts& x) { x.lse = Tensor(x.lse.data, DType::float32, {7, 4}); }, "lse: shape (7, 4), expected (4, 7)"},
    // Lengths.
    {packed, [](Parts& x) { x.options.cu_seqlens_q.shape[0] = 0; }, "cu_seqlens_q: shape (0), expected (batch + 1)"},
    {packed, [](Parts& x) { x.options.cu_seqlens_k.shape[0] = 3; }, "cu_seqlens_k: shape (3), expected (4)"},
    {packed, [](Parts& x) { set(x.options.cu_seqlens_q, 0, 1); }, "cu_seqlens_q[0]: 1, expected 0"},
    {packed, [](Parts& x) { set(x.options.cu_seqlens_k, 0, -1); }, "cu_seqlens_k[0]: -1, expected 0"},
    {packed, [](Parts& x) { set(x.options.cu_seqlens_q, 2, 1); }, "cu_seqlens_q[2]: 1, expected at least cu_seqlens_q[1], 2"},
    {packed, [](Parts& x) { set(x.options.cu_seqlens_k, 1, -5); }, "cu_seqlens_k[1]: -5, expected at least cu_seqlens_k[0], 0"},
    {packed, [](Parts& x) { set(x.options.cu_seqlens_q, 3, 8); }, "cu_seqlens_q[3]: 8, expected at most total_q, 7"},
    {packed, [](Parts& x) { set(x.options.cu_seqlens_k, 3, 10); }, "cu_seqlens_k[3]: 10, expected at most total_k, 9"},
    {packed, [](Parts& x) { x.options.max_seqlen_q = 3; }, "max_seqlen_q: 3, expected at least 4, the longest sequence"},
    {packed, [](Parts& x) { x.options.max_seqlen_k = -1; }, "max_seqlen_k: -1, expected at least 4, the longest sequence"},
    {packed, [](Parts& x) { x.options.max_seqlen_k = 1LL << 31; }, "max_seqlen_k: 2147483648, expected at most 2147483647"},
    {dense, [](Parts& x) { x.options.max_seqlen_q = 3; }, "max_seqlen_q: 3, expected only with cu_seqlens_q"},
    {dense, [](Parts& x) { x.options.max_seqlen_k = 4; }, "max_seqlen_k: 4, expected only with cu_seqlens_k"},
    {dense, [](Parts& x) { x.options.seqused_q = x.world.ints({1, 2, 3}); }, "seqused_q: shape (3), expected (2)"},
    {dense, [](Parts& x) { x.options.seqused_q = x.world.ints({3, 4}); }, "seqused_q[1]: 4, expected 0 to 3"},
    {dense, [](Parts& x) { x.options.seqused_k = x.world.ints({-1, 4}); }, "seqused_k[0]: -1, expected 0 to 4"},
    {packed, [](Parts& x) { x.options.seqused_q = x.world.ints({2, 1, 4}); }, "seqused_q[1]: 1, expected 0 to 0"},
    {packed, [](Parts& x) { x.options.seqused_k = x.world.ints({3, 2, 5}); }, "seqused_k[2]: 5, expected 0 to 4"},
    // Options that are tensors.
    {dense, [](Parts& x) { x.options.alibi_slopes = x.world.make(DType::float32, {2}); }, "alibi_slopes: shape (2), expected (4)"},
    {dense, [](Parts& x) { x.options.alibi_slopes = x.world.make(DType::float32, {1, 4}); },
     "alibi_slopes: shape (1, 4), expected (2, 4)"},
    {dense, [](Parts& x) { x.options.sinks = x.world.make(DType::float32, {2}); }, "sinks: shape (2), expected (4)"},
    {dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {3, 5}); },
     "bias: shape (3, 5), expected a broadcast of (2, 4, 3, 4)"},
    {dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {2, 2, 3, 4}); },
     "bias: shape (2, 2, 3, 4), expected a broadcast of (2, 4, 3, 4)"},
    {dense, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {0}); },
     "bias: shape (0), expected a broadcast of (2, 4, 3, 4)"},
    {packed, [](Parts& x) { x.options.bias = x.world.make(DType::float32, {7, 4}); },
     "bias: shape (7, 4), expected a broadcast of (3, 4, 4, 4)"},
    {packed, [](Parts& x) { x.options.max_seqlen_q = 5; x.options.bias = x.world.make(DType::float32, {4, 4}); },
     "bias: shape (4, 4), expected a broadcast of (3, 4, 5, 4)"},
  };
  return cases;
}

const std::vector<Bad<Forward>>& forward_cases() {
  static const std::vector<Bad<Forward>> cases = {
    {dense, [](Forward& x) { move_to(x, pinned0); }, "q.device: cuda_host:0, expected cpu or cuda"},
    {packed, [](Forward& x) { move_to(x, {kDLMetal, 0}); }, "q.device: type 8:0, expected cpu or cuda"},
    {packed, [](Forward& x) { move_to(x, {kDLROCM, 2}); }, "q.device: type 10:2, expected cpu or cuda"},
    // What does not depend on memory is checked on a GPU, too.
    {dense, [](Forward& x) { move_to(x, cuda0); x.k.shape[3] = 7; }, "k: shape (2, 4, 2, 7), expected (2, seqlen_k, num_heads_k, 8)"},
    {dense, [](Forward& x) { move_to(x, cuda0); x.q.data = nullptr; }, "q.data: null, expected an address"},
    {dense, [](Forward& x) { move_to(x, cuda0); shift(x.v, 2); },
     "v.data: an address 2 past a multiple of 4, expected a multiple of 4"},
    {dense, [](Forward& x) { move_to(x, cuda0); x.o.data = x.q.data; }, "o: shares memory with q, expected memory of its own"},
    {dense, [](Forward& x) { move_to(x, cuda0); x.options.max_seqlen_k = 4; }, "max_seqlen_k: 4, expected only with cu_seqlens_k"},
    {packed, [](Forward& x) { move_to(x, cuda0); x.options.cu_seqlens_k.data = nullptr; },
     "cu_seqlens_k.data: null, expected an address"},
    {packed, [](Forward& x) { move_to(x, cuda0); x.options.cu_seqlens_k.shape[0] = 3; }, "cu_seqlens_k: shape (3), expected (4)"},
    {packed, [](Forward& x) { move_to(x, cuda0); x.options.cu_seqlens_q.dtype = int64; },
     "cu_seqlens_q.dtype: int64, expected int32"},
    {packed, [](Forward& x) { move_to(x, cuda0); x.options.max_seqlen_q = -1; }, "max_seqlen_q: -1, expected at least 0"},
    {packed, [](Forward& x) { move_to(x, cuda0); x.options.max_seqlen_k = 1LL << 31; },
     "max_seqlen_k: 2147483648, expected at most 2147483647"},
    {dense, [](Forward& x) { move_to(x, cuda0); x.workspace.data = static_cast<std::byte*>(x.workspace.data) + 16; },
     "workspace: an address 16 past a multiple of 256, expected a multiple of 256, as GPU memory is allocated"},
    {dense, [](Forward& x) { x.o.stride[0] = 0; },
     "o: shape (2, 3, 4, 6) with stride (0, 24, 6, 1), expected an output whose elements do not overlap"},
    {dense, [](Forward& x) { x.o.stride[2] = 5; },
     "o: shape (2, 3, 4, 6) with stride (72, 24, 5, 1), expected an output whose elements do not overlap"},
    {packed, [](Forward& x) { x.o.stride[0] = 23; },
     "o: shape (7, 4, 6) with stride (23, 6, 1), expected an output whose elements do not overlap"},
    {dense, [](Forward& x) { x.lse.stride[2] = 0; },
     "lse: shape (2, 4, 3) with stride (12, 3, 0), expected an output whose elements do not overlap"},
    {dense, [](Forward& x) { x.lse.stride[1] = 2; },
     "lse: shape (2, 4, 3) with stride (12, 2, 1), expected an output whose elements do not overlap"},
    {dense, [](Forward& x) { x.o.data = x.q.data; }, "o: shares memory with q, expected memory of its own"},
    {dense, [](Forward& x) { x.o.data = static_cast<float*>(x.v.data) + 1; },
     "o: shares memory with v, expected memory of its own"},
    {dense, [](Forward& x) { x.lse.data = x.o.data; }, "o: shares memory with lse, expected memory of its own"},
    {dense, [](Forward& x) { x.lse.data = static_cast<float*>(x.k.data) + 127; },
     "lse: shares memory with k, expected memory of its own"},
    {packed, [](Forward& x) { x.lse.data = x.options.cu_seqlens_q.data; },
     "lse: shares memory with cu_seqlens_q, expected memory of its own"},
  };
  return cases;
}

const std::vector<Bad<Backward>>& backward_cases() {
  static const std::vector<Bad<Backward>> cases = {
    {dense, [](Backward& x) { x.lse = {}; }, "lse: not given"},
    {dense, [](Backward& x) { x.dout = {}; }, "dout: not given"},
    {dense, [](Backward& x) { x.dq = {}; }, "dq: not given"},
    {dense, [](Backward& x) { x.dk = {}; }, "dk: not given"},
    {dense, [](Backward& x) { x.dv = {}; }, "dv: not given"},
    {dense, [](Backward& x) { x.dout.device = cuda0; }, "dout.device: cuda:0, expected q's cpu"},
    {dense, [](Backward& x) { x.dout.dtype = bfloat; }, "dout.dtype: bfloat16, expected float32"},
    {dense, [](Backward& x) { x.dlse.dtype = float16; }, "dlse.dtype: float16, expected float32"},
    {dense, [](Backward& x) { x.dq.dtype = float16; }, "dq.dtype: float16, expected float32"},
    {dense, [](Backward& x) { x.dk.dtype = float64; }, "dk.dtype: float64, expected float32"},
    {dense, [](Backward& x) { x.dv.dtype = int32; }, "dv.dtype: int32, expected float32"},
    {dense, [](Backward& x) { x.dout.rank = 3; }, "dout: rank 3, expected 4"},
    {packed, [](Backward& x) { x.dq.rank = 2; }, "dq: rank 2, expected 3 with cu_seqlens_q"},
    {dense, [](Backward& x) { x.dlse.rank = 1; }, "dlse: rank 1, expected 3"},
    {dense, [](Backward& x) { x.dout.stride[3] = 2; }, "dout: stride (72, 24, 6, 2), expected a last stride of 1"},
    {dense, [](Backward& x) { x.dk.stride[0] = -64; }, "dk: stride (-64, 16, 8, 1), expected strides of at least 0"},
    {dense, [](Backward& x) { x.dq.stride[1] = 0; },
     "dq: shape (2, 3, 4, 8) with stride (96, 0, 8, 1), expected an output whose elements do not overlap"},
    {dense, [](Backward& x) { x.dk.stride[2] = 0; },
     "dk: shape (2, 4, 2, 8) with stride (64, 16, 0, 1), expected an output whose elements do not overlap"},
    {dense, [](Backward& x) { x.dv.stride[0] = 47; },
     "dv: shape (2, 4, 2, 6) with stride (47, 12, 6, 1), expected an output whose elements do not overlap"},
    {dense, [](Backward& x) { x.dout.data = nullptr; }, "dout.data: null, expected an address"},
    {dense, [](Backward& x) { x.dv.data = nullptr; }, "dv.data: null, expected an address"},
    {dense, [](Backward& x) { shift(x.dq, 2); }, "dq.data: an address 2 past a multiple of 4, expected a multiple of 4"},
    {dense, [](Backward& x) { x.dout.shape[3] = 8; }, "dout: shape (2, 3, 4, 8), expected (2, 3, 4, 6)"},
    {dense, [](Backward& x) { x.dlse.shape[2] = 2; }, "dlse: shape (2, 4, 2), expected (2, 4, 3)"},
    {dense, [](Backward& x) { x.dq.shape[2] = 2; }, "dq: shape (2, 3, 2, 8), expected (2, 3, 4, 8)"},
    {dense, [](Backward& x) { x.dk.shape[1] = 3; }, "dk: shape (2, 3, 2, 8), expected (2, 4, 2, 8)"},
    {dense, [](Backward& x) { x.dv.shape[3] = 5; }, "dv: shape (2, 4, 2, 5), expected (2, 4, 2, 6)"},
    {packed, [](Backward& x) { x.dk.shape[0] = 7; }, "dk: shape (7, 2, 8), expected (9, 2, 8)"},
    {dense, [](Backward& x) { x.dq.data = x.q.data; }, "dq: shares memory with q, expected memory of its own"},
    {dense, [](Backward& x) { x.dv.data = x.dk.data; }, "dk: shares memory with dv, expected memory of its own"},
    {dense, [](Backward& x) { x.dv.data = static_cast<float*>(x.dout.data) + 3; },
     "dv: shares memory with dout, expected memory of its own"},
  };
  return cases;
}

// dbias and dsinks, which need the options that they are the gradients of.
const std::vector<Bad<World>>& option_gradient_cases() {
  static const std::vector<Bad<World>> cases = {
    {dense, [](World& w) { w.backward.dbias = w.make(DType::float32, {3, 4}); }, "dbias: given, expected only with bias"},
    {dense, [](World& w) { w.backward.dsinks = w.make(DType::float32, {4}); }, "dsinks: given, expected only with sinks"},
    {dense, [](World& w) { w.backward.options.bias = w.make(DType::float32, {3, 4}); w.backward.dbias = w.make(DType::float32, {1, 4}); },
     "dbias: shape (1, 4), expected (3, 4)"},
    {dense, [](World& w) { w.backward.options.bias = w.make(DType::float32, {3, 4}); w.backward.dbias = w.make(DType::float32, {1, 3, 4}); },
     "dbias: shape (1, 3, 4), expected (3, 4)"},
    {dense, [](World& w) {
       w.backward.options.bias = w.make(DType::float32, {3, 4});
       w.backward.dbias = Tensor(w.take(64), DType::float32, {3, 4}, {0, 1});
     },
     "dbias: shape (3, 4) with stride (0, 1), expected an output whose elements do not overlap"},
    {dense, [](World& w) { w.backward.options.bias = w.backward.dbias = w.make(DType::float32, {3, 4}); },
     "dbias: shares memory with bias, expected memory of its own"},
    {dense, [](World& w) { w.backward.options.sinks = w.make(DType::float32, {4}); w.backward.dsinks = w.make(DType::float32, {3}); },
     "dsinks: shape (3), expected (4)"},
    {dense, [](World& w) { w.backward.options.sinks = w.make(DType::float32, {4}); w.backward.dsinks = w.make(DType::float16, {4}); },
     "dsinks.dtype: float16, expected float32"},
    {dense, [](World& w) {
       for (Tensor* t : {&w.backward.q, &w.backward.k, &w.backward.v}) t->dtype = bfloat;
       w.backward.options.sinks = w.make(DType::bfloat16, {4});
       w.backward.dsinks = w.make(DType::float32, {4});
     },
     "dsinks.dtype: float32, expected sinks's bfloat16"},
    {dense, [](World& w) {
       for (Tensor* t : {&w.backward.q, &w.backward.k, &w.backward.v}) t->dtype = float16;
       w.backward.options.bias = w.make(DType::float32, {3, 4});
       w.backward.dbias = w.make(DType::float16, {3, 4});
     },
     "dbias.dtype: float16, expected bias's float32"},
    {dense, [](World& w) {
       w.backward.options.sinks = w.make(DType::float32, {4});
       w.backward.dsinks = Tensor(w.take(64), DType::float32, {4}, {0});
     },
     "dsinks: shape (4) with stride (0), expected an output whose elements do not overlap"},
  };
  return cases;
}
// clang-format on

TEST(Validation, RefusesEveryBadCallForward) {
  for (const Bad<Parts>& bad : common_cases()) {
    World world(bad.base);
    Parts parts = parts_of(world, world.forward);
    bad.spoil(parts);
    expect_refused(world, world.forward, bad.message, bad.code);
    expect_form(bad.message);
  }
}

TEST(Validation, RefusesEveryBadCallBackward) {
  for (const Bad<Parts>& bad : common_cases()) {
    World world(bad.base);
    Parts parts = parts_of(world, world.backward);
    bad.spoil(parts);
    expect_refused(world, world.backward, bad.message, bad.code);
  }
}

TEST(Validation, RefusesBadOutputsForward) {
  for (const Bad<Forward>& bad : forward_cases()) {
    World world(bad.base);
    bad.spoil(world.forward);
    expect_refused(world, world.forward, bad.message, bad.code);
    expect_form(bad.message);
  }
}

TEST(Validation, RefusesBadGradientsBackward) {
  for (const Bad<Backward>& bad : backward_cases()) {
    World world(bad.base);
    bad.spoil(world.backward);
    expect_refused(world, world.backward, bad.message, bad.code);
    expect_form(bad.message);
  }
  for (const Bad<World>& bad : option_gradient_cases()) {
    World world(bad.base);
    bad.spoil(world);
    expect_refused(world, world.backward, bad.message, bad.code);
    expect_form(bad.message);
  }
}

TEST(Validation, PlanningCallsSeeTheSameFaults) {
  World world(dense);
  world.forward.k.shape[2] = 0;
  const char* message = "k: shape (2, 4, 0, 8), expected num_heads to divide q's 4";
  EXPECT_EQ(workspace_size(world.forward).status().message(), message);
  EXPECT_EQ(explain(world.forward).status().message(), message);
  world.backward.dq = {};
  EXPECT_EQ(workspace_size(world.backward).status().message(), "dq: not given");
  EXPECT_EQ(explain(world.backward).status().message(), "dq: not given");
}

TEST(Validation, TheWorkspaceIsMemoryOfItsOwn) {
  World world(dense);
  world.forward.workspace.data = world.forward.k.data;
  expect_refused(world, world.forward, "workspace: shares memory with k, expected memory of its own",
                 Code::invalid_argument);
  world.backward.workspace.data = static_cast<std::byte*>(world.backward.dv.data) + 4;
  expect_refused(world, world.backward, "workspace: shares memory with dv, expected memory of its own",
                 Code::invalid_argument);
  EXPECT_TRUE(workspace_size(world.forward).ok()) << "a call that only plans does not look at it";
}

// The environment is as bad a place for a wrong number as an argument.
TEST(Validation, TheNumberOfThreadsInTheEnvironment) {
  World world(dense);
  for (const char* bad : {"0", "-1", "two", "2x", "4097", "99999999999999999999", " 2"}) {
    ASSERT_EQ(setenv("TESSERA_NUM_THREADS", bad, 1), 0);
    const std::string message = "TESSERA_NUM_THREADS: \"" + std::string(bad) + "\", expected 1 to 4096";
    expect_refused(world, world.forward, message.c_str(), Code::invalid_argument);
  }
  world.forward.options.num_threads = 1;
  EXPECT_TRUE(validate(world.forward).ok()) << "what the call says counts";
  world.forward.options.num_threads = 0;
  ASSERT_EQ(setenv("TESSERA_NUM_THREADS", "3", 1), 0);
  EXPECT_EQ(validate(world.forward).value().num_threads, 3);
  ASSERT_EQ(setenv("TESSERA_NUM_THREADS", "", 1), 0);
  EXPECT_GE(validate(world.forward).value().num_threads, 1) << "empty is not set";
  ASSERT_EQ(unsetenv("TESSERA_NUM_THREADS"), 0);
  EXPECT_GE(validate(world.forward).value().num_threads, 1);
}

// Shapes that no memory can have, but a call that only plans can: no size may overflow.
TEST(Validation, PlanningRefusesAbsurdSizes) {
  constexpr std::int64_t rows = 2147483647, heads = 65536;
  Backward x;
  x.q = x.k = x.v = x.o = x.dout = x.dq = x.dk = x.dv = Tensor(nullptr, DType::bfloat16, {1, rows, heads, 1});
  x.lse = Tensor(nullptr, DType::float32, {1, heads, rows});
  EXPECT_EQ(workspace_size(x).status().message(),
            "q: shape (1, 2147483647, 65536, 1), expected at most 2^46 rows in all heads");
  for (Tensor* tensor : {&x.q, &x.k, &x.v, &x.o, &x.dout, &x.dq, &x.dk, &x.dv}) tensor->shape[2] = 16384;
  x.lse.shape[1] = 16384;
  for (Tensor* tensor : {&x.q, &x.k, &x.v, &x.o, &x.dout, &x.dq, &x.dk, &x.dv})
    tensor->stride = {16384 * rows, 16384, 1, 1};
  const Result<std::size_t> bytes = workspace_size(x);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  EXPECT_GT(bytes.value(), std::size_t{16384} * rows * 4) << "dq in float32 at least";
}

// Addresses that nobody can read, and lengths that would be refused in host memory.
TEST(Validation, NothingOfAGpuIsRead) {
  World world(packed);
  Forward& x = world.forward;
  x.options.seqused_q = x.options.seqused_k = world.ints({0, 0, 0});
  x.options.alibi_slopes = world.make(DType::float32, {4});
  x.options.sinks = world.make(DType::float32, {4});
  std::uintptr_t address = 0x1000;  // never mapped
  for (Tensor* tensor :
       {&x.q, &x.k, &x.v, &x.o, &x.lse, &x.options.cu_seqlens_q, &x.options.cu_seqlens_k,
        &x.options.seqused_q, &x.options.seqused_k, &x.options.alibi_slopes, &x.options.sinks}) {
    tensor->device = cuda1;
    tensor->data = reinterpret_cast<void*>(address);
    address += 0x1000;
  }
  x.workspace.data = reinterpret_cast<void*>(address);
  const Problem problem = validate(x).or_throw();
  EXPECT_FALSE(problem.on_host());
  EXPECT_EQ(problem.device.device_id, 1);
  EXPECT_EQ(problem.max_seqlen_q, 7) << "the total";
  EXPECT_EQ(problem.max_seqlen_k, 9);
  EXPECT_EQ(problem.cu_seqlens_q, x.options.cu_seqlens_q.data);
  EXPECT_EQ(problem.seqused_k, x.options.seqused_k.data);
  x.options.max_seqlen_q = 3;  // is believed
  x.options.bias = world.make(DType::float32, {3, 9});
  x.options.bias.device = cuda1;
  EXPECT_EQ(validate(x).or_throw().max_seqlen_q, 3);

  // Three sequences of 7 / 3 rows and 9 / 3 keys: 2, 2 and 3 rows.
  x.options.kernel = "cpu_baseline";
  EXPECT_EQ(explain(x).or_throw().dense_flops, 4.0 * 2 * (8 + 6) * (7 * 3));
  x.options.causal = true;  // bottom right: 2 + 3, 2 + 3 and 1 + 2 + 3
  EXPECT_EQ(explain(x).or_throw().flops, 4.0 * 2 * (8 + 6) * (5 + 5 + 6));
  x.options.cu_seqlens_q.data = nullptr;
  EXPECT_TRUE(explain(x).ok()) << "a call that only plans needs no address";
}

// Who cannot run on a GPU says so, and nothing is written.
TEST(Validation, AGpuCallNeedsAGpuKernel) {
  World world(dense);
  move_to(world.forward, {kDLCUDA, 99});
  const std::vector<std::byte> before = world.snapshot();
  const Status status = forward(world.forward);
  EXPECT_EQ(status.code(), Code::unsupported);
  EXPECT_TRUE(status.message().starts_with("no kernel takes this call: ")) << status.message();
  EXPECT_NE(status.message().find("cpu_baseline: the tensors are not in CPU memory"), std::string::npos);
  EXPECT_EQ(workspace_size(world.forward).status().message(), status.message());
  EXPECT_EQ(prepare(world.forward).message(), status.message());
  EXPECT_TRUE(world.snapshot() == before);
}

TEST(Validation, ManagedMemoryIsTheGpus) {
  World world(dense);
  move_to(world.forward, cuda0);
  world.forward.k.device = managed0;
  EXPECT_EQ(validate(world.forward).or_throw().device.device_type, kDLCUDA);
  move_to(world.forward, managed0);
  EXPECT_EQ(validate(world.forward).or_throw().device.device_type, kDLCUDA);
}

TEST(Validation, PlanningCallsNeedNoData) {
  World world(packed);
  for (Tensor* tensor :
       {&world.forward.q, &world.forward.k, &world.forward.v, &world.forward.o, &world.forward.lse}) {
    tensor->data = nullptr;
  }
  EXPECT_TRUE(explain(world.forward).ok()) << explain(world.forward).status().message();
  EXPECT_FALSE(validate(world.forward).ok());
  world.forward.options.cu_seqlens_q.data = nullptr;
  EXPECT_EQ(explain(world.forward).status().message(), "cu_seqlens_q.data: null, expected an address");
}

}  // namespace
}  // namespace tessera
