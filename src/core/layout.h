// Facts about one tensor, as validation needs them: its text, its strides, and the memory that it covers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/problem.h"

namespace tessera {

using Extents = std::array<std::int64_t, Tensor::max_rank>;

[[nodiscard]] inline std::string list_text(std::span<const std::int64_t> list) {
  std::string text = "(";
  for (std::size_t i = 0; i < list.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(list[i]);
  return text + ")";
}

[[nodiscard]] inline std::string shape_text(const Tensor& t) {
  return "shape " + list_text({t.shape.data(), static_cast<std::size_t>(t.rank)});
}
[[nodiscard]] inline std::string stride_text(const Tensor& t) {
  return "stride " + list_text({t.stride.data(), static_cast<std::size_t>(t.rank)});
}

// DLPack's kDLFloat8_e4m3fn, which its headers before 1.1 lack.
inline constexpr std::uint8_t float8_e4m3fn_code = 10;

[[nodiscard]] inline std::string dtype_text(DLDataType type) {
  if (type.code == float8_e4m3fn_code && type.bits == 8 && type.lanes == 1) return "float8_e4m3fn";
  static constexpr std::array<const char*, 6> names = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  std::string text = type.code < names.size() ? names[type.code] : "code" + std::to_string(type.code) + "_";
  text += std::to_string(type.bits);
  return type.lanes == 1 ? text : text + "x" + std::to_string(type.lanes);
}

[[nodiscard]] inline std::string device_text(DLDevice device) {
  std::string text;
  switch (device.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      text = "cuda";
      break;
    case kDLCUDAManaged:
      text = "cuda_managed";
      break;
    case kDLCUDAHost:
      text = "cuda_host";
      break;
    default:
      text = "type " + std::to_string(device.device_type);
  }
  return text.append(":").append(std::to_string(device.device_id));
}

// There is one CPU, and managed memory of a GPU is as good as its own.
[[nodiscard]] inline DLDevice normal_device(DLDevice device) {
  if (device.device_type == kDLCPU) return {kDLCPU, 0};
  return {device.device_type == kDLCUDAManaged ? kDLCUDA : device.device_type, device.device_id};
}

[[nodiscard]] inline bool same_device(DLDevice a, DLDevice b) {
  const DLDevice one = normal_device(a), other = normal_device(b);
  return one.device_type == other.device_type && one.device_id == other.device_id;
}

[[nodiscard]] inline DLDataType dlpack_type(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return {kDLFloat, 32, 1};
    case DType::float16:
      return {kDLFloat, 16, 1};
    case DType::bfloat16:
      return {kDLBfloat, 16, 1};
    case DType::int32:
      return {kDLInt, 32, 1};
    case DType::float8_e4m3fn:
      return {float8_e4m3fn_code, 8, 1};
    case DType::int8:
      return {kDLInt, 8, 1};
  }
  return {kDLOpaqueHandle, 0, 1};
}

[[nodiscard]] inline std::optional<DType> dtype_of(const Tensor& tensor) {
  const auto [code, bits, lanes] = tensor.dtype;
  if (lanes != 1) return std::nullopt;
  if (code == kDLFloat && bits == 32) return DType::float32;
  if (code == kDLFloat && bits == 16) return DType::float16;
  if (code == kDLBfloat && bits == 16) return DType::bfloat16;
  if (code == kDLInt && bits == 32) return DType::int32;
  if (code == float8_e4m3fn_code && bits == 8) return DType::float8_e4m3fn;
  if (code == kDLInt && bits == 8) return DType::int8;
  return std::nullopt;
}

[[nodiscard]] inline bool has_elements(const Tensor& tensor) {
  return std::all_of(tensor.shape.begin(), tensor.shape.begin() + tensor.rank,
                     [](std::int64_t n) { return n != 0; });
}

// The strides that matter: 0 for dimensions of size 1, and throughout a tensor without elements.
[[nodiscard]] inline Extents effective_strides(const Tensor& tensor) {
  Extents stride{};
  if (!has_elements(tensor)) return stride;
  for (int i = 0; i < tensor.rank; ++i) stride[i] = tensor.shape[i] == 1 ? 0 : tensor.stride[i];
  return stride;
}

// Bytes from the first element to the end of the last; none if they do not fit.
[[nodiscard]] inline std::optional<std::int64_t> bytes_spanned(const Tensor& tensor) {
  const Extents stride = effective_strides(tensor);
  std::int64_t elements = has_elements(tensor) ? 1 : 0;
  for (int i = 0; i < tensor.rank; ++i) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(tensor.shape[i] - 1, stride[i], &reach)) return std::nullopt;
    if (__builtin_add_overflow(elements, reach, &elements)) return std::nullopt;
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, tensor.dtype.bits / 8, &bytes)) return std::nullopt;
  return bytes;
}

// Whether the strides nest: each steps over all that the smaller ones reach together. Then no two elements
// share memory. Layouts that interleave without nesting do exist, and nobody writes to them.
[[nodiscard]] inline bool nests(const Tensor& tensor) {
  if (!has_elements(tensor)) return true;
  const Extents stride = effective_strides(tensor);
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 1) continue;
    std::int64_t reach = 0;
    for (int j = 0; j < tensor.rank; ++j) {
      if (j != i && tensor.shape[j] > 1 && stride[j] <= stride[i]) reach += (tensor.shape[j] - 1) * stride[j];
    }
    if (stride[i] <= reach) return false;
  }
  return true;
}

// The memory of a tensor that outlives this, or of a plain buffer.
struct Footprint {
  std::uintptr_t begin = 0, end = 0;
  const Tensor* tensor = nullptr;

  Footprint() = default;
  Footprint(const void* data, std::size_t bytes)
      : begin(reinterpret_cast<std::uintptr_t>(data)), end(begin + bytes) {}
  explicit Footprint(const Tensor& of) : begin(reinterpret_cast<std::uintptr_t>(of.data)), tensor(&of) {
    end = begin + static_cast<std::uintptr_t>(bytes_spanned(of).value_or(0));
  }
  // Whether every byte from begin to end belongs to it.
  [[nodiscard]] bool dense() const {
    if (tensor == nullptr) return true;
    double elements = 1;
    for (int i = 0; i < tensor->rank; ++i) elements *= static_cast<double>(tensor->shape[i]);
    return nests(*tensor) && elements * tensor->dtype.bits == static_cast<double>(end - begin) * 8;
  }
  [[nodiscard]] bool contains(std::uintptr_t address) const { return begin <= address && address < end; }
};

// Whether a and b certainly share memory. Slices of one buffer, such as dq, dk and dv of a packed dqkv,
// interleave without sharing any, so that overlapping spans alone prove nothing.
[[nodiscard]] inline bool overlap(const Footprint& a, const Footprint& b) {
  if (a.begin == a.end || b.begin == b.end || a.end <= b.begin || b.end <= a.begin) return false;
  return a.begin == b.begin || (a.dense() && (a.contains(b.begin) || a.contains(b.end - 1))) ||
         (b.dense() && (b.contains(a.begin) || b.contains(a.end - 1)));
}

}  // namespace tessera
