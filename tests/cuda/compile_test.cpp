// NVRTC: programs to cubins, with nothing but what the library embeds.
#include <array>
#include <cstring>
#include <set>

#include "cuda/driver/keys.h"
#include "cuda/driver/ptxas_log.h"
#include "cuda/driver/sources.h"
#include "cuda/plan/plan.h"
#include "scratch.h"

namespace tessera::cuda {
namespace {

constexpr const char* ptxas_output = R"(ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     48 bytes stack frame, 24 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 48 bytes cumulative stack size, 1024 bytes smem, 380 bytes cmem[0]
ptxas info    : Compile time = 3.858 ms
)";

TEST(PtxasLog, ReadsResources) {
  const Resources resources = parse_resources(ptxas_output);
  EXPECT_EQ(resources.registers, 168);
  EXPECT_EQ(resources.stack_bytes, 48);
  EXPECT_EQ(resources.spill_bytes, 60);
  EXPECT_EQ(resources.shared_bytes, 1024);
}

TEST(PtxasLog, AddsUpFunctionsThatAreNotInlined) {
  const Resources resources =
      parse_resources(std::string(ptxas_output) +
                      "ptxas info    : Function properties for helper\n"
                      "    96 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n");
  EXPECT_EQ(resources.registers, 168);
  EXPECT_EQ(resources.stack_bytes, 96);
  EXPECT_EQ(resources.spill_bytes, 64);
}

TEST(PtxasLog, AnyTextIsReadWithoutHarm) {
  for (const char* text : {"", "\n", " registers", "Used registers", "bytes smem\n bytes spill stores",
                           "99999999999999999999 registers"})
    EXPECT_EQ(parse_resources(text).registers, 0) << text;
}

TEST(PtxasLog, FindsWarningsAndJudgesThem) {
  const Resources fine{.registers = 255};
  const auto judged = [&](const std::string& line) {
    const std::vector<std::string> warnings = ptxas_warnings(ptxas_output + line + "\nnext line\n");
    EXPECT_EQ(warnings, std::vector<std::string>{line});
    return is_refused(fine, warnings);
  };
  EXPECT_TRUE(
      judged("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
             "serialized due to insufficient register resources for the wgmma pipeline in function 'k'"));
  EXPECT_TRUE(judged("ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain"));
  for (const char* number : {"C7511", "C7514", "C7515"})
    EXPECT_TRUE(judged(std::string("ptxas info    : (") + number + ") Potential Performance Loss"));
  EXPECT_FALSE(judged("ptxas warning : Value of threads per SM for entry k is out of range"));
  EXPECT_FALSE(is_refused(fine, {}));
  EXPECT_TRUE(is_refused({.spill_bytes = 4}, {}));
}

TEST(Keys, DependOnTextAndSourcesAndArchAndCompiler) {
  std::set<Digest> keys = {pack_key("a", "sm_80"),
                           pack_key("a", "sm_80", "other sources"),
                           pack_key("b", "sm_80"),
                           pack_key("a", "sm_86"),
                           cache_key(pack_key("a", "sm_80"), "13.0"),
                           cache_key(pack_key("a", "sm_80"), "12.9"),
                           cache_key(pack_key("b", "sm_80"), "13.0")};
  EXPECT_EQ(keys.size(), 7U);
  EXPECT_EQ(pack_key("a", "sm_80"), pack_key("a", "sm_80"));
  EXPECT_EQ(embedded_hash().size(), 64U);
}

TEST(Sha256, KnownAnswers) {
  const auto hex = [](const std::string& text) {
    return to_hex(Sha256().add(text.data(), text.size()).finish());
  };
  EXPECT_EQ(hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // In pieces of every size around a block.
  const std::string text(300, 'x');
  for (std::size_t piece = 1; piece <= 130; ++piece) {
    Sha256 hash;
    for (std::size_t at = 0; at < text.size(); at += piece)
      hash.add(text.data() + at, std::min(piece, text.size() - at));
    ASSERT_EQ(to_hex(hash.finish()), hex(text)) << piece;
  }
}

TEST(Embedded, HasKernelsCoreStandInsAndCutlassOnce) {
  std::set<std::string> names;
  for (const EmbeddedFile& file : embedded_sources()) {
    EXPECT_TRUE(names.insert(file.name).second) << file.name;
    EXPECT_NE(std::string(file.text), "") << file.name;
  }
  for (const char* name : {"core/mask.h", "core/philox.h", "core/host_device.h", "cuda/std/cstdint",
                           "cute/numeric/complex.hpp", "cute/arch/mma_sm80.hpp", "cutlass/arch/barrier.h"})
    EXPECT_TRUE(names.count(name)) << name;
  EXPECT_FALSE(names.count("standin/cuda/std/cstdint"));
}

TEST(Compile, GivesACubinAndItsResources) {
  TESSERA_NEED_NVRTC();
  const std::string text =
      "extern \"C\" __global__ void k(float* p) {\n"
      "  __shared__ float s[64];\n"
      "  s[threadIdx.x] = p[threadIdx.x];\n  __syncthreads();\n  p[threadIdx.x] = s[63 - threadIdx.x];\n}\n";
  const Result<Cubin> cubin = compile("k", text, "sm_80");
  ASSERT_TRUE(cubin.ok()) << cubin.status().message();
  const std::string image(reinterpret_cast<const char*>(cubin.value().image.data()),
                          cubin.value().image.size());
  EXPECT_EQ(image.substr(0, 4), "\177ELF");
  EXPECT_GT(cubin.value().resources.registers, 3);
  EXPECT_EQ(cubin.value().resources.shared_bytes, 256);
  EXPECT_EQ(cubin.value().resources.spill_bytes, 0);
  EXPECT_NE(cubin.value().log.find("'k'"), std::string::npos) << cubin.value().log;
  EXPECT_EQ(cubin.value().log.find('\0'), std::string::npos);
}

// Where there is a GPU, NVRTC from 12.9 on would find the second in a cache of its own, which keeps no log.
TEST(Compile, HasTheResourcesAgain) {
  TESSERA_NEED_NVRTC();
  const std::string text = "extern \"C\" __global__ void again(float* p) { p[threadIdx.x] *= 3.0f; }\n";
  const Result<Cubin> first = compile("again", text, "sm_80"), second = compile("again", text, "sm_80");
  ASSERT_TRUE(first.ok()) << first.status().message();
  ASSERT_TRUE(second.ok()) << second.status().message();
  EXPECT_GT(first.value().resources.registers, 0);
  EXPECT_EQ(second.value().resources.registers, first.value().resources.registers);
  EXPECT_EQ(second.value().image, first.value().image);
}

TEST(Compile, SpillsAreSeen) {
  TESSERA_NEED_NVRTC();
  const std::string text =
      "extern \"C\" __global__ void __maxnreg__(24) k(float* p) {\n"
      "  float a[64];\n"
      "#pragma unroll\n"
      "  for (int i = 0; i < 64; ++i) a[i] = p[i * 1024 + threadIdx.x];\n"
      "  __syncthreads();\n"
      "#pragma unroll\n"
      "  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = a[63 - i] * a[i ^ 21];\n}\n";
  const Result<Cubin> cubin = compile("k", text, "sm_80");
  ASSERT_TRUE(cubin.ok()) << cubin.status().message();
  EXPECT_GT(cubin.value().resources.spill_bytes, 0) << cubin.value().log;
  EXPECT_TRUE(is_refused(cubin.value().resources, {}));
}

TEST(Compile, ErrorsCarryTheLog) {
  TESSERA_NEED_NVRTC();
  const Result<Cubin> cubin = compile("broken", "__global__ void broken() { undeclared_thing(); }", "sm_80");
  ASSERT_FALSE(cubin.ok());
  EXPECT_EQ(cubin.status().code(), Code::internal);
  for (const char* part : {"broken", "sm_80", "undeclared_thing", "error"})
    EXPECT_NE(cubin.status().message().find(part), std::string::npos) << cubin.status().message();
}

TEST(Compile, AnUnknownArchIsAnError) {
  TESSERA_NEED_NVRTC();
  const Result<Cubin> cubin = compile("k", program_text("k"), "sm_1");
  ASSERT_FALSE(cubin.ok());
  EXPECT_NE(cubin.status().message().find("sm_1"), std::string::npos) << cubin.status().message();
}

// Every header that a program may include compiles by itself, from the embedded files alone.
class EmbeddedClosure : public testing::TestWithParam<const char*> {};

TEST_P(EmbeddedClosure, Compiles) {
  TESSERA_NEED_NVRTC();
  std::string libraries;  // CUTLASS, the stand-ins and core: all in one program
  std::vector<std::string> programs;
  for (const EmbeddedFile& file : embedded_sources()) {
    const std::string name = file.name;
    const std::string line = "#include \"" + name + "\"\n";
    if (!name.ends_with(".cuh")) {
      libraries += line;
    } else if (!name.starts_with("sm90/") || std::string(GetParam()) == "sm_90a") {
      programs.push_back(line);
    }
  }
  programs.push_back(libraries);
  for (const std::string& includes : programs) {
    const Result<Cubin> cubin = compile("k", includes + program_text("k"), GetParam());
    EXPECT_TRUE(cubin.ok()) << includes << cubin.status().message();
  }
}

INSTANTIATE_TEST_SUITE_P(Archs, EmbeddedClosure, testing::Values("sm_80", "sm_90a"),
                         [](const auto& test) { return std::string(test.param); });

// ptxas 13.0 encodes register 0 where a copy to shared memory has a hint and an address of [R + UR]
// (kernels/sm80/NOTES.md).
int copies_by_no_register(const std::vector<std::byte>& image) {
  constexpr std::uint64_t opcode = 0xdae, opcode_bits = 0xfff, register_bits = 0x3f;
  int count = 0;
  for (std::size_t at = 0; at + 16 <= image.size(); at += 16) {
    std::uint64_t words[2];
    std::memcpy(words, &image[at], sizeof(words));
    if ((words[0] & opcode_bits) == opcode && (words[1] & register_bits) == 0) ++count;
  }
  return count;
}

TEST(Compile, CopiesWithAHintHaveTheirRegister) {
  TESSERA_NEED_NVRTC();
  constexpr DeviceLimits hopper{90, 227 << 10, 132};
  const auto bad = [](const DecodeConfig& config) {
    const Result<Cubin> cubin = compile(kernel_name(config), program_text(config), "sm_90a");
    EXPECT_TRUE(cubin.ok()) << cubin.status().message();
    return cubin.ok() ? copies_by_no_register(cubin.value().image) : -1;
  };
  for (const auto& [head_dim, head_dim_v, rows] :
       {std::array{64, 64, 8}, {128, 128, 8}, {192, 192, 8}, {256, 64, 8}, {256, 64, 16}, {256, 128, 16}}) {
    const DecodeConfig config = decode_config(hopper, Half::bfloat16, head_dim, head_dim_v, rows, true);
    EXPECT_EQ(bad(config), 0) << kernel_name(config);
  }
  DecodeConfig one = decode_config(hopper, Half::float16, 128, 128, 8, true);
  EXPECT_EQ(bad(alone(hopper, one)), 0);
  one.cluster = 8;
  EXPECT_EQ(bad(one), 0);
  for (const Stored stored : {Stored::float8, Stored::int8}) {
    const DecodeConfig config = decode_config(hopper, Half::bfloat16, 128, 128, 8, true, stored);
    EXPECT_EQ(bad(config), 0) << kernel_name(config);
  }
}

// The instructions themselves, through CUTLASS's wrappers, and wgmma through ours.
TEST(Compile, InstructionsWork) {
  TESSERA_NEED_NVRTC();
  const std::string sm80 = R"(
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
extern "C" __global__ void k(float* p) {
  __shared__ alignas(16) uint4 s[32];
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(reinterpret_cast<uint4*>(p)[threadIdx.x], s[threadIdx.x], p != nullptr);
  cute::cp_async_fence();
  cute::cp_async_wait<0>();
  __syncthreads();
  uint32_t a[4];
  cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t*>(&s[threadIdx.x]), a[0], a[1], a[2], a[3]);
  float d[4] = {};
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], a[0], a[1], d[0], d[1], d[2], d[3]);
  p[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
)";
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_90a"}) {
    const Result<Cubin> cubin = compile("k", sm80, arch);
    ASSERT_TRUE(cubin.ok()) << cubin.status().message();
    EXPECT_EQ(cubin.value().resources.spill_bytes, 0);
  }
  const std::string sm90 = R"(
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include "ptx/wgmma.cuh"
using namespace tessera;
extern "C" __global__ void __launch_bounds__(256, 1) k(const __grid_constant__ cute::TmaDescriptor map, float* p) {
  __shared__ alignas(1024) char tile[16384];
  __shared__ uint64_t storage;
  auto& barrier = reinterpret_cast<cutlass::arch::ClusterTransactionBarrier&>(storage);
  if (threadIdx.x == 0) barrier.init(1);
  cutlass::arch::fence_barrier_init();
  __syncthreads();
  if (threadIdx.x >= 128) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 128) {
      barrier.arrive_and_expect_tx(16384);
      cute::SM90_TMA_LOAD_2D::copy(&map, &storage, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), tile, 0, 0);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    barrier.wait(0);
    const ptx::MatrixDescriptor operand = cute::cast_smem_ptr_to_uint(tile) >> 4;
    float d[2][4];
    ptx::wgmma_fence();
    ptx::wgmma<Half::bfloat16>(d, operand, operand, false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(d);
    p[threadIdx.x] = d[0][0] + d[0][1] + d[1][2] + d[1][3];
  }
}
)";
  const Result<Cubin> cubin = compile("k", sm90, "sm_90a");
  ASSERT_TRUE(cubin.ok()) << cubin.status().message();
  EXPECT_FALSE(is_refused(cubin.value().resources, ptxas_warnings(cubin.value().log))) << cubin.value().log;
}

}  // namespace
}  // namespace tessera::cuda
