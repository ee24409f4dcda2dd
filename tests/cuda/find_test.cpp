// Where libnvrtc is looked for, and what is said when nothing is there.
#include "cuda/driver/find.h"

#include <algorithm>

#include "scratch.h"

namespace tessera::cuda {
namespace {

using Paths = std::vector<std::filesystem::path>;

std::ptrdiff_t position(const Paths& paths, const std::filesystem::path& path) {
  return std::find(paths.begin(), paths.end(), path) - paths.begin();
}

bool has(const Paths& paths, const std::filesystem::path& path) {
  return position(paths, path) < static_cast<std::ptrdiff_t>(paths.size());
}

TEST(FindNvrtc, InAFolderTakesTheCompilerOnlyAndTheNewestFirst) {
  const Scratch scratch;
  for (const char* name :
       {"libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13",
        "libnvrtc_static.a", "libcudart.so.13", "libnvrtc-672ee683.so.11.2"})
    write_text(scratch / name, "");
  EXPECT_EQ(nvrtc_in(scratch.path()), (Paths{scratch / "libnvrtc.so.13", scratch / "libnvrtc.so.12",
                                             scratch / "libnvrtc-672ee683.so.11.2"}));
  EXPECT_EQ(nvrtc_in(scratch / "absent"), Paths{});
}

TEST(FindNvrtc, TheVariableIsTheOnlyCandidate) {
  const Scratch scratch;
  write_text(scratch / "lib/libnvrtc.so.13", "");
  const std::filesystem::path loaded = "/opt/x/libnvrtc.so.12";
  const auto candidates = [&](const std::string& value) {
    return nvrtc_candidates({made_up_environment({{"TESSERA_NVRTC", value}}), {loaded}});
  };
  EXPECT_EQ(candidates("/a/libnvrtc.so.12"), Paths{"/a/libnvrtc.so.12"});
  EXPECT_EQ(candidates((scratch / "lib").string()), Paths{scratch / "lib/libnvrtc.so.13"});
  EXPECT_EQ(candidates(scratch.path().string()), Paths{});  // a folder without one: no fallback
}

TEST(FindNvrtc, OrderIsLoadedThenLoaderThenToolkitThenWheels) {
  const Scratch scratch;
  const Paths files = {scratch / "cuda/lib64/libnvrtc.so.12",
                       scratch / "site/nvidia/cu13/lib/libnvrtc.so.13",
                       scratch / "site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                       scratch / "path/nvidia/cu13/lib/libnvrtc.so.13",
                       scratch / "venv/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                       scratch / "conda/lib/libnvrtc.so.12"};
  for (const auto& file : files) write_text(file, "");
  const std::filesystem::path loaded = "/opt/y/libnvrtc.so.12";
  const Paths found =
      nvrtc_candidates({made_up_environment({{"CUDA_HOME", (scratch / "cuda").string()},
                                             {"PYTHONPATH", ":" + (scratch / "path").string() + ":/none"},
                                             {"VIRTUAL_ENV", (scratch / "venv").string()},
                                             {"CONDA_PREFIX", (scratch / "conda").string()}}),
                        {"/usr/bin/python3", scratch / "site/torch/lib/libtorch_cuda.so", loaded}});
  EXPECT_EQ(position(found, loaded), 0);
  EXPECT_EQ(position(found, "libnvrtc.so.13"), 1);
  EXPECT_EQ(position(found, "libnvrtc.so.12"), 2);
  std::ptrdiff_t before = 2;
  for (const auto& file : files) {
    EXPECT_GT(position(found, file), before) << file;
    EXPECT_TRUE(has(found, file)) << file;
    before = position(found, file);
  }
}

TEST(FindNvrtc, BesideALoadedCudart) {
  const Scratch scratch;
  const auto file = scratch / "site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
  write_text(file, "");
  const auto candidates = [&](const std::string& loaded) {
    return nvrtc_candidates({made_up_environment({}), {scratch / loaded}});
  };
  EXPECT_TRUE(has(candidates("site/nvidia/cuda_runtime/lib/libcudart.so.12"), file));
  EXPECT_FALSE(has(candidates("site/nvidia/cuda_runtime/lib/libother.so.12"), file));
}

TEST(LoadedFiles, AreTheLastColumnOfMaps) {
  EXPECT_EQ(loaded_files("7f0000000000-7f0000001000 r--p 00000000 08:01 42   /usr/lib/lib a.so\n"
                         "7f0000001000-7f0000002000 r-xp 00001000 08:01 42   /usr/lib/lib a.so\n"
                         "7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n"
                         "7f0000003000-7f0000004000 rw-p 00000000 00:00 0    [stack]\n"
                         "7f0000004000-7f0000005000 r--p 00000000 08:01 43   /usr/lib/b.so\n"),
            (Paths{"/usr/lib/lib a.so", "/usr/lib/b.so"}));
  EXPECT_FALSE(loaded_files().empty());
}

// A process of its own: what was found is kept.
using FindDeathTest = testing::Test;

TEST(FindDeathTest, ABadVariableIsAnErrorThatNamesIt) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        ::setenv("TESSERA_NVRTC", "/nowhere/libnvrtc.so.13", 1);
        const Result<Cubin> cubin = compile("k", program_text("k"), "sm_80");
        std::fprintf(stderr, "%s", cubin.status().message().c_str());
        ::_exit(cubin.ok() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "TESSERA_NVRTC: \"/nowhere/libnvrtc.so.13\", expected");
}

TEST(FindDeathTest, WithoutADriverUnavailableSaysWhy) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        ::setenv("TESSERA_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
        std::fprintf(stderr, "%s|%s", unavailable().c_str(), Context::enter(0).status().message().c_str());
        ::_exit(unavailable().empty() || device_count() != 0 || Context::enter(0).ok() ||
                !driver_version().empty());
      },
      testing::ExitedWithCode(0), "nowhere/libcuda.so.1.*\\|no GPU can be used: .*nowhere/libcuda.so.1");
}

TEST(FindDeathTest, ALibraryThatIsNoDriverIsNamed) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        ::setenv("TESSERA_CUDA_DRIVER", "libm.so.6", 1);
        std::fprintf(stderr, "%s", unavailable().c_str());
        ::_exit(0);
      },
      testing::ExitedWithCode(0), "libm.so.6: has no cuInit");
}

}  // namespace
}  // namespace tessera::cuda
