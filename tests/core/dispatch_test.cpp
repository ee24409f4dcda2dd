// Dispatch on a list of made-up kernels: order, forcing, refusals, workspace, explain. Then on the real list.
#include "dispatch/dispatch.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

// How often each made-up kernel ran, and what its run returns.
int fast_runs = 0, plain_runs = 0;
Code plain_outcome = Code::ok;

std::string never() { return ""; }

const std::array<Kernel, 3> fakes = {{
    {"absent", "needs a machine that is not here", [] { return std::string("no such instructions"); },
     [](const Problem&) { return std::string(); }, [](const Problem&) { return Plan{}; },
     [](const Problem&, const Plan&, void*) { return Status(); }},
    {"fast", "bfloat16 only", never,
     [](const Problem& p) { return std::string(p.dtype == DType::bfloat16 ? "" : "it takes bfloat16 only"); },
     [](const Problem&) {
       return Plan{64, 128, 3, 4096};
     },
     [](const Problem&, const Plan&, void*) {
       ++fast_runs;
       return Status();
     }},
    {"plain", "head_dim up to 64", never,
     [](const Problem& p) { return std::string(p.head_dim <= 64 ? "" : "it takes head_dim up to 64"); },
     [](const Problem&) {
       return Plan{1, 1, 1, 0};
     },
     [](const Problem&, const Plan&, void*) {
       ++plain_runs;
       return plain_outcome == Code::ok ? Status() : Status(plain_outcome, "made to fail");
     }},
}};

Problem problem_of(DType dtype, std::int64_t head_dim) {
  Forward call;
  call.q = call.k = call.v = call.o = Tensor(nullptr, dtype, {2, 5, 4, head_dim});
  return validate(call, Pointers::optional).or_throw();
}
const Problem bf16 = problem_of(DType::bfloat16, 64), fp32 = problem_of(DType::float32, 64);
const Problem wide = problem_of(DType::float32, 128);

// Sets an environment variable for a scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

alignas(64) std::array<std::byte, 8192> room;
const Workspace enough{room.data(), room.size()};

TEST(Dispatch, TakesTheFirstThatDoesNotRefuse) {
  EXPECT_STREQ(choose(fakes, bf16, "").or_throw().kernel.name, "fast");
  EXPECT_STREQ(choose(fakes, fp32, "").or_throw().kernel.name, "plain");
  EXPECT_EQ(choose(fakes, bf16, "").or_throw().plan.workspace, 4096U);
}

TEST(Dispatch, SaysWhyNoneFits) {
  const Status status = choose(fakes, wide, "").status();
  EXPECT_EQ(status.code(), Code::unsupported);
  EXPECT_EQ(status.message(),
            "no kernel takes this call: absent: no such instructions; fast: it takes bfloat16 only; "
            "plain: it takes head_dim up to 64");
  EXPECT_EQ(choose({}, wide, "").status().message(), "no kernel takes this call: this build has no kernels");
}

TEST(Dispatch, ForcesByName) {
  EXPECT_STREQ(choose(fakes, bf16, "plain").or_throw().kernel.name, "plain");

  const Status refusing = choose(fakes, fp32, "fast").status();
  EXPECT_EQ(refusing.code(), Code::unsupported);
  EXPECT_EQ(refusing.message(), "kernel: fast, which refuses this call: it takes bfloat16 only");
  EXPECT_EQ(choose(fakes, fp32, "absent").status().message(),
            "kernel: absent, which refuses this call: no such instructions");

  const Status unknown = choose(fakes, fp32, "fas").status();
  EXPECT_EQ(unknown.code(), Code::invalid_argument);
  EXPECT_EQ(unknown.message(), "kernel: fas, expected one of absent, fast, plain");
  EXPECT_EQ(choose({}, fp32, "fast").status().message(),
            "kernel: fast, expected one of none: this build has no kernels");
}

TEST(Dispatch, OptionForcesBeforeEnvironment) {
  Options options;
  EXPECT_EQ(forced_kernel(options), "");
  const Environment environment("TESSERA_FORCE_KERNEL", "plain");
  EXPECT_EQ(forced_kernel(options), "plain");
  options.kernel = "fast";
  EXPECT_EQ(forced_kernel(options), "fast");
}

TEST(Dispatch, EmptyEnvironmentForcesNothing) {
  const Environment environment("TESSERA_FORCE_KERNEL", "");
  EXPECT_EQ(forced_kernel({}), "");
}

TEST(Dispatch, RunsWhatItChose) {
  fast_runs = plain_runs = 0;
  EXPECT_TRUE(run(fakes, bf16, "", enough).ok());
  EXPECT_EQ(fast_runs, 1);
  EXPECT_EQ(last_kernel(), "fast");
  EXPECT_TRUE(run(fakes, bf16, "plain", {}).ok()) << "no workspace needed, none given";
  EXPECT_EQ(plain_runs, 1);
  EXPECT_EQ(last_kernel(), "plain");
}

TEST(Dispatch, RemembersSuccessOnlyAndPerThread) {
  ASSERT_TRUE(run(fakes, bf16, "fast", enough).ok());
  plain_outcome = Code::internal;
  EXPECT_EQ(run(fakes, fp32, "plain", enough).message(), "made to fail");
  plain_outcome = Code::ok;
  EXPECT_EQ(last_kernel(), "fast");
  std::thread([] { EXPECT_EQ(last_kernel(), ""); }).join();
}

TEST(Dispatch, ChecksTheWorkspace) {
  fast_runs = 0;
  const auto message = [](Workspace workspace) {
    const Status status = run(fakes, bf16, "fast", workspace);
    EXPECT_EQ(status.code(), Code::invalid_argument);
    return status.message();
  };
  EXPECT_EQ(message({}), "workspace: null, expected 4096 bytes");
  EXPECT_EQ(message({nullptr, 4096}), "workspace: null, expected 4096 bytes");
  EXPECT_EQ(message({room.data(), 100}), "workspace: 100 bytes, expected at least 4096");
  EXPECT_EQ(message({room.data(), 4095}), "workspace: 4095 bytes, expected at least 4096");
  EXPECT_EQ(fast_runs, 0);
  EXPECT_TRUE(run(fakes, bf16, "fast", {room.data() + 1, 4096}).ok()) << "any address will do";
}

TEST(Dispatch, PreparesWhatItChose) {
  static int prepared = 0;
  std::array<Kernel, 3> list = fakes;
  list[1].prepare = [](const Problem& problem, const Plan& plan) {
    prepared += problem.dtype == DType::bfloat16 && plan.workspace == 4096 ? 1 : 100;
    return Status(Code::internal, "made to fail");
  };
  fast_runs = plain_runs = 0;
  EXPECT_EQ(prepare_problem(list, bf16, "").message(), "made to fail");
  EXPECT_EQ(prepared, 1);
  EXPECT_TRUE(prepare_problem(list, fp32, "").ok()) << "nothing to do";
  EXPECT_EQ(prepare_problem(list, wide, "").code(), Code::unsupported);
  EXPECT_EQ(prepare_problem(list, fp32, "fas").code(), Code::invalid_argument);
  EXPECT_EQ(prepared, 1);
  EXPECT_EQ(fast_runs + plain_runs, 0);
}

// --- explain ---

TEST(Explain, NamesTheChoiceAndEveryRefusal) {
  const Explanation explanation = explain_problem(fakes, bf16, "").or_throw();
  EXPECT_EQ(explanation.kernel, "fast");
  EXPECT_EQ(explanation.block_m, 64);
  EXPECT_EQ(explanation.block_n, 128);
  EXPECT_EQ(explanation.threads, 3);
  EXPECT_EQ(explanation.workspace, 4096U);
  ASSERT_EQ(explanation.refusals.size(), 1U);
  EXPECT_EQ(explanation.refusals[0].kernel, "absent");
  EXPECT_EQ(explanation.refusals[0].reason, "no such instructions");
}

TEST(Explain, ARefusalOfAllIsAnAnswer) {
  const Explanation explanation = explain_problem(fakes, wide, "").or_throw();
  EXPECT_EQ(explanation.kernel, "");
  EXPECT_EQ(explanation.refusals.size(), 3U);
  EXPECT_GT(explanation.flops, 0);
}

TEST(Explain, ForcingIsAReasonAgainstTheOthers) {
  const Explanation explanation = explain_problem(fakes, bf16, "plain").or_throw();
  EXPECT_EQ(explanation.kernel, "plain");
  ASSERT_EQ(explanation.refusals.size(), 2U);
  EXPECT_EQ(explanation.refusals[1].reason, "plain is forced");
  EXPECT_EQ(explain_problem(fakes, bf16, "none such").status().code(), Code::invalid_argument);
}

// Pairs counted one by one, with a reading of the mask of its own.
double count_pairs(const Problem& p) {
  double pairs = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = p.sequence(b);
    const std::int64_t shift = p.alignment == Alignment::top_left ? 0 : s.seqlen_k - s.seqlen_q;
    for (std::int64_t i = 0; i < s.seqlen_q; ++i) {
      for (std::int64_t j = 0; j < s.seqlen_k; ++j) {
        if (i + shift - p.window_left <= j && j <= i + shift + p.window_right) pairs += 1;
      }
    }
  }
  return pairs;
}

TEST(Explain, CountsFlopsOfVisiblePairs) {
  const std::vector<std::int32_t> cu_q = {0, 3, 3, 10}, cu_k = {0, 1, 6, 19}, used = {1, 2, 11};
  for (const bool packed : {false, true}) {
    for (const bool causal : {false, true}) {
      for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
        for (const int left : {-1, 0, 2}) {
          Forward call;
          call.options.causal = causal;
          call.options.alignment = alignment;
          if (left >= 0) call.options.window_left = left;
          if (packed) {
            call.q = call.o = Tensor(nullptr, DType::float32, {10, 4, 16});
            call.k = call.v = Tensor(nullptr, DType::float32, {19, 2, 16});
            call.options.cu_seqlens_q = Tensor(cu_q.data(), DType::int32, {4});
            call.options.cu_seqlens_k = Tensor(cu_k.data(), DType::int32, {4});
            call.options.seqused_k = Tensor(used.data(), DType::int32, {3});
          } else {
            call.q = call.o = Tensor(nullptr, DType::float32, {2, 9, 4, 16});
            call.k = call.v = Tensor(nullptr, DType::float32, {2, 6, 2, 16});
          }
          const Problem problem = validate(call, Pointers::optional).or_throw();
          const Explanation explanation = explain_problem(fakes, problem, "").or_throw();
          EXPECT_EQ(explanation.flops, 4 * 2 * (16 + 16) * count_pairs(problem));
          const double all = packed ? 3 * 1 + 0 * 2 + 7 * 11 : 2 * 9 * 6;
          EXPECT_EQ(explanation.dense_flops, 4 * 2 * (16 + 16) * all);
        }
      }
    }
  }
}

TEST(Explain, CountsBackwardFlopsAndBytes) {
  Backward call;
  call.q = call.dq = Tensor(nullptr, DType::bfloat16, {2, 5, 4, 8});
  call.k = call.dk = Tensor(nullptr, DType::bfloat16, {2, 3, 2, 8});
  call.v = Tensor(nullptr, DType::bfloat16, {2, 3, 2, 6});
  call.dv = Tensor(nullptr, DType::float32, {2, 3, 2, 6});
  call.o = call.dout = Tensor(nullptr, DType::bfloat16, {2, 5, 4, 6});
  call.lse = Tensor(nullptr, DType::float32, {2, 4, 5});
  call.options.bias = call.dbias = Tensor(nullptr, DType::float32, {4, 1, 3});
  const Problem problem = validate(call, Pointers::optional).or_throw();
  const Explanation explanation = explain_problem(fakes, problem, "plain").or_throw();
  EXPECT_EQ(explanation.flops, 2 * 4 * (5 * 3) * 2 * (3 * 8 + 2 * 6));
  EXPECT_EQ(explanation.flops, explanation.dense_flops);
  const int q = 2 * 5 * 4 * 8 * 2, k = 2 * 3 * 2 * 8 * 2, v = 2 * 3 * 2 * 6 * 2, o = 2 * 5 * 4 * 6 * 2;
  const int lse = 2 * 4 * 5 * 4, bias = 4 * 3 * 4;
  EXPECT_EQ(explanation.bytes, 2 * q + 2 * k + v + 2 * v + 2 * o + lse + 2 * bias);
}

TEST(Explain, Text) {
  Explanation explanation;
  explanation.kernel = "plain";
  explanation.block_m = 64;
  explanation.block_n = 128;
  explanation.threads = 2;
  explanation.flops = 1.5e9;
  explanation.dense_flops = 3e9;
  explanation.bytes = 1024;
  explanation.workspace = 4096;
  explanation.refusals = {{"fast", "it takes bfloat16 only"}, {"absent", "no such \"instructions\""}};
  EXPECT_EQ(explanation.to_string(),
            "kernel      plain\n"
            "tile        64 x 128\n"
            "threads     2\n"
            "flops       1.5e+09 of 3e+09 without the mask\n"
            "bytes       1024 read and written\n"
            "workspace   4096 bytes\n"
            "refused     fast: it takes bfloat16 only\n"
            "            absent: no such \"instructions\"\n");

  const nlohmann::json json = nlohmann::json::parse(explanation.to_json());
  EXPECT_EQ(json["kernel"], "plain");
  EXPECT_EQ(json["block_n"], 128);
  EXPECT_EQ(json["flops"], 1.5e9);
  EXPECT_EQ(json["workspace"], 4096);
  EXPECT_EQ(json["refusals"][1]["reason"], "no such \"instructions\"");
  EXPECT_FALSE(json.contains("registers"));
  EXPECT_TRUE(nlohmann::json::parse(Explanation().to_json())["kernel"].is_null());
  EXPECT_EQ(Explanation().to_string().substr(0, 17), "kernel      none\n");
}

TEST(Explain, TextOfAGpuKernel) {
  Explanation explanation;
  explanation.kernel = "cuda";
  explanation.registers = 168;
  explanation.shared_memory = 65536;
  explanation.occupancy = 0.125;
  explanation.cubin = "cache";
  explanation.cubin_seconds = 0.0125;
  const std::string text = explanation.to_string();
  EXPECT_NE(text.find("registers   168 a thread\n"
                      "shared      65536 bytes a block\n"
                      "occupancy   12.5 % of the warps\n"
                      "cubin       cache, in 12.5 ms\n"),
            std::string::npos)
      << text;
  const nlohmann::json json = nlohmann::json::parse(explanation.to_json());
  EXPECT_EQ(json["registers"], 168);
  EXPECT_EQ(json["shared_memory"], 65536);
  EXPECT_EQ(json["occupancy"], 0.125);
  EXPECT_EQ(json["cubin"], "cache");
  EXPECT_EQ(json["cubin_seconds"], 0.0125);
}

// Written by hand; nlohmann-json is its judge, to the letter.
TEST(Explain, JsonIsAsAnotherWritesIt) {
  Explanation explanation;
  explanation.kernel = "a\"b\\c\n\t\r\b\f\x01\x1f\x7f µ";
  explanation.block_m = std::numeric_limits<std::int64_t>::min();
  explanation.workspace = std::numeric_limits<std::size_t>::max();
  explanation.registers = 1;
  explanation.cubin = "pack";
  const auto check = [&] {
    const std::string text = explanation.to_json();
    const auto json = nlohmann::ordered_json::parse(text);
    EXPECT_EQ(text, json.dump());
    EXPECT_EQ(json["kernel"], explanation.kernel);
    EXPECT_EQ(json["flops"], explanation.flops);
    EXPECT_TRUE(json["flops"].is_number_float());
  };
  check();
  explanation.refusals = {{"x", ""}, {"y", "no"}};
  for (const double flops :
       {-0.0, 1.0, 1.0 / 3, 1e-4, 9.99e-5, 1e-300, 999999999999999.0, 1e15, 1e16, 123456.75, 4e18,
        std::numeric_limits<double>::max(), std::numeric_limits<double>::denorm_min()}) {
    explanation.flops = flops;
    check();
    explanation.flops = -flops;
    check();
  }
  explanation.flops = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(nlohmann::json::parse(explanation.to_json())["flops"].is_null());
}

// --- the real list ---

// A forward call on zeros: every key weighs the same.
struct SmallCall {
  std::vector<float> q = std::vector<float>(2 * 3 * 4 * 8), k = std::vector<float>(2 * 5 * 2 * 8);
  std::vector<float> v = k, o = q;
  Forward call;

  SmallCall() {
    call.q = Tensor(q.data(), DType::float32, {2, 3, 4, 8});
    call.k = Tensor(k.data(), DType::float32, {2, 5, 2, 8});
    call.v = Tensor(v.data(), DType::float32, {2, 5, 2, 8});
    call.o = Tensor(o.data(), DType::float32, {2, 3, 4, 8});
    call.workspace = enough;
  }
};

TEST(Kernels, AreListedWithTheirReasons) {
  for (const KernelInfo& kernel : kernels()) {
    EXPECT_FALSE(kernel.name.empty());
    EXPECT_FALSE(kernel.description.empty()) << kernel.name;
    EXPECT_EQ(kernel.available, kernel.why_not.empty()) << kernel.name;
    EXPECT_EQ(kernel.device, kernel.name.substr(0, kernel.name.find('_'))) << "the first part of the name";
  }
}

TEST(Kernels, EachRunsWhenForced) {
  for (const KernelInfo& kernel : kernels()) {
    SCOPED_TRACE(kernel.name);
    SmallCall small;
    small.call.options.kernel = kernel.name;
    const Result<std::size_t> bytes = workspace_size(small.call);
    if (!bytes.ok()) {
      EXPECT_EQ(bytes.status().code(), Code::unsupported) << bytes.status().message();
      EXPECT_EQ(forward(small.call).message(), bytes.status().message());
      continue;
    }
    std::vector<std::byte> memory(bytes.value() + 64);
    const std::size_t past = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
    small.call.workspace = {memory.data() + (64 - past), bytes.value()};
    const Status status = forward(small.call);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(last_kernel(), kernel.name);
    EXPECT_EQ(explain(small.call).or_throw().kernel, kernel.name);
  }
}

TEST(Kernels, UnknownNamesAreRefusedByOptionAndEnvironment) {
  SmallCall small;
  const Environment environment("TESSERA_FORCE_KERNEL", "nonesuch");
  const Status status = forward(small.call);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_TRUE(status.message().starts_with("kernel: nonesuch, expected one of ")) << status.message();
  small.call.options.kernel = "other";
  EXPECT_TRUE(forward(small.call).message().starts_with("kernel: other, expected one of "));
  EXPECT_EQ(workspace_size(small.call).status().code(), Code::invalid_argument);
  EXPECT_EQ(explain(small.call).status().code(), Code::invalid_argument);
}

TEST(Kernels, VersionIsThreeNumbers) {
  int major = -1, minor = -1, patch = -1;
  EXPECT_EQ(std::sscanf(version().c_str(), "%d.%d.%d", &major, &minor, &patch), 3);
}

}  // namespace
}  // namespace tessera
