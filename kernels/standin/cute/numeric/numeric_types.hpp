// Stands in for CuTe's numeric types (cuda_fp16.h, cuda_bf16.h, cuda_fp8.h and CCCL). The copy instructions
// need the size of a type and an unsigned type of a size; kernels/tile has 16-bit floats of its own.
#pragma once

#include <cute/config.hpp>

namespace cute {

template <class T>
inline constexpr int sizeof_bits_v = 8 * static_cast<int>(sizeof(T));

struct alignas(16) uint128_t {
  uint64_t low, high;
};

template <int bits>
struct uint_bit;
template <>
struct uint_bit<8> {
  using type = uint8_t;
};
template <>
struct uint_bit<16> {
  using type = uint16_t;
};
template <>
struct uint_bit<32> {
  using type = uint32_t;
};
template <>
struct uint_bit<64> {
  using type = uint64_t;
};
template <>
struct uint_bit<128> {
  using type = uint128_t;
};
template <int bits>
using uint_bit_t = typename uint_bit<bits>::type;

// cp_async_wait(Int<N>) and tma_store_wait<N> name it.
template <int value>
struct Int {};

}  // namespace cute
