# Archives on PyPI that the build takes files from, each pinned by its hash.
#
#   tessera_pinned(result NAME name VERSION version URL url SHA256 hash FOLDER folder FILES file... INSTEAD text)
#
# result: the path of FOLDER, a folder of the archive, with FILES (files or folders) in it. It is in <name>-<version> in
# the source tree's .cache, or in TESSERA_ARCHIVES; where neither has it, the archive is downloaded and FILES are unpacked
# into the latter. INSTEAD says how to do without the download, where it fails.
set(TESSERA_ARCHIVES ${PROJECT_BINARY_DIR} CACHE PATH "The folder into which archives are downloaded")

# The first of the files that dir lacks; empty: it has all.
function(tessera_missing result dir)
  set(${result} "" PARENT_SCOPE)
  foreach(file IN LISTS ARGN)
    if(NOT EXISTS ${dir}/${file})
      set(${result} ${file} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# result: what went wrong; empty: nothing.
function(tessera_download result url sha256 archive)
  # Not EXPECTED_HASH: a failed download would be reported as a wrong hash.
  foreach(attempt RANGE 1 3)
    file(DOWNLOAD ${url} ${archive} STATUS status TIMEOUT 300 TLS_VERIFY ON)
    list(GET status 0 code)
    list(GET status 1 text)
    if(code EQUAL 0)
      file(SHA256 ${archive} hash)
      if(hash STREQUAL sha256)
        set(${result} "" PARENT_SCOPE)
        return()
      endif()
      set(text "SHA256 ${hash}, expected ${sha256}")
    endif()
  endforeach()
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

function(tessera_pinned result)
  cmake_parse_arguments(PARSE_ARGV 1 pin "" "NAME;VERSION;URL;SHA256;FOLDER;INSTEAD" "FILES")
  set(name ${pin_NAME}-${pin_VERSION})
  foreach(place ${PROJECT_SOURCE_DIR}/.cache ${TESSERA_ARCHIVES})
    tessera_missing(missing ${place}/${name}/${pin_FOLDER} ${pin_FILES})
    if(NOT missing)
      set(${result} ${place}/${name}/${pin_FOLDER} PARENT_SCOPE)
      return()
    endif()
  endforeach()

  message(STATUS "Downloading ${pin_URL}")
  set(dir ${TESSERA_ARCHIVES}/${name})
  tessera_download(failure ${pin_URL} ${pin_SHA256} ${dir}.archive)
  if(NOT failure)
    list(TRANSFORM pin_FILES PREPEND ${pin_FOLDER}/ OUTPUT_VARIABLE patterns)
    # Under another name until it is whole.
    file(REMOVE_RECURSE ${dir} ${dir}.new)
    file(ARCHIVE_EXTRACT INPUT ${dir}.archive DESTINATION ${dir}.new PATTERNS ${patterns})
    file(RENAME ${dir}.new ${dir})
  endif()
  file(REMOVE ${dir}.archive)
  if(failure)
    message(FATAL_ERROR "${pin_NAME} ${pin_VERSION} could not be had from ${pin_URL}: ${failure}\n${pin_INSTEAD}")
  endif()
  set(${result} ${dir}/${pin_FOLDER} PARENT_SCOPE)
endfunction()
