# Highway's and DLPack's headers, and zstd: HIGHWAY_INCLUDE_DIR, DLPACK_INCLUDE_DIR, ZSTD_INCLUDE_DIR and ZSTD_LIBRARY
# where they are given, else the system's, else the pinned ones (docs/adr/0016-libraries-from-pypi.md).
# Without ZSTD_LIBRARY, zstd is the target tessera_zstd.
option(TESSERA_SYSTEM_LIBRARIES "Look for Highway, DLPack and zstd on this machine; OFF: the pinned ones" ON)
include(${CMAKE_CURRENT_LIST_DIR}/pinned.cmake)

# What is compiled into the Python package brings its licence along.
function(tessera_install_licence name file)
  install(FILES ${file} DESTINATION tessera/licences RENAME ${name}.txt COMPONENT python EXCLUDE_FROM_ALL)
endfunction()

if(TESSERA_SYSTEM_LIBRARIES)
  find_path(HIGHWAY_INCLUDE_DIR hwy/highway.h)
  find_path(DLPACK_INCLUDE_DIR dlpack/dlpack.h)
  if(TESSERA_CUDA)
    find_path(ZSTD_INCLUDE_DIR zstd.h)
    find_library(ZSTD_LIBRARY zstd)
  endif()
endif()

if(NOT HIGHWAY_INCLUDE_DIR OR NOT DLPACK_INCLUDE_DIR)
  # NumPy's source has both: Highway 1.3 and DLPack 1.0.
  set(version 2.4.6)
  tessera_pinned(numpy NAME numpy VERSION ${version}
    URL https://files.pythonhosted.org/packages/d0/ad/fed0499ce6a338d2a03ebae59cd15093910c8875328855781952abf6c2fe/numpy-${version}.tar.gz
    SHA256 f3a3570c4a2a16746ac2c31a7c7c7b0c186b95ce902e33db6f28094ed7387dda
    FOLDER numpy-${version}/numpy/_core/src
    FILES highway/hwy highway/LICENSE common/dlpack
    INSTEAD "Set -DHIGHWAY_INCLUDE_DIR=<folder that holds hwy/> and -DDLPACK_INCLUDE_DIR=<folder that holds dlpack/>, \
or install both (Debian, Ubuntu: libhwy-dev, libdlpack-dev) and set -DTESSERA_SYSTEM_LIBRARIES=ON.")
  if(NOT HIGHWAY_INCLUDE_DIR)
    set(HIGHWAY_INCLUDE_DIR ${numpy}/highway)
    tessera_install_licence(highway ${numpy}/highway/LICENSE)
  endif()
  if(NOT DLPACK_INCLUDE_DIR)
    set(DLPACK_INCLUDE_DIR ${numpy}/common)
    # Tessera's headers include it.
    install(DIRECTORY ${DLPACK_INCLUDE_DIR}/dlpack DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
  endif()
endif()

if(TESSERA_CUDA AND NOT (ZSTD_INCLUDE_DIR AND ZSTD_LIBRARY))
  # zstandard's source has zstd 1.5.7 as one file.
  set(version 0.25.0)
  tessera_pinned(ZSTD_INCLUDE_DIR NAME zstandard VERSION ${version}
    URL https://files.pythonhosted.org/packages/fd/aa/3e0508d5a5dd96529cdc5a97011299056e14c6505b678fd58938792794b1/zstandard-${version}.tar.gz
    SHA256 7713e1179d162cf5c7906da876ec2ccb9c3a9dcbdffef0cc7f70c3667a205f0b
    FOLDER zstandard-${version}/zstd
    FILES zstd.c zstd.h zstd_errors.h LICENSE
    INSTEAD "Set -DZSTD_INCLUDE_DIR=<folder that holds zstd.h> and -DZSTD_LIBRARY=<path of libzstd>, or install it \
(Debian, Ubuntu: libzstd-dev) and set -DTESSERA_SYSTEM_LIBRARIES=ON; -DTESSERA_CUDA=OFF builds without.")
  tessera_install_licence(zstd ${ZSTD_INCLUDE_DIR}/LICENSE)
  set(ZSTD_LIBRARY "")
  add_library(tessera_zstd OBJECT ${ZSTD_INCLUDE_DIR}/zstd.c)
  # No symbol of it is seen from outside: another zstd may be in the process.
  set_target_properties(tessera_zstd PROPERTIES C_VISIBILITY_PRESET hidden)
  target_compile_definitions(tessera_zstd PRIVATE ZSTDLIB_VISIBLE= ZSTDERRORLIB_VISIBLE= ZDICTLIB_VISIBLE=)
  # It unpacks a cubin in a millisecond at -O1, too, and takes half the time to compile.
  target_compile_options(tessera_zstd PRIVATE $<$<CONFIG:Release>:-O1>)
endif()
