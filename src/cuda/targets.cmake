# The GPU backend. libcuda and libnvrtc are opened at run time: nothing of CUDA is needed here.
include(${CMAKE_CURRENT_LIST_DIR}/embed.cmake)

set(cuda_driver_sources
  cuda/driver/cache.cpp
  cuda/driver/compile.cpp
  cuda/driver/cuda_api.cpp
  cuda/driver/device.cpp
  cuda/driver/file.cpp
  cuda/driver/find.cpp
  cuda/driver/keys.cpp
  cuda/driver/library.cpp
  cuda/driver/loader.cpp
  cuda/driver/memory.cpp
  cuda/driver/nvrtc_api.cpp
  cuda/driver/pack.cpp
  cuda/driver/ptxas_log.cpp
  cuda/driver/sha256.cpp
  cuda/driver/tensor_map.cpp)
set(cuda_plan_sources
  cuda/plan/pack.cpp
  cuda/plan/decode.cpp
  cuda/plan/order.cpp
  cuda/plan/plan.cpp)
set(cuda_launch_sources
  cuda/launch/kernels.cpp
  cuda/launch/tensor_maps.cpp)

add_library(tessera_cuda OBJECT
  ${cuda_driver_sources} ${cuda_plan_sources} ${cuda_launch_sources} ${embedded_cpp})
target_include_directories(tessera_cuda PRIVATE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${DLPACK_INCLUDE_DIR})
target_include_directories(tessera_cuda SYSTEM PRIVATE ${ZSTD_INCLUDE_DIR})
target_link_libraries(tessera_cuda PRIVATE tessera_warnings)
target_compile_definitions(tessera_objects PRIVATE TESSERA_CUDA)
list(APPEND objects $<TARGET_OBJECTS:tessera_cuda>)
if(TARGET tessera_zstd)
  list(APPEND objects $<TARGET_OBJECTS:tessera_zstd>)
endif()
list(APPEND tessera_libraries ${ZSTD_LIBRARY} ${CMAKE_DL_LIBS})
