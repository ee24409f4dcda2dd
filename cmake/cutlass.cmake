# The CUTLASS headers that are embedded for NVRTC, and where they come from.
#
# tessera_cutlass_dir is set to the folder that holds cute/ and cutlass/: TESSERA_CUTLASS_DIR if given, else the
# pinned wheel as ./dev keeps it in .cache, else the same wheel downloaded into the build folder.
set(TESSERA_CUTLASS_DIR "" CACHE PATH "The folder that holds CUTLASS's cute/ and cutlass/; empty: the pinned wheel")

# What kernels may include, and what that includes in turn. kernels/standin has the rest, by the same names
# (docs/adr/0015-stand-ins-for-cutlass-includes.md).
set(tessera_cutlass_roots
  cute/arch/cluster_sm90.hpp
  cute/arch/copy_sm75.hpp
  cute/arch/copy_sm80.hpp
  cute/arch/copy_sm90.hpp
  cute/arch/copy_sm90_desc.hpp
  cute/arch/copy_sm90_tma.hpp
  cute/arch/mma_sm80.hpp
  cute/arch/mma_sm90_desc.hpp
  cute/arch/mma_sm90_gmma.hpp
  cute/arch/util.hpp
  cutlass/arch/barrier.h
  cutlass/arch/reg_reconfig.h)
set(tessera_cutlass_files ${tessera_cutlass_roots}
  cute/arch/config.hpp
  cute/arch/copy.hpp
  cute/arch/mma.hpp
  cute/config.hpp
  cutlass/arch/config.h
  cutlass/arch/synclog.hpp
  cutlass/cutlass.h
  cutlass/detail/helper_macros.hpp)

# The same pin as scripts/requirements-cuda.txt.
set(wheel_version 4.2.0.0)
set(wheel_hash f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6)
set(wheel_url https://files.pythonhosted.org/packages/21/6b/e86fc2fd536dd4b8bd2209aa31d7002610c501b0802337787eac9c9b328c/nvidia_cutlass-${wheel_version}-py3-none-any.whl)
set(wheel_include cutlass_library/source/include)

# The first file of the list that dir lacks; empty: it has all.
function(tessera_cutlass_missing dir result)
  set(${result} "" PARENT_SCOPE)
  foreach(file IN LISTS tessera_cutlass_files)
    if(NOT EXISTS ${dir}/${file})
      set(${result} ${file} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# result: what went wrong; empty: nothing.
function(tessera_download_cutlass dir result)
  set(wheel ${dir}.whl)
  message(STATUS "Downloading ${wheel_url}")
  # Not EXPECTED_HASH: a failed download would be reported as a wrong hash.
  file(DOWNLOAD ${wheel_url} ${wheel} STATUS status TIMEOUT 300)
  list(GET status 0 code)
  list(GET status 1 text)
  if(code EQUAL 0)
    file(SHA256 ${wheel} hash)
    if(hash STREQUAL wheel_hash)
      list(TRANSFORM tessera_cutlass_files PREPEND ${wheel_include}/ OUTPUT_VARIABLE patterns)
      file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${dir} PATTERNS ${patterns})
      set(text "")
    else()
      set(text "SHA256 ${hash}, expected ${wheel_hash}")
    endif()
  endif()
  file(REMOVE ${wheel})
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

if(TESSERA_CUTLASS_DIR)
  set(tessera_cutlass_dir ${TESSERA_CUTLASS_DIR})
  tessera_cutlass_missing(${tessera_cutlass_dir} missing)
  if(missing)
    message(FATAL_ERROR "TESSERA_CUTLASS_DIR: ${TESSERA_CUTLASS_DIR} has no ${missing}, expected the include folder "
      "of CUTLASS ${wheel_version}. -DTESSERA_CUDA=OFF builds without a GPU backend.")
  endif()
else()
  set(tessera_cutlass_dir ${PROJECT_SOURCE_DIR}/.cache/cutlass-${wheel_version}/${wheel_include})
  tessera_cutlass_missing(${tessera_cutlass_dir} missing)
  if(missing)
    set(tessera_cutlass_dir ${PROJECT_BINARY_DIR}/cutlass-${wheel_version}/${wheel_include})
    tessera_cutlass_missing(${tessera_cutlass_dir} missing)
  endif()
  if(missing)
    tessera_download_cutlass(${PROJECT_BINARY_DIR}/cutlass-${wheel_version} failure)
    tessera_cutlass_missing(${tessera_cutlass_dir} missing)
    if(failure OR missing)
      message(FATAL_ERROR "CUTLASS could not be downloaded: ${wheel_url}: ${failure}\n"
        "Set -DTESSERA_CUTLASS_DIR=<folder that holds cute/ and cutlass/ of CUTLASS ${wheel_version}>, "
        "or -DTESSERA_CUDA=OFF to build without a GPU backend.")
    endif()
  endif()
endif()
