// The judge must be able to condemn: right results pass, and each kind of wrong one fails and is named.
#include "verify/judge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>

namespace tessera::verify {
namespace {

Case parsed(const std::string& line) {
  const std::optional<Case> c = parse_case(line);
  EXPECT_TRUE(c.has_value()) << line;
  return c.value_or(Case{});
}

void write(Buffer& buffer, const std::vector<double>& values) {
  for (std::int64_t i = 0; i < buffer.size(); ++i) buffer.set(i, values[i]);
}

// Tensors that hold what a plain implementation would have written.
struct Written {
  explicit Written(const Case& c) : tensors(c), expected(expect(tensors)) {
    write(tensors.o, expected.plain_outputs.o);
    write(tensors.lse, expected.plain_outputs.lse);
    write(tensors.dq, expected.plain_gradients.dq);
    write(tensors.dk, expected.plain_gradients.dk);
    write(tensors.dv, expected.plain_gradients.dv);
    if (tensors.dbias.given()) write(tensors.dbias, expected.plain_gradients.dbias);
    if (tensors.dsinks.given()) write(tensors.dsinks, expected.plain_gradients.dsinks);
  }
  Verdict verdict() {
    Verdict verdict;
    verdict.settings = tensors.settings;
    compare(tensors, expected, Direction::forward, verdict);
    compare(tensors, expected, Direction::backward, verdict);
    return verdict;
  }

  Tensors tensors;
  Expected expected;
};

Case typical() {
  return parsed(
      "batch=2 seqlen_q=9 seqlen_k=11 num_heads_q=2 head_dim=8 head_dim_v=6 causal=1 bias=bhqk dbias=1 "
      "sinks=1 "
      "dsinks=1 o_layout=qkv dq_layout=misaligned dk_layout=bhsd seed=1");
}

TEST(Judge, AcceptsThePlainComputation) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    Case c = typical();
    c.dtype = parsed(std::string("dtype=") + dtype).dtype;
    Written written(c);
    const Verdict verdict = written.verdict();
    EXPECT_TRUE(verdict.ok()) << verdict.to_string();
    EXPECT_EQ(verdict.scores.size(), 7u);
  }
}

void expect_condemned(const std::string& said, const std::function<void(Tensors&)>& spoil) {
  Written written(typical());
  spoil(written.tensors);
  const Verdict verdict = written.verdict();
  ASSERT_FALSE(verdict.ok()) << said;
  EXPECT_NE(verdict.to_string().find(said), std::string::npos) << verdict.to_string();
  EXPECT_NE(verdict.to_string().find(to_string(typical())), std::string::npos) << verdict.to_string();
}

TEST(Judge, FindsASingleWrongElement) {
  const auto shift = [](Buffer& buffer, std::int64_t i) { buffer.set(i, buffer.get(i) + 1e-3); };
  expect_condemned("o[1, 3, 1, 2] is ", [&](Tensors& t) { shift(t.o, ((1 * 9 + 3) * 2 + 1) * 6 + 2); });
  expect_condemned("lse[1, 0, 8] is ", [&](Tensors& t) { shift(t.lse, (1 * 2 + 0) * 9 + 8); });
  expect_condemned("dq[0, 0, 0, 7] is ", [&](Tensors& t) { shift(t.dq, 7); });
  expect_condemned("dk[0, 1, 0, 0] is ", [&](Tensors& t) { shift(t.dk, 8); });
  expect_condemned("dv[0, 0, 0, 5] is ", [&](Tensors& t) { shift(t.dv, 5); });
  expect_condemned("dbias[0, 0, 1, 0] is ", [&](Tensors& t) { shift(t.dbias, 11); });
  expect_condemned("dsinks[1] is ", [&](Tensors& t) { shift(t.dsinks, 1); });
}

TEST(Judge, FindsNaNAndInfinity) {
  const double infinity = std::numeric_limits<double>::infinity();
  expect_condemned("o[0, 0, 0, 0] is nan", [](Tensors& t) { t.o.set(0, std::nan("")); });
  expect_condemned("dv[0, 0, 0, 1] is inf", [&](Tensors& t) { t.dv.set(1, infinity); });
  expect_condemned("lse[0, 0, 0] is -inf", [&](Tensors& t) { t.lse.set(0, -infinity); });
}

TEST(Judge, FindsAFiniteLseOfAnEmptyRow) {
  Written written(parsed("seqlen_q=3 seqlen_k=2 causal=1"));
  ASSERT_TRUE(written.verdict().ok());
  written.tensors.lse.set(0, -1e30);
  EXPECT_FALSE(written.verdict().ok());
}

TEST(Judge, FindsUnwrittenElements) {
  const auto unwrite = [](Buffer& buffer, std::int64_t i) {
    const std::uint32_t pattern = 0x7FE57FE5u;
    std::memcpy(static_cast<float*>(buffer.tensor().data) + buffer.position(i), &pattern, sizeof(pattern));
    ASSERT_TRUE(buffer.unwritten(i));
  };
  expect_condemned("o[0, 0, 0, 3] was not written, 1 of ", [&](Tensors& t) { unwrite(t.o, 3); });
  expect_condemned("lse[0, 0, 1] was not written, 1 of ", [&](Tensors& t) { unwrite(t.lse, 1); });
  expect_condemned("dk[0, 0, 0, 0] was not written, ", [](Tensors& t) { t.dk.poison(); });
}

TEST(Judge, FindsOverwrittenSurroundings) {
  const auto at = [](Buffer& buffer, std::int64_t position) {
    return static_cast<float*>(buffer.tensor().data) + position;
  };
  expect_condemned("dv: memory around", [&](Tensors& t) { *at(t.dv, -1) = 0; });
  expect_condemned("dv: memory around", [&](Tensors& t) { *at(t.dv, t.dv.size()) = 0; });
  expect_condemned("o: memory around", [&](Tensors& t) { *at(t.o, 2 * 6) = 0; });  // the gap behind row 0
  expect_condemned("dq: memory around", [&](Tensors& t) { *at(t.dq, 2 * 8) = 0; });
  expect_condemned("lse: memory around", [&](Tensors& t) { *at(t.lse, t.lse.size()) = 0; });
  expect_condemned("k: an input was changed", [](Tensors& t) { t.k.set(5, 0.125); });
}

TEST(Scratch, FindsOverwrittenGuards) {
  Scratch scratch(100);
  const Workspace workspace = scratch.workspace();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.data) % 64, 0u);
  std::memset(workspace.data, 0, workspace.bytes);
  EXPECT_TRUE(scratch.guards_intact());
  static_cast<std::byte*>(workspace.data)[100] = std::byte{0};
  EXPECT_FALSE(scratch.guards_intact());
}

// ---- Cases.

TEST(Case, LinesRoundTrip) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 2000; ++i) {
    Case c = random_case(random);
    c.kernel = i % 2 == 0 ? "" : "some_kernel";
    const std::optional<Case> back = parse_case(to_string(c));
    ASSERT_TRUE(back.has_value()) << to_string(c);
    ASSERT_EQ(back, std::optional(c)) << to_string(c);
  }
  EXPECT_EQ(to_string(Case{}), "");
}

TEST(Case, BadLinesAreRefused) {
  for (const char* line : {"nonsense", "batch=", "batch=x", "batch=1x", "unknown=1", "dtype=float64",
                           "causal=yes", "bias=hbqk", "bias=bhq", "window_left=", "q_layout=odd"}) {
    EXPECT_FALSE(parse_case(line).has_value()) << line;
  }
  EXPECT_TRUE(parse_case("").has_value());
  EXPECT_TRUE(parse_case("  batch=2   window_left=none ").has_value());
}

TEST(Case, FixedCasesAreValidAndNamedOnce) {
  std::set<std::string> names;
  for (const auto& [name, c] : fixed_cases()) {
    EXPECT_TRUE(names.insert(name).second) << name;
    const Tensors tensors(c);
    EXPECT_TRUE(validate(tensors.forward_call()).ok())
        << name << ": " << validate(tensors.forward_call()).status().message();
    EXPECT_TRUE(validate(tensors.backward_call()).ok())
        << name << ": " << validate(tensors.backward_call()).status().message();
  }
}

// A draw that never sets an option would test nothing of it.
TEST(Case, RandomCasesAreValidAndReachEveryOption) {
  std::mt19937_64 random(11);
  std::map<std::string, int> reached;
  for (int i = 0; i < 300; ++i) {
    const Case c = random_case(random);
    const Tensors tensors(c);
    const auto forward = validate(tensors.forward_call());
    ASSERT_TRUE(forward.ok()) << forward.status().message() << "\n" << to_string(c);
    const auto backward = validate(tensors.backward_call());
    ASSERT_TRUE(backward.ok()) << backward.status().message() << "\n" << to_string(c);
    const std::string line = to_string(c);
    for (std::size_t at = 0; at < line.size(); at = std::min(line.find(' ', at), line.size() - 1) + 1) {
      ++reached[line.substr(at, line.find('=', at) - at)];
    }
    if (c.packed && c.bias.size() == 4 && c.sinks && c.dropout_p > 0) ++reached["combined"];
  }
  for (const char* option :
       {"dtype",        "o_dtype",       "grad_dtype", "packed",      "tail",         "seqused_q",
        "seqused_k",    "softmax_scale", "causal",     "window_left", "window_right", "alignment",
        "softcap",      "alibi",         "bias",       "bias_fill",   "bias_dtype",   "sinks",
        "sinks_dtype",  "dropout_p",     "offset",     "lse",         "dlse",         "dbias",
        "dsinks",       "deterministic", "q_layout",   "k_layout",    "v_layout",     "o_layout",
        "dout_layout",  "dq_layout",     "dk_layout",  "dv_layout",   "lse_layout",   "bias_layout",
        "dbias_layout", "magnitude",     "mean",       "threads",     "num_heads_k",  "combined"}) {
    EXPECT_GE(reached[option], 1) << option;
  }
}

TEST(Tensors, PaddingIsPoisonedAndTheRestIsNot) {
  const Tensors t(
      parsed("packed=1 batch=4 seqlen_q=8 seqlen_k=9 tail=3 seqused_q=1 seqused_k=1 head_dim=2 head_dim_v=2 "
             "dlse=1 bias=bhqk seed=2"));
  const Problem problem = validate(t.forward_call()).or_throw();
  std::vector<bool> real_q(problem.rows_q), real_k(problem.rows_k);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence s = problem.sequence(b);
    for (std::int64_t i = 0; i < s.seqlen_q; ++i) real_q[s.q_begin + i] = true;
    for (std::int64_t j = 0; j < s.seqlen_k; ++j) real_k[s.k_begin + j] = true;
  }
  for (std::int64_t i = 0; i < problem.rows_q; ++i) {
    EXPECT_EQ(std::isnan(t.q.get(i * 2)), !real_q[i]);
    EXPECT_EQ(std::isnan(t.dout.get(i * 2 + 1)), !real_q[i]);
    EXPECT_EQ(std::isnan(t.dlse.get(i)), !real_q[i]);
  }
  for (std::int64_t j = 0; j < problem.rows_k; ++j) {
    EXPECT_EQ(std::isnan(t.k.get(j * 2)), !real_k[j]);
    EXPECT_EQ(std::isnan(t.v.get(j * 2 + 1)), !real_k[j]);
  }
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence s = problem.sequence(b);
    for (std::int64_t i = 0; i < problem.max_seqlen_q; ++i) {
      for (std::int64_t j = 0; j < problem.max_seqlen_k; ++j) {
        const std::int64_t index = (b * problem.max_seqlen_q + i) * problem.max_seqlen_k + j;
        EXPECT_EQ(std::isnan(t.bias.get(index)), i >= s.seqlen_q || j >= s.seqlen_k);
      }
    }
  }
}

TEST(Tensors, OutputsStartUnwritten) {
  Tensors t(typical());
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    for (const auto& [name, buffer] : t.outputs(direction)) {
      EXPECT_TRUE(buffer->guards_intact()) << name;
      for (std::int64_t i = 0; i < buffer->size(); ++i) {
        EXPECT_TRUE(buffer->unwritten(i)) << name;
        EXPECT_TRUE(std::isnan(buffer->get(i))) << name;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::verify
