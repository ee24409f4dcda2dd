// Contexts, loading and launching, on a fake driver: what a GPU would be asked to do, and how often. Programs
// are compiled by the real NVRTC.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/driver/cache.h"
#include "cuda/driver/keys.h"
#include "cuda/driver/pack.h"
#include "fake_cuda.h"
#include "scratch.h"

namespace tessera::cuda {
namespace {

std::string self;  // this program

template <class Function>
Function* fake_function(const char* name) {
  void* library = ::dlopen(TESSERA_FAKE_CUDA, RTLD_NOW);
  return reinterpret_cast<Function*>(::dlsym(library, name));
}
fake::Control& fake_driver() { return *fake_function<fake::Control*()>("fake_control")(); }

const LoadedKernel* loaded(const Context& context, const std::string& name, int dynamic_shared = 0) {
  const Result<const LoadedKernel*> kernel =
      load(context, name, dynamic_shared, [&] { return program_text(name); });
  EXPECT_TRUE(kernel.ok()) << kernel.status().message();
  return kernel.ok() ? kernel.value() : nullptr;
}

DiskCache this_cache() { return {::getenv("TESSERA_CACHE_DIR"), DiskCache::default_bytes}; }

TEST(Devices, AreDescribed) {
  EXPECT_EQ(unavailable(), "");
  ASSERT_EQ(device_count(), 2);
  const DeviceFacts& facts = *device_facts(1).value();
  EXPECT_EQ(facts.id, 1);
  EXPECT_EQ(facts.name, "Fake 90");
  EXPECT_EQ(facts.arch, 90);
  EXPECT_EQ(facts.multiprocessors, 132);
  EXPECT_EQ(facts.shared_per_block, 227 << 10);
  EXPECT_EQ(facts.shared_per_multiprocessor, 228 << 10);
  EXPECT_EQ(facts.l2_bytes, 50 << 20);
  EXPECT_EQ(driver_version(), "13.0");
  for (const int id : {-1, 2}) {
    EXPECT_EQ(device_facts(id).status().code(), Code::invalid_argument);
    EXPECT_NE(Context::enter(id).status().message().find("cuda:" + std::to_string(id)), std::string::npos);
  }
}

TEST(Devices, ArchNames) {
  EXPECT_EQ(arch_name(80), "sm_80");
  EXPECT_EQ(arch_name(90), "sm_90a");
  EXPECT_EQ(arch_name(120), "sm_120");
}

TEST(Contexts, ThePrimaryOneIsEnteredAndLeft) {
  fake_driver().depth = 0;
  {
    const Result<Context> context = Context::enter(0);
    ASSERT_TRUE(context.ok());
    EXPECT_EQ(fake_driver().depth, 1);
    EXPECT_EQ(context.value().facts().arch, 86);
    const Result<Context> nested = Context::enter(0);
    EXPECT_EQ(nested.value().id(), context.value().id());
    EXPECT_EQ(fake_driver().depth, 1) << "it is current already";
    const Result<Context> other = Context::enter(1);
    EXPECT_NE(other.value().id(), context.value().id());
    EXPECT_EQ(fake_driver().depth, 2);
  }
  EXPECT_EQ(fake_driver().depth, 0);
}

TEST(Contexts, TheThreadsOwnIsUsedIfItIsOfTheDevice) {
  void* own = fake_function<void*(int)>("fake_create_context")(0);
  fake_function<int(void*)>("cuCtxPushCurrent_v2")(own);
  unsigned long long id = 0;
  fake_function<int(void*, unsigned long long*)>("cuCtxGetId")(own, &id);
  EXPECT_EQ(Context::enter(0).value().id(), id);
  EXPECT_NE(Context::enter(1).value().id(), id);
  fake_function<int(void**)>("cuCtxPopCurrent_v2")(&own);
  EXPECT_NE(Context::enter(0).value().id(), id);
}

TEST(Contexts, AResetDeviceIsEnteredAgain) {
  const std::uint64_t before = Context::enter(1).value().id();
  fake_function<void(int)>("fake_reset_primary")(1);
  const Result<Context> context = Context::enter(1);
  ASSERT_TRUE(context.ok()) << context.status().message();
  EXPECT_NE(context.value().id(), before);
}

TEST(Load, CompilesOncePerContextAndFindsItInMemory) {
  TESSERA_NEED_NVRTC();
  const Result<Context> context = Context::enter(0);
  const int loads = fake_driver().loads;
  const LoadedKernel* first = loaded(context.value(), "once");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->origin, Origin::compiled);
  EXPECT_EQ(first->name, "once");
  EXPECT_GT(first->resources.registers, 0);
  EXPECT_GT(first->seconds, 0);
  const Result<const LoadedKernel*> again = load(context.value(), "once", 0, []() -> std::string {
    throw std::runtime_error("its text is not needed");
  });
  EXPECT_EQ(again.value(), first);
  EXPECT_EQ(fake_driver().loads, loads + 1);

  // Another context of the same device: a module of its own, from the disk.
  void* other = fake_function<void*(int)>("fake_create_context")(0);
  fake_function<int(void*)>("cuCtxPushCurrent_v2")(other);
  const LoadedKernel* second = loaded(Context::enter(0).value(), "once");
  ASSERT_NE(second, nullptr);
  EXPECT_NE(second, first);
  EXPECT_NE(second->function, first->function);
  EXPECT_EQ(second->origin, Origin::cache);
  EXPECT_EQ(second->resources.registers, first->resources.registers);
  EXPECT_EQ(fake_driver().loads, loads + 2);
  fake_function<int(void**)>("cuCtxPopCurrent_v2")(&other);
}

TEST(Load, LooksUpInTime) {
  TESSERA_NEED_NVRTC();
  const Result<Context> context = Context::enter(0);
  const std::string name =
      "a_name_as_long_as_those_that_say_the_whole_configuration_of_a_kernel_d128_bf16_causal";
  ASSERT_NE(loaded(context.value(), name, 1000), nullptr);
  constexpr int calls = 10'000;
  const std::function<std::string()> text = [] { return std::string(); };
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) ASSERT_TRUE(load(context.value(), name, 1000, text).ok());
    best = std::min(best,
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls);
  }
  RecordProperty("microseconds", std::to_string(1e6 * best));
  EXPECT_LT(best, 2e-6);
}

TEST(Load, OneThreadCompilesTheOthersWait) {
  TESSERA_NEED_NVRTC();
  std::atomic<int> texts{0};
  std::vector<const LoadedKernel*> kernels(8);
  const int loads = fake_driver().loads;
  {
    std::vector<std::jthread> threads;
    for (const LoadedKernel*& kernel : kernels) {
      threads.emplace_back([&] {
        const Result<Context> context = Context::enter(1);
        kernel = load(context.value(), "shared_by_threads", 0, [&] {
                   ++texts;
                   std::this_thread::sleep_for(std::chrono::milliseconds(50));
                   return program_text("shared_by_threads");
                 }).value();
      });
    }
  }
  EXPECT_EQ(texts, 1);
  EXPECT_EQ(fake_driver().loads, loads + 1);
  for (const LoadedKernel* kernel : kernels) EXPECT_EQ(kernel, kernels[0]);
}

TEST(Load, AnErrorReachesAllWhoWaitAndIsTriedAgainLater) {
  TESSERA_NEED_NVRTC();
  std::atomic<int> texts{0};
  std::atomic<int> errors{0};
  const auto broken = [&] {
    ++texts;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return std::string("this is not a program");
  };
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        const Result<Context> context = Context::enter(0);
        if (!load(context.value(), "broken_at_first", 0, broken).ok()) ++errors;
      });
    }
  }
  EXPECT_EQ(errors, 4);
  EXPECT_EQ(texts, 1);
  EXPECT_NE(loaded(Context::enter(0).value(), "broken_at_first"), nullptr);
}

TEST(Load, ACachedCubinThatTheDriverRefusesIsCompiledAgain) {
  TESSERA_NEED_NVRTC();
  const std::string name = "refused_at_first";
  const Digest key = cache_key(pack_key(program_text(name), "sm_90a"), compiler_version());
  Cubin junk;
  junk.image.resize(100, std::byte{1});  // well stored, and no cubin
  this_cache().write(key, junk);
  const int loads = fake_driver().loads;
  const LoadedKernel* kernel = loaded(Context::enter(1).value(), name);
  ASSERT_NE(kernel, nullptr);
  EXPECT_EQ(kernel->origin, Origin::compiled);
  EXPECT_GE(fake_driver().loads, loads + 2);
  EXPECT_NE(this_cache().read(key)->image, junk.image) << "the next process finds a good one";
}

TEST(Load, WhatTheDriverRefusesEvenFreshlyCompiledIsAnErrorThatSaysSo) {
  TESSERA_NEED_NVRTC();
  fake_driver().refuse_loads = 1000;
  fake_driver().load_error = 200;
  const Result<const LoadedKernel*> kernel =
      load(Context::enter(0).value(), "always_refused", 0, [] { return program_text("always_refused"); });
  fake_driver().refuse_loads = 0;
  ASSERT_FALSE(kernel.ok());
  for (const char* part : {"always_refused", "sm_86", "FAKE_ERROR_200", "TESSERA_NVRTC"})
    EXPECT_NE(kernel.status().message().find(part), std::string::npos) << kernel.status().message();
}

TEST(Load, AnErrorThatIsNotAboutTheImageIsGivenAtOnce) {
  TESSERA_NEED_NVRTC();
  ASSERT_NE(loaded(Context::enter(0).value(), "no_memory"), nullptr);  // now it is in the cache
  void* other = fake_function<void*(int)>("fake_create_context")(0);
  fake_function<int(void*)>("cuCtxPushCurrent_v2")(other);
  const Result<Context> context = Context::enter(0);
  fake_driver().refuse_loads = 1;
  fake_driver().load_error = 2;
  const int loads = fake_driver().loads;
  const Result<const LoadedKernel*> kernel =
      load(context.value(), "no_memory", 0, [] { return program_text("no_memory"); });
  EXPECT_FALSE(kernel.ok());
  EXPECT_EQ(fake_driver().loads, loads + 1);
  EXPECT_EQ(kernel.status().message(), "loading no_memory for sm_86: FAKE_ERROR_2 (2): as the fake was told");
  fake_driver().refuse_loads = 0;
  EXPECT_NE(loaded(context.value(), "no_memory"), nullptr) << "later there is memory again";
  fake_function<int(void**)>("cuCtxPopCurrent_v2")(&other);
}

TEST(Load, DuringCaptureIsRelaxedAndRestored) {
  TESSERA_NEED_NVRTC();
  const int relaxed = fake_driver().capture_relaxed_loads;
  const auto exchange = fake_function<int(int*)>("cuThreadExchangeStreamCaptureMode");
  int mode = 1;
  exchange(&mode);
  ASSERT_NE(loaded(Context::enter(0).value(), "while_capturing"), nullptr);
  EXPECT_EQ(fake_driver().capture_relaxed_loads, relaxed + 1);
  exchange(&mode);
  EXPECT_EQ(mode, 1);
}

TEST(Load, DynamicSharedMemoryGrowsOnRequest) {
  TESSERA_NEED_NVRTC();
  const Result<Context> context = Context::enter(0);
  fake_driver().shared_limit = 100'000;
  const LoadedKernel* kernel = loaded(context.value(), "with_shared", 50'000);
  EXPECT_EQ(loaded(context.value(), "with_shared", 100'000), kernel);
  const Result<const LoadedKernel*> more =
      load(context.value(), "with_shared", 100'001, [] { return std::string(); });
  ASSERT_FALSE(more.ok());
  EXPECT_NE(more.status().message().find("100001"), std::string::npos) << more.status().message();
  EXPECT_EQ(loaded(context.value(), "with_shared", 100'000), kernel);
}

TEST(Launch, PassesEverythingOnAndChecksTheResult) {
  TESSERA_NEED_NVRTC();
  const Result<Context> context = Context::enter(0);
  const LoadedKernel* kernel = loaded(context.value(), "launched", 4096);
  ASSERT_NE(kernel, nullptr);
  const unsigned long long param = 0x1234567890abcdefULL;
  int stream = 0;
  ASSERT_TRUE(launch(*kernel, 70'000, 128, 4096, &stream, &param).ok());
  EXPECT_EQ(fake_driver().blocks, 70'000U);
  EXPECT_EQ(fake_driver().threads, 128U);
  EXPECT_EQ(fake_driver().shared_bytes, 4096U);
  EXPECT_EQ(fake_driver().stream, &stream);
  EXPECT_EQ(fake_driver().param, param);
  EXPECT_EQ(occupancy(*kernel, 128, 4096).value(), 16);

  fake_driver().launch_error = 701;
  const Status status = launch(*kernel, 1, 128, 4096, nullptr, &param);
  fake_driver().launch_error = 0;
  ASSERT_FALSE(status.ok());
  for (const char* part : {"launched", "128 threads", "4096 bytes", "FAKE_ERROR_701"})
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

TEST(Memory, RoundTrip) {
  const Result<void*> data = allocate(100);
  ASSERT_TRUE(data.ok());
  std::array<std::uint8_t, 100> bytes{};
  EXPECT_TRUE(fill(data.value(), 7, 100, nullptr).ok());
  EXPECT_TRUE(copy_to_host(bytes.data(), data.value(), 100, nullptr).ok());
  EXPECT_EQ(bytes[99], 7);
  bytes[0] = 9;
  EXPECT_TRUE(copy_to_device(data.value(), bytes.data(), 100, nullptr).ok());
  EXPECT_TRUE(copy_to_host(bytes.data(), data.value(), 100, nullptr).ok());
  EXPECT_EQ(bytes[0], 9);
  EXPECT_TRUE(synchronize(nullptr).ok());
  EXPECT_TRUE(free(data.value()).ok());
  EXPECT_NE(allocate(1ULL << 41).status().message().find("for 2199023255552 bytes"), std::string::npos);
}

TEST(Fork, InTheChildTheErrorSaysWhy) {
  ASSERT_TRUE(Context::enter(0).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    const Result<Context> context = Context::enter(0);
    const bool clear = !context.ok() && context.status().message().find("fork()") != std::string::npos;
    ::_exit(clear ? 0 : 1);
  }
  EXPECT_EQ(exit_status(child), 0);
}

// ---- Processes of their own: what is read from the environment is read once. A child exits with its origin.

constexpr int failed_child = 99;

int load_in_child(const std::string& name) {
  const Result<Context> context = Context::enter(0);
  if (!context.ok()) return failed_child;
  const Result<const LoadedKernel*> kernel =
      load(context.value(), name, 0, [&] { return program_text(name); });
  if (!kernel.ok()) {
    std::fprintf(stderr, "%s\n", kernel.status().message().c_str());
    return failed_child;
  }
  return static_cast<int>(kernel.value()->origin);
}

Origin origin_in_child(const std::map<std::string, std::string>& variables) {
  return static_cast<Origin>(exit_status(start(self, {"--load", "child_kernel"}, variables)));
}

TEST(Processes, OneCompilesTheOthersTakeItFromTheCache) {
  TESSERA_NEED_NVRTC();
  const Scratch scratch;
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i)
    children.push_back(
        start(self, {"--load", "child_kernel"}, {{"TESSERA_CACHE_DIR", scratch.path().string()}}));
  std::map<int, int> origins;
  for (const pid_t child : children) ++origins[exit_status(child)];
  EXPECT_EQ(origins, (std::map<int, int>{{static_cast<int>(Origin::compiled), 1},
                                         {static_cast<int>(Origin::cache), 5}}));
}

TEST(Processes, ADamagedEntryIsCompiledAgain) {
  TESSERA_NEED_NVRTC();
  const Scratch scratch;
  const std::map<std::string, std::string> here = {{"TESSERA_CACHE_DIR", scratch.path().string()}};
  EXPECT_EQ(origin_in_child(here), Origin::compiled);
  EXPECT_EQ(origin_in_child(here), Origin::cache);
  const DiskCache cache(scratch.path(), DiskCache::default_bytes);
  const auto path =
      cache.path_of(cache_key(pack_key(program_text("child_kernel"), "sm_86"), compiler_version()));
  ASSERT_TRUE(std::filesystem::exists(path));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  EXPECT_EQ(origin_in_child(here), Origin::compiled);
  EXPECT_EQ(origin_in_child(here), Origin::cache);
}

TEST(Processes, WithoutAHomeOrAPlaceToWriteItStillWorks) {
  TESSERA_NEED_NVRTC();
  const Scratch scratch;
  write_text(scratch / "file", "");
  EXPECT_EQ(origin_in_child({{"TESSERA_CACHE_DIR", (scratch / "file/below").string()}}), Origin::compiled);
  EXPECT_EQ(origin_in_child({{"TESSERA_CACHE_DIR", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", ""}}),
            Origin::compiled);
}

TEST(Processes, ThePackComesFirstAndNeedsNoCompiler) {
  TESSERA_NEED_NVRTC();
  const Scratch scratch;
  const std::string text = program_text("child_kernel");
  const Result<Cubin> cubin = compile("child_kernel", text, "sm_86");
  ASSERT_TRUE(cubin.ok());
  ASSERT_TRUE(write_pack(scratch / "p", {{pack_key(text, "sm_86"), cubin.value()}}, "13.0").ok());
  std::map<std::string, std::string> variables = {{"TESSERA_PACK", (scratch / "p").string()},
                                                  {"TESSERA_CACHE_DIR", (scratch / "cache").string()},
                                                  {"TESSERA_NVRTC", "/nowhere"}};
  EXPECT_EQ(origin_in_child(variables), Origin::pack);

  // A cubin of the same major version does where nothing else is to be had.
  ASSERT_TRUE(write_pack(scratch / "p", {{pack_key(text, "sm_80"), cubin.value()}}, "13.0").ok());
  EXPECT_EQ(origin_in_child(variables), Origin::pack);
  ASSERT_TRUE(write_pack(scratch / "p", {{pack_key(text, "sm_89"), cubin.value()}}, "13.0").ok());
  EXPECT_EQ(origin_in_child(variables), static_cast<Origin>(failed_child));

  variables.erase("TESSERA_NVRTC");
  write_text(scratch / "p", "damaged");
  EXPECT_EQ(origin_in_child(variables), Origin::compiled);
  Cubin junk;
  junk.image.resize(100);
  ASSERT_TRUE(write_pack(scratch / "p", {{pack_key(text, "sm_86"), junk}}, "13.0").ok());
  EXPECT_EQ(origin_in_child(variables), Origin::cache) << "the driver refuses what the pack has";
}

}  // namespace

int run_tests(int argc, char** argv) {
  self = std::filesystem::read_symlink("/proc/self/exe").string();
  ::setenv("TESSERA_CUDA_DRIVER", TESSERA_FAKE_CUDA, 1);
  if (argc == 3 && std::strcmp(argv[1], "--load") == 0) return load_in_child(argv[2]);
  const Scratch cache;
  ::setenv("TESSERA_CACHE_DIR", cache.path().c_str(), 1);
  ::setenv("TESSERA_PACK", (cache / "no.pack").c_str(), 1);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace tessera::cuda

int main(int argc, char** argv) { return tessera::cuda::run_tests(argc, argv); }
