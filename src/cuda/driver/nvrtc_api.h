// The part of NVRTC's ABI that is used, declared here so that no CUDA header is needed.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/driver/library.h"

namespace tessera::cuda {

using NvrtcProgram = void*;

struct NvrtcApi {
  int (*version)(int* major, int* minor);
  const char* (*get_error_string)(int result);
  int (*create_program)(NvrtcProgram* program, const char* text, const char* name, int num_headers,
                        const char* const* headers, const char* const* include_names);
  int (*destroy_program)(NvrtcProgram* program);
  int (*compile_program)(NvrtcProgram program, int num_options, const char* const* options);
  int (*get_log_size)(NvrtcProgram program, std::size_t* size);
  int (*get_log)(NvrtcProgram program, char* log);
  int (*get_cubin_size)(NvrtcProgram program, std::size_t* size);
  int (*get_cubin)(NvrtcProgram program, char* cubin);

  std::string version_text;  // "13.0"
  bool caches = false;       // by itself, unless it is told not to
  std::string file;          // that it was opened from
};

// The compiler, opened once it is asked for; an error: why there is none. Not finding it is not remembered.
[[nodiscard]] Result<const NvrtcApi*> nvrtc_api();

}  // namespace tessera::cuda
