# The CUTLASS headers that are embedded for NVRTC, and where they come from.
#
# tessera_cutlass_dir is set to the folder that holds cute/ and cutlass/: TESSERA_CUTLASS_DIR if given, else that of the
# pinned wheel.
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

set(version 4.2.0.0)  # the same pin as scripts/requirements-cuda.txt
set(instead "Set -DTESSERA_CUTLASS_DIR=<folder that holds cute/ and cutlass/ of CUTLASS ${version}>, \
or -DTESSERA_CUDA=OFF to build without a GPU backend.")
if(TESSERA_CUTLASS_DIR)
  set(tessera_cutlass_dir ${TESSERA_CUTLASS_DIR})
  tessera_missing(missing ${tessera_cutlass_dir} ${tessera_cutlass_files})
  if(missing)
    message(FATAL_ERROR "TESSERA_CUTLASS_DIR: ${TESSERA_CUTLASS_DIR} has no ${missing}. ${instead}")
  endif()
else()
  tessera_pinned(tessera_cutlass_dir NAME cutlass VERSION ${version}
    URL https://files.pythonhosted.org/packages/21/6b/e86fc2fd536dd4b8bd2209aa31d7002610c501b0802337787eac9c9b328c/nvidia_cutlass-${version}-py3-none-any.whl
    SHA256 f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6
    FOLDER cutlass_library/source/include
    FILES ${tessera_cutlass_files}
    INSTEAD "${instead}")
endif()
