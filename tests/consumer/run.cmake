# The consumer test's steps; tests/consumer/CMakeLists.txt sets the variables.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${result}): ${command}\n${output}")
  endif()
endfunction()

set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${WORK_DIR})
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --config ${CONFIG} --prefix ${prefix})

# C++: the CMake package.
run(${CMAKE_COMMAND} -S ${SOURCE_DIR}/cpp -B ${WORK_DIR}/cpp -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${prefix}
  -DCMAKE_CXX_COMPILER=${CXX_COMPILER} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" -DCMAKE_BUILD_TYPE=${CONFIG})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/cpp --config ${CONFIG})
run(${WORK_DIR}/cpp/consumer)

# C: pkg-config.
find_program(PKG_CONFIG pkg-config REQUIRED)
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${prefix}/${LIBDIR}/pkgconfig
    ${PKG_CONFIG} --cflags --libs tessera
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
separate_arguments(extra UNIX_COMMAND "${C_FLAGS}")
run(${C_COMPILER} -std=c11 ${extra} ${SOURCE_DIR}/c/consumer.c ${flags} -lm -Wl,-rpath,${prefix}/${LIBDIR}
  -o ${WORK_DIR}/consumer_c)
run(${WORK_DIR}/consumer_c)
