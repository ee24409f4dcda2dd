# The CPU kernels: target.cpp once a SIMD target, each in an object of its own. The code chooses its
# instructions itself (hwy_target.h), so no -m flag is needed.
function(tessera_cpu_target name highway_target)
  add_library(tessera_cpu_${name} OBJECT ${PROJECT_SOURCE_DIR}/src/cpu/target.cpp)
  target_compile_definitions(tessera_cpu_${name} PRIVATE
    TESSERA_CPU_KERNEL=${name} TESSERA_CPU_TARGET=${highway_target} TESSERA_CPU_TILES=${name}_tiles ${ARGN})
  target_include_directories(tessera_cpu_${name} PRIVATE
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${DLPACK_INCLUDE_DIR})
  target_include_directories(tessera_cpu_${name} SYSTEM PRIVATE ${HIGHWAY_INCLUDE_DIR})
  # A fused multiply-add is asked for by name: elsewhere both roundings are meant.
  # Vectors are handed between inlined functions only: the ABI that -Wpsabi warns of plays no part.
  # Release and the presets say how far to optimise; without it the kernels are too slow to be of use.
  target_compile_options(tessera_cpu_${name} PRIVATE
    $<$<CONFIG:Release>:-O3> $<$<CONFIG:Debug,MinSizeRel>:-O2> -Wno-psabi -ffp-contract=off)
  target_link_libraries(tessera_cpu_${name} PRIVATE tessera_warnings)
  set(objects ${objects} $<TARGET_OBJECTS:tessera_cpu_${name}> PARENT_SCOPE)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  tessera_cpu_target(amx HWY_AVX3 TESSERA_CPU_AMX)
  tessera_cpu_target(avx512_bf16 HWY_AVX3 TESSERA_CPU_BF16)
  tessera_cpu_target(avx512 HWY_AVX3)
  tessera_cpu_target(avx2 HWY_AVX2)
  tessera_cpu_target(baseline HWY_SSSE3)
  # clang-tidy is shown amx, avx512_bf16 and baseline: between them all lines but the two of AVX2 alone.
  set_target_properties(tessera_cpu_avx512 tessera_cpu_avx2 PROPERTIES EXPORT_COMPILE_COMMANDS OFF)
  if(TESSERA_EMULATE_AMX)
    # In vectors as wide as cpu_amx's, where this machine can run them.
    set(width 256)
    set(target HWY_AVX2)
    if(EXISTS /proc/cpuinfo)
      file(STRINGS /proc/cpuinfo wide REGEX "^flags.* avx512vl" LIMIT_COUNT 1)
      if(wide)
        set(width 512)
        set(target HWY_AVX3)
      endif()
    endif()
    tessera_cpu_target(amx_emulated ${target} TESSERA_CPU_AMX TESSERA_CPU_AMX_EMULATED)
    target_compile_definitions(tessera_objects PRIVATE TESSERA_EMULATE_AMX=${width})
  endif()
else()
  tessera_cpu_target(baseline HWY_STATIC_TARGET)
endif()
