# What NVRTC is given: the kernels, the headers of core that they share with the host, the stand-ins, and CUTLASS's
# instruction layer, each by the name that it is included by.
include(${PROJECT_SOURCE_DIR}/cmake/cutlass.cmake)

# Headers of src/core that device code includes.
set(shared_core_headers
  attention_config.h
  attention_params.h
  decode_params.h
  eight_bits.h
  host_device.h
  mask.h
  merge_params.h
  philox.h
  softcap.h)

set(kernels ${PROJECT_SOURCE_DIR}/kernels)
file(GLOB_RECURSE kernel_files CONFIGURE_DEPENDS RELATIVE ${kernels} ${kernels}/*.cuh)
file(GLOB_RECURSE standin_files CONFIGURE_DEPENDS RELATIVE ${kernels}/standin ${kernels}/standin/*)
list(FILTER kernel_files EXCLUDE REGEX "^standin/")

set(embed_list "")
set(embed_depends ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
macro(embed name path)
  string(APPEND embed_list "${name}|${path}\n")
  list(APPEND embed_depends ${path})
endmacro()
foreach(file IN LISTS kernel_files)
  embed(${file} ${kernels}/${file})
endforeach()
foreach(file IN LISTS shared_core_headers)
  if(EXISTS ${PROJECT_SOURCE_DIR}/src/core/${file})
    embed(core/${file} ${PROJECT_SOURCE_DIR}/src/core/${file})
  endif()
endforeach()
foreach(file IN LISTS standin_files)
  embed(${file} ${kernels}/standin/${file})
endforeach()
foreach(file IN LISTS tessera_cutlass_files)
  embed(${file} ${tessera_cutlass_dir}/${file})
endforeach()

set(embed_list_file ${CMAKE_CURRENT_BINARY_DIR}/embedded_sources.txt)
set(embedded_cpp ${CMAKE_CURRENT_BINARY_DIR}/embedded_sources.cpp)
file(CONFIGURE OUTPUT ${embed_list_file} CONTENT "${embed_list}" @ONLY)  # written only when it changes
add_custom_command(OUTPUT ${embedded_cpp}
  COMMAND ${CMAKE_COMMAND} -D LIST=${embed_list_file} -D OUT=${embedded_cpp} -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${embed_list_file} ${embed_depends}
  COMMENT "Embedding the kernels' sources" VERBATIM)
# Longer strings than the standard promises; g++ and clang take them.
set_source_files_properties(${embedded_cpp} PROPERTIES COMPILE_OPTIONS "-Wno-overlength-strings")
