#include "fake_cuda.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct FakeContext {
  int device;
  unsigned long long id;
  bool alive = true;
};
struct FakeModule {
  FakeContext* context;
};

std::mutex mutex;
fake::Control control{0, 0, 0, 1 << 20, 0, 0, 0, 0, 0, 0, 0, 0, nullptr, 0, 0, 0, {}};
FakeContext* primary[2];
unsigned long long next_id = 1;
std::vector<std::unique_ptr<FakeContext>> contexts;  // never destroyed: what is alive is a flag
FakeContext* create(int device) {
  contexts.push_back(std::make_unique<FakeContext>(FakeContext{device, next_id++}));
  return contexts.back().get();
}
thread_local std::vector<FakeContext*> stack;
thread_local int capture_mode = 0;

enum {
  success = 0,
  invalid_value = 1,
  not_initialized = 3,
  invalid_device = 101,
  invalid_image = 200,
  no_context = 201,
  destroyed = 709
};
bool initialized = false;

}  // namespace

extern "C" {

fake::Control* fake_control() { return &control; }
void* fake_create_context(int device) { return create(device); }
void fake_reset_primary(int device) {
  if (primary[device] != nullptr) primary[device]->alive = false;
  primary[device] = nullptr;
}

int cuInit(unsigned) {
  initialized = true;
  return success;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return success;
}
int cuGetErrorName(int error, const char** text) {
  static thread_local std::string name;
  name = "FAKE_ERROR_" + std::to_string(error);
  *text = name.c_str();
  return success;
}
int cuGetErrorString(int, const char** text) {
  *text = "as the fake was told";
  return success;
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return initialized ? success : not_initialized;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 100 + ordinal;  // a handle is not the ordinal
  return ordinal < 2 ? success : invalid_device;
}
int cuDeviceGetName(char* name, int size, int device) {
  std::strncpy(name, device == 100 ? "Fake 86" : "Fake 90", static_cast<std::size_t>(size));
  return success;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 75:
      *value = device == 100 ? 8 : 9;
      return success;
    case 76:
      *value = device == 100 ? 6 : 0;
      return success;
    case 16:
      *value = 132;
      return success;
    case 39:
      *value = 2048;
      return success;
    case 38:
      *value = 50 << 20;
      return success;
    case 81:
      *value = 228 << 10;
      return success;
    case 97:
      *value = 227 << 10;
      return success;
    default:
      return invalid_value;
  }
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::scoped_lock lock(mutex);
  FakeContext*& own = primary[device - 100];
  if (own == nullptr) own = create(device - 100);
  ++control.primary_retained;
  *context = own;
  return success;
}
int cuCtxGetCurrent(void** context) {
  *context = stack.empty() ? nullptr : stack.back();
  return success;
}
int cuCtxGetDevice(int* device) {
  if (stack.empty()) return no_context;
  *device = 100 + stack.back()->device;
  return success;
}
int cuCtxPushCurrent_v2(void* context) {
  if (!static_cast<FakeContext*>(context)->alive) return destroyed;
  stack.push_back(static_cast<FakeContext*>(context));
  control.depth = static_cast<int>(stack.size());
  return success;
}
int cuCtxPopCurrent_v2(void** context) {
  if (stack.empty()) return no_context;
  *context = stack.back();
  stack.pop_back();
  control.depth = static_cast<int>(stack.size());
  return success;
}
int cuCtxGetId(void* context, unsigned long long* id) {
  *id = static_cast<FakeContext*>(context)->id;
  return success;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return success;
}
int cuModuleLoadData(void** module, const void* image) {
  const std::scoped_lock lock(mutex);
  ++control.loads;
  if (capture_mode == 2) ++control.capture_relaxed_loads;
  if (control.refuse_loads > 0) {
    --control.refuse_loads;
    return control.load_error;
  }
  if (std::memcmp(image, "\177ELF", 4) != 0) return invalid_image;
  *module = new FakeModule{stack.back()};
  return success;
}
int cuModuleGetFunction(void** function, void* module, const char*) {
  *function = module;
  return success;
}
int cuModuleUnload(void* module) {
  ++control.unloads;
  delete static_cast<FakeModule*>(module);
  return success;
}
int cuFuncSetAttribute(void*, int, int value) {
  return value <= control.shared_limit ? success : invalid_value;
}
int cuLaunchKernel(void* function, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared_bytes, void* stream, void** params, void**) {
  if (control.launch_error != 0) return control.launch_error;
  if (static_cast<FakeModule*>(function)->context != stack.back()) return no_context;
  ++control.launches;
  control.blocks = x;
  control.threads = threads;
  control.shared_bytes = shared_bytes;
  control.stream = stream;
  std::memcpy(&control.param, params[0], sizeof(control.param));
  return success;
}
struct FakeAttribute {
  int id;
  int pad;
  int value[16];
};
struct FakeConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const FakeAttribute* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const FakeConfig* config, void* function, void** params, void** extra) {
  constexpr int stream_serialization = 6;
  if (config->count != 1 || config->attributes->id != stream_serialization ||
      config->attributes->value[0] != 1)
    return invalid_value;
  ++control.early;
  return cuLaunchKernel(function, config->grid[0], 1, 1, config->block[0], 1, 1, config->shared_bytes,
                        config->stream, params, extra);
}
int cuTensorMapEncodeTiled(void* map, int, unsigned rank, void* data, const unsigned long long* extents,
                           const unsigned long long* strides, const unsigned* box, const unsigned*, int,
                           int swizzle, int, int) {
  if (reinterpret_cast<unsigned long long>(map) % 64 != 0 ||
      reinterpret_cast<unsigned long long>(data) % 16 != 0)
    return invalid_value;
  for (unsigned i = 0; i < rank; ++i) {
    if (extents[i] == 0 || box[i] == 0 || box[i] > 256) return invalid_value;
    if (i > 0 && strides[i - 1] % 16 != 0) return invalid_value;
  }
  std::memset(map, 0, 128);
  if (control.maps < 4) {
    fake::Control::Map& made = control.map[control.maps];
    made.data = data;
    std::memcpy(made.extents, extents, sizeof(made.extents));
    std::memcpy(made.strides, strides, sizeof(made.strides));
    std::memcpy(made.box, box, sizeof(made.box));
    made.swizzle = swizzle;
  }
  ++control.maps;
  return success;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, std::size_t) {
  *blocks = 2048 / threads;
  return success;
}
int cuMemAlloc_v2(unsigned long long* data, std::size_t bytes) {
  if (bytes > (1ULL << 40)) return 2;
  *data = reinterpret_cast<unsigned long long>(new char[bytes]);
  return success;
}
int cuMemFree_v2(unsigned long long data) {
  delete[] reinterpret_cast<char*>(data);
  return success;
}
int cuMemsetD8Async(unsigned long long data, unsigned char value, std::size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(data), value, bytes);
  return success;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return success;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, std::size_t bytes, void*) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return success;
}
int cuStreamSynchronize(void*) { return success; }

}  // extern "C"
