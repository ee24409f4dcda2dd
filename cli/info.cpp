// tessera info: what this build is, what this machine has, which kernels can run on it.
#include <cstdio>

#include "cli/command.h"
#include "cli/machine.h"
#include "cli/simd_level.h"
#include "cli/table.h"
#include "core/threads.h"
#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

struct InfoFlags {
  bool json = false;
};

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "g++ " __VERSION__;
#else
  return "unknown";
#endif
}

// Two macros since DLPack 1.0, before, one number: a hundred times the version.
std::string dlpack_version() {
#if defined(DLPACK_MAJOR_VERSION)
  return std::to_string(DLPACK_MAJOR_VERSION) + "." + std::to_string(DLPACK_MINOR_VERSION);
#else
  return std::to_string(DLPACK_VERSION / 100) + "." + std::to_string(DLPACK_VERSION / 10 % 10);
#endif
}

nlohmann::json collect() {
  nlohmann::json list = nlohmann::json::array();
  for (const KernelInfo& kernel : kernels()) {
    list.push_back({{"name", kernel.name},
                    {"description", kernel.description},
                    {"available", kernel.available},
                    {"why_not", kernel.why_not}});
  }
  return {{"version", version()},
          {"abi_version", tessera_abi_version()},
          {"dlpack_version", dlpack_version()},
          {"compiler", compiler()},
          {"threads", resolve_threads(0)},
          {"devices",
           {{{"kind", "cpu"},
             {"model", cpu_model()},
             {"cores", usable_cores()},
             {"simd", name_of(simd_level())},
             {"memory_available", available_memory()}}}},
          {"kernels", list}};
}

void print_text(const nlohmann::json& info) {
  const auto text = [&](const char* key) { return info[key].get<std::string>(); };
  std::printf("tessera %s (C ABI %d, DLPack %s), built by %s\n\n", text("version").c_str(),
              info["abi_version"].get<int>(), text("dlpack_version").c_str(), text("compiler").c_str());
  const auto& cpu = info["devices"][0];
  std::printf("cpu: %s, %d cores, %s, %s of memory available; calls use %d threads\n\n",
              cpu["model"].get<std::string>().c_str(), cpu["cores"].get<int>(),
              cpu["simd"].get<std::string>().c_str(),
              bytes_text(cpu["memory_available"].get<double>()).c_str(), info["threads"].get<int>());
  std::printf("kernels, in the order in which they are asked:\n");
  for (const auto& kernel : info["kernels"]) {
    const bool available = kernel["available"].get<bool>();
    std::printf("  %s %-14s %s\n", available ? "+" : "-", kernel["name"].get<std::string>().c_str(),
                kernel["description"].get<std::string>().c_str());
    if (!available) std::printf("    %-14s not here: %s\n", "", kernel["why_not"].get<std::string>().c_str());
  }
}

int run_info(const InfoFlags& flags) {
  const nlohmann::json info = collect();
  if (flags.json) {
    std::printf("%s\n", info.dump(2).c_str());
  } else {
    print_text(info);
  }
  return 0;
}

}  // namespace

void add_info(CLI::App& app, Run& run) {
  const auto [command, flags] =
      add_command<InfoFlags>(app, run, "info", "This build, this machine, its kernels", run_info);
  add_json(*command, flags->json);
}

}  // namespace tessera::cli
