# What `cmake --install` leaves besides the command: the headers, the library, and the two ways to find them,
# the CMake package (find_package(tessera)) and pkg-config (tessera.pc).
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS tessera EXPORT tessera-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TESSERA_CUDA)
  # Where tessera-pack was run: beside the library, which looks for it there.
  install(FILES $<TARGET_FILE_DIR:tessera>/tessera.pack DESTINATION ${CMAKE_INSTALL_LIBDIR} OPTIONAL)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tessera-targets NAMESPACE tessera:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/tessera-config.cmake.in
  ${PROJECT_BINARY_DIR}/tessera-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tessera-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tessera-config.cmake ${PROJECT_BINARY_DIR}/tessera-config-version.cmake
  DESTINATION ${package_dir})

# A static library hands the libraries it needs on to whoever links it.
set(pc_private_libs "-pthread -lstdc++")
if(TESSERA_CUDA)
  string(APPEND pc_private_libs " -ldl")
  if(NOT TARGET tessera_zstd)
    string(APPEND pc_private_libs " -lzstd")
  endif()
endif()
if(BUILD_SHARED_LIBS)
  set(pc_libs "-ltessera")
else()
  set(pc_libs "-ltessera ${pc_private_libs}")
endif()
# Relative to the file itself, so that the installed tree can be moved.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/tessera.pc.in ${PROJECT_BINARY_DIR}/tessera.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
