// NVRTC: text → cubin.
#include <algorithm>

#include "cuda/driver/driver.h"
#include "cuda/driver/keys.h"
#include "cuda/driver/nvrtc_api.h"
#include "cuda/driver/ptxas_log.h"

namespace tessera::cuda {
namespace {

class Program {
 public:
  explicit Program(const NvrtcApi& api) : api_(api) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (program_ != nullptr) api_.destroy_program(&program_);
  }

  int create(const std::string& text, const std::string& name) {
    std::vector<const char*> names;
    std::vector<const char*> texts;
    names.reserve(embedded_sources().size());
    texts.reserve(embedded_sources().size());
    for (const EmbeddedFile& file : embedded_sources()) {
      names.push_back(file.name);
      texts.push_back(file.text);
    }
    return api_.create_program(&program_, text.c_str(), name.c_str(), static_cast<int>(names.size()),
                               texts.data(), names.data());
  }
  int compile(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    pointers.reserve(options.size());
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return api_.compile_program(program_, static_cast<int>(pointers.size()), pointers.data());
  }
  [[nodiscard]] std::string log() const {
    std::size_t size = 0;
    if (api_.get_log_size(program_, &size) != 0 || size <= 1) return "";
    std::string text(size, '\0');
    if (api_.get_log(program_, text.data()) != 0) return "";
    while (!text.empty() && text.back() == '\0')
      text.pop_back();  // NVRTC counts the terminating one, at least
    return text;
  }
  int take_image(std::vector<std::byte>& image) {
    std::size_t size = 0;
    if (const int result = api_.get_cubin_size(program_, &size); result != 0) return result;
    image.resize(size);
    return api_.get_cubin(program_, reinterpret_cast<char*>(image.data()));
  }

 private:
  const NvrtcApi& api_;
  NvrtcProgram program_ = nullptr;
};

}  // namespace

std::string compiler_version() {
  const Result<const NvrtcApi*> api = nvrtc_api();
  return api.ok() ? api.value()->version_text : "";
}

Result<Cubin> compile(std::string_view name, std::string_view text, std::string_view arch) {
  const Result<const NvrtcApi*> opened = nvrtc_api();
  if (!opened.ok()) return opened.status();
  const NvrtcApi& api = *opened.value();
  const auto failed = [&](int result, const std::string& log) {
    return Status(Code::internal, "NVRTC " + api.version_text + " cannot compile " + std::string(name) +
                                      " for " + std::string(arch) + ": " + api.get_error_string(result) +
                                      (log.empty() ? "" : "\n" + log));
  };

  Program program(api);
  Cubin cubin;
  if (const int result = program.create(std::string(text), std::string(name) + ".cu"); result != 0)
    return failed(result, "");
  std::vector<std::string> options = compile_options(arch);
  // Of what it finds in its own cache, where there is a GPU, it tells neither registers nor spills. Ours
  // keeps them. Not in compile_options(): the pack's key is the same for every compiler.
  if (api.caches) options.emplace_back("--no-cache");
  const int result = program.compile(options);
  cubin.log = program.log();
  if (result != 0) return failed(result, cubin.log);
  if (const int taken = program.take_image(cubin.image); taken != 0) return failed(taken, cubin.log);
  if (cubin.image.empty()) return failed(0, cubin.log + "no cubin was made");
  cubin.resources = parse_resources(cubin.log);
  return cubin;
}

}  // namespace tessera::cuda
