// Caches of 8-bit dtypes: every stored number is read as what it is, what is appended is rounded as
// docs/semantics.md says, and everything else that decode does holds with them.
#include <cmath>

#include "core/half.h"
#include "cpu/decode_kernel_test.h"

namespace tessera::verify {
namespace {

constexpr DType cache_dtypes[] = {DType::float8_e4m3fn, DType::int8};

float stored_number(DType dtype, int code) {
  return dtype == DType::int8 ? to_float(static_cast<std::int8_t>(code))
                              : to_float(float8_e4m3fn{static_cast<std::uint8_t>(code)});
}

std::byte* bytes_of(const Buffer& buffer) { return static_cast<std::byte*>(buffer.tensor().data); }

using DecodeCache = DecodeTest;
TESSERA_FOR_EACH_KERNEL(DecodeCache);

std::string text_of(DType dtype, std::int64_t seed) {
  return std::string(name_of(dtype)) + ", " + std::to_string(seed);
}

// One key: o is its v, and lse of a query that is 1 at one place is its k there. Few rows and many take
// different ways.
TEST_P(DecodeCache, EveryStoredNumberIsRead) {
  for (const DType dtype : cache_dtypes) {
    for (const std::int64_t seqlen_q : {1, 256}) {
      for (int first = 0; first < (seqlen_q == 1 ? 256 : 1); first += 37) {
        DecodeCase c;
        c.cache_seqlens = {1};
        c.seqlen_q = seqlen_q;
        c.num_heads_q = 1;
        c.head_dim = c.head_dim_v = 256;
        c.cache_dtype = dtype;
        c.cache_scale = 0.25;
        DecodeTensors tensors(forced(c));
        for (int i = 0; i < 256; ++i) {
          bytes_of(tensors.k_cache)[i] = bytes_of(tensors.v_cache)[i] = static_cast<std::byte>(i);
        }
        // A NaN in k is every row's: those of the numbers come one by one, here and below.
        const auto is_nan = [&](int code) { return std::isnan(stored_number(dtype, code)); };
        for (int i = 0; i < 256; ++i) {
          if (is_nan(i)) bytes_of(tensors.k_cache)[i] = std::byte{0};
        }
        for (std::int64_t i = 0; i < seqlen_q * 256; ++i)
          tensors.q.set(i, i % 256 == (first + i / 256) % 256);
        tensors.q.freeze();
        const Status status = run(tensors);
        ASSERT_TRUE(status.ok()) << status.message();
        const double k_scale = tensors.k_scale.get(0), v_scale = tensors.v_scale.get(0);
        for (std::int64_t row = 0; row < seqlen_q; ++row) {
          const int code = static_cast<int>((first + row) % 256);
          const double k = is_nan(code) ? 0.0 : stored_number(dtype, code) * k_scale / 16.0;
          EXPECT_NEAR(tensors.lse.get(row), k, 1e-5 + 1e-5 * std::abs(k)) << name_of(dtype) << " " << code;
          for (int i = 0; i < 256; ++i) {
            const double v = stored_number(dtype, i) * v_scale, o = tensors.o.get(row * 256 + i);
            const double unit = tensors.settings.o_dtype == DType::float32 ? 1e-6 : 0x1p-8;
            EXPECT_TRUE(is_nan(i) ? std::isnan(o) : std::abs(o - v) <= unit * std::abs(v))
                << name_of(dtype) << " " << i << ": " << o << " for " << v;
          }
        }
      }
    }
  }
}

TEST_P(DecodeCache, NaNsOfKeysReachTheResult) {
  for (const int code : {0x7F, 0xFF}) {
    for (const std::int64_t seqlen_q : {1, 20}) {
      DecodeCase c;
      c.cache_seqlens = {30};
      c.seqlen_q = seqlen_q;
      c.cache_dtype = DType::float8_e4m3fn;
      DecodeTensors tensors(forced(c));
      bytes_of(tensors.k_cache)[17 * 64 + 3] = static_cast<std::byte>(code);
      const Status status = run(tensors);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(std::isnan(tensors.lse.get(0)) && std::isnan(tensors.o.get(0))) << code;
    }
  }
}

// Ties, numbers beyond the largest, infinities and NaN, in k and in v; what is stored is compared bit by bit.
TEST_P(DecodeCache, WhatIsAppendedIsRoundedAndSaturated) {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float numbers[] = {0.0f,    -0.0f,    1.0f,   -2.5f,  0.5f, 1.5f,  126.5f, 127.5f,  -127.5f,
                           448.0f,  463.0f,   464.0f, 480.0f, 1e4f, -1e4f, 17.0f,  19.0f,   -21.0f,
                           0x1p-7f, 0x1p-10f, 3e-3f,  -6e-3f, inf,  -inf,  nan,    0x1p-9f, 1.0625f};
  for (const DType dtype : cache_dtypes) {
    for (const double scale : {0.0, 0.5, 3.0}) {
      DecodeCase c;
      c.cache_seqlens = {5, 0};
      c.seqlen_new = 1;
      c.num_heads_q = c.num_heads_k = 3;
      c.head_dim = c.head_dim_v = 27;
      c.page_size = 4;
      c.cache_dtype = dtype;
      c.cache_scale = scale;
      DecodeTensors tensors(forced(c));
      for (std::int64_t i = 0; i < tensors.k_new.size(); ++i) {
        tensors.k_new.set(i, numbers[i % 27]);
        tensors.v_new.set(i, numbers[26 - i % 27]);
      }
      const Status status = run(tensors);
      ASSERT_TRUE(status.ok()) << status.message();
      const auto expect = [&](const Buffer& cache, const Buffer& from, const Buffer& scales) {
        for (std::int64_t i = 0; i < from.size(); ++i) {
          const std::int64_t b = i / 81, place = tensors.row_of(b, c.cache_seqlens[b]) * 81 + i % 81;
          const float by = scale == 0 ? 1.0f : static_cast<float>(scales.get(i % 81 / 27));
          const float x = static_cast<float>(from.get(i)) / by;
          const int bits = dtype == DType::int8 ? static_cast<std::uint8_t>(from_float<std::int8_t>(x))
                                                : from_float<float8_e4m3fn>(x).bits;
          const int stored = static_cast<int>(bytes_of(cache)[cache.position(place)]);
          const bool both_nan = dtype != DType::int8 && (bits & stored & 0x7F) == 0x7F;
          EXPECT_TRUE(stored == bits || both_nan)
              << name_of(dtype) << " " << from.get(i) << " / " << by << ": " << stored << " for " << bits;
        }
      };
      expect(tensors.k_cache, tensors.k_new, tensors.k_scale);
      expect(tensors.v_cache, tensors.v_new, tensors.v_scale);
    }
  }
}

TEST_P(DecodeCache, AppendAndRotaryInPages) {
  for (const DType dtype : cache_dtypes) {
    for (const std::int64_t page : {0, 1, 3, 16}) {
      for (const bool interleaved : {false, true}) {
        DecodeCase c;
        c.cache_seqlens = {37, 0, 130, 15};
        c.seqlen_q = c.seqlen_new = page == 16 ? 20 : 3;
        c.num_heads_q = 4;
        c.num_heads_k = 2;
        c.page_size = page;
        c.causal = true;
        c.rotary_dim = 24;
        c.interleaved = interleaved;
        c.dtype = c.o_dtype = DType::bfloat16;
        c.cache_dtype = dtype;
        c.cache_scale = dtype == DType::int8 ? 0.02 : 0.125;
        expect_right(c, text_of(dtype, page));
      }
    }
  }
}

void random_cases(std::uint64_t part) {
  DecodeTest::expect_right_part(part, 80, [](std::uint64_t seed) {
    DecodeCase c = random_decode_case(1000 + seed);
    c.cache_dtype = cache_dtypes[seed / DecodeTest::parts % 2];
    c.cache_scale = *c.cache_dtype == DType::int8 ? 0.03 : seed % 3 == 0 ? 0.0 : 0.5;
    c.magnitude = 1;
    return c;
  });
}
TEST_P(DecodeCache, RandomCases1) { random_cases(0); }
TEST_P(DecodeCache, RandomCases2) { random_cases(1); }
TEST_P(DecodeCache, RandomCases3) { random_cases(2); }
TEST_P(DecodeCache, RandomCases4) { random_cases(3); }

// The scales come in at the ends: parts of a sequence are merged without them.
TEST_P(DecodeCache, SplitsAndThreadsGiveTheSameBits) {
  for (const DType dtype : cache_dtypes) {
    for (const std::int64_t page : {0, 3}) {
      DecodeCase c;
      c.cache_seqlens = {700, 1300, 64, 0, 513};
      c.num_heads_q = 8;
      c.num_heads_k = 2;
      c.page_size = page;
      c.cache_dtype = dtype;
      c.cache_scale = 0.05;
      DecodeTensors tensors(forced(c));
      const auto bits = [&] {
        tensors.o.poison();
        tensors.lse.poison();
        const Status status = run(tensors);
        EXPECT_TRUE(status.ok()) << status.message();
        return Snapshot{tensors.o.bytes(), tensors.lse.bytes()};
      };
      const Snapshot first = bits();
      for (const int threads : {1, 3}) {
        tensors.settings.threads = threads;
        EXPECT_EQ(bits(), first) << threads << " threads";
      }
    }
  }
}

// One scale for all heads is a stride of 0.
TEST_P(DecodeCache, AScaleMayBeExpanded) {
  DecodeCase c;
  c.cache_seqlens = {70};
  c.num_heads_q = c.num_heads_k = 3;
  c.cache_dtype = DType::int8;
  c.cache_scale = 0.05;
  DecodeTensors tensors(forced(c));
  for (std::int64_t h = 0; h < 3; ++h) {
    tensors.k_scale.set(h, 0.0625);
    tensors.v_scale.set(h, 0.5);
  }
  ASSERT_TRUE(run(tensors).ok());
  const AlignedBytes first = tensors.o.bytes();
  tensors.o.poison();
  Decode call = tensors.call();
  call.k_scale.stride[0] = call.v_scale.stride[0] = 0;
  ASSERT_TRUE(run_call<Decode>(call, decode).ok());
  EXPECT_EQ(tensors.o.bytes(), first);
}

}  // namespace
}  // namespace tessera::verify
