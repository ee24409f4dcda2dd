#include "cuda/driver/cuda_api.h"
#include "cuda/driver/driver.h"

namespace tessera::cuda {

bool has_tensor_maps() {
  const Result<const CudaApi*> api = cuda_api();
  return api.ok() && api.value()->tensor_map_encode != nullptr;
}

Status encode_tensor_map(const TensorMapSpec& spec, void* map) {
  const Result<const CudaApi*> api = cuda_api();
  if (!api.ok()) return api.status();
  if (api.value()->tensor_map_encode == nullptr)
    return {Code::unsupported, "cuTensorMapEncodeTiled: unknown to this driver, expected one of CUDA 12"};
  std::array<unsigned long long, 4> extents{};
  std::array<unsigned long long, 3> strides{};
  for (std::size_t i = 0; i < extents.size(); ++i)
    extents[i] = static_cast<unsigned long long>(spec.extents[i]);
  for (std::size_t i = 0; i < strides.size(); ++i)
    strides[i] = static_cast<unsigned long long>(spec.strides[i]);
  const std::array<unsigned, 4> box = {static_cast<unsigned>(spec.box_cols),
                                       static_cast<unsigned>(spec.box_rows), 1, 1};
  const std::array<unsigned, 4> element_strides = {1, 1, 1, 1};
  const CuResult result = api.value()->tensor_map_encode(
      map, cu::tensor_map_uint16, 4, spec.data, extents.data(), strides.data(), box.data(),
      element_strides.data(), cu::tensor_map_interleave_none,
      spec.box_cols == 64 ? cu::tensor_map_swizzle_128b : cu::tensor_map_swizzle_64b,
      cu::tensor_map_promotion_256b, cu::tensor_map_fill_zeros);
  if (result == cu::success) return {};
  std::string text = "cuTensorMapEncodeTiled of extents";
  for (const std::int64_t extent : spec.extents) text += " " + std::to_string(extent);
  text += ", strides";
  for (const std::int64_t stride : spec.strides) text += " " + std::to_string(stride);
  return checked(*api.value(), result,
                 text + ", box " + std::to_string(spec.box_cols) + " x " + std::to_string(spec.box_rows));
}

}  // namespace tessera::cuda
