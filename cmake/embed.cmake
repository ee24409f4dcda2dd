# Run at build time: writes the files of a list as a C++ source that defines tessera::cuda::embedded_sources()
# and their hash.
#
#   cmake -D LIST=files.txt -D OUT=embedded.cpp -P embed.cmake
#
# Each line of LIST is "name|path": the name by which kernels include the file. The first of two equal names
# stays.
cmake_minimum_required(VERSION 3.25)

file(STRINGS ${LIST} lines)
set(names "")
set(entries "")
set(digests "")
foreach(line IN LISTS lines)
  string(FIND "${line}" "|" bar)
  string(SUBSTRING "${line}" 0 ${bar} name)
  math(EXPR bar "${bar} + 1")
  string(SUBSTRING "${line}" ${bar} -1 path)
  if(name IN_LIST names)
    continue()
  endif()
  list(APPEND names ${name})
  file(READ ${path} text)
  string(FIND "${text}" ")tessera\"" clash)
  if(NOT clash EQUAL -1)
    message(FATAL_ERROR "${path} contains )tessera\", which ends the string it is embedded in")
  endif()
  file(SHA256 ${path} digest)
  string(APPEND digests "${name} ${digest}\n")
  string(APPEND entries "    {\"${name}\", R\"tessera(${text})tessera\"},\n")
endforeach()
string(SHA256 hash "${digests}")

file(WRITE ${OUT} "// Made by cmake/embed.cmake.
#include \"cuda/driver/sources.h\"

namespace tessera::cuda {

const std::vector<EmbeddedFile>& embedded_sources() {
  static const std::vector<EmbeddedFile> files = {
${entries}  };
  return files;
}

std::string_view embedded_hash() { return \"${hash}\"; }

}  // namespace tessera::cuda
")
