// The oracle by hand-computed cases and by finite differences: nothing else judges the judge.
#include "reference/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>

#include "core/half.h"
#include "verify/case.h"
#include "verify/tensors.h"

namespace tessera {
namespace {

using verify::Buffer;
using verify::Case;
using verify::Tensors;

Case parsed(const std::string& line) {
  const std::optional<Case> c = verify::parse_case(line);
  EXPECT_TRUE(c.has_value()) << line;
  return c.value_or(Case{});
}

reference::Outputs forward_of(const Tensors& tensors) {
  return reference::forward(validate(tensors.forward_call()).or_throw());
}
reference::Gradients backward_of(const Tensors& tensors) {
  return reference::backward(validate(tensors.backward_call()).or_throw());
}

void assign(Buffer& buffer, std::initializer_list<double> values) {
  ASSERT_EQ(buffer.size(), static_cast<std::int64_t>(values.size()));
  std::int64_t i = 0;
  for (const double x : values) buffer.set(i++, x);
}

// ---- By hand. head_dim 1, scale 1: the scores are q * k.

TEST(Oracle, TwoKeys) {
  Tensors t(parsed("seqlen_q=1 seqlen_k=2 head_dim=1 head_dim_v=1 softmax_scale=1"));
  assign(t.q, {1});
  assign(t.k, {0, std::log(3.0)});
  assign(t.v, {10, 20});
  assign(t.dout, {2});
  const auto outputs = forward_of(t);
  EXPECT_NEAR(outputs.o[0], 0.25 * 10 + 0.75 * 20, 1e-6);
  EXPECT_NEAR(outputs.lse[0], std::log(4.0), 1e-7);
  // dp = (20, 40), delta = 35: ds = (0.25 * -15, 0.75 * 5).
  const auto gradients = backward_of(t);
  EXPECT_NEAR(gradients.dv[0], 0.5, 1e-7);
  EXPECT_NEAR(gradients.dv[1], 1.5, 1e-7);
  EXPECT_NEAR(gradients.dk[0], -3.75, 1e-6);
  EXPECT_NEAR(gradients.dk[1], 3.75, 1e-6);
  EXPECT_NEAR(gradients.dq[0], 3.75 * std::log(3.0), 1e-5);
}

TEST(Oracle, DefaultScaleIsOneOverRootOfHeadDim) {
  Tensors t(parsed("seqlen_k=2 head_dim=4 head_dim_v=1"));
  assign(t.q, {1, 1, 1, 1});
  assign(t.k, {0, 0, 0, 0, 1, 1, 1, 1});
  assign(t.v, {0, 1});
  EXPECT_NEAR(forward_of(t).o[0], 1 / (1 + std::exp(-2.0)), 1e-9);
}

TEST(Oracle, SoftcapThenAlibiThenBias) {
  Tensors t(
      parsed("seqlen_q=1 seqlen_k=2 head_dim=1 head_dim_v=1 softmax_scale=2 softcap=3 alibi=1 bias=111k"));
  assign(t.q, {1});
  assign(t.k, {1, 2});
  assign(t.v, {0, 1});
  assign(t.alibi_slopes, {0.25});
  assign(t.bias, {0.5, -0.5});
  const double s0 = 3 * std::tanh(2.0 / 3) - 0.25 * 1 + 0.5;  // the query stands at key 1
  const double s1 = 3 * std::tanh(4.0 / 3) - 0.5;
  const auto outputs = forward_of(t);
  EXPECT_NEAR(outputs.o[0], std::exp(s1) / (std::exp(s0) + std::exp(s1)), 1e-12);
  EXPECT_NEAR(outputs.lse[0], std::log(std::exp(s0) + std::exp(s1)), 1e-12);
}

// Which keys are seen, read off lse: all scores are 0, so that exp(lse) counts them.
std::vector<int> keys_seen(const std::string& line) {
  Tensors t(parsed(line + " head_dim=1 head_dim_v=1"));
  for (std::int64_t i = 0; i < t.q.size(); ++i) t.q.set(i, 0);
  std::vector<int> counts;
  for (const double lse : forward_of(t).lse) counts.push_back(static_cast<int>(std::lround(std::exp(lse))));
  return counts;
}

TEST(Oracle, MasksCountTheRightKeys) {
  using Counts = std::vector<int>;
  EXPECT_EQ(keys_seen("seqlen_q=3 seqlen_k=3 causal=1"), (Counts{1, 2, 3}));
  EXPECT_EQ(keys_seen("seqlen_q=2 seqlen_k=5 causal=1"), (Counts{4, 5}));
  EXPECT_EQ(keys_seen("seqlen_q=5 seqlen_k=2 causal=1"), (Counts{0, 0, 0, 1, 2}));
  EXPECT_EQ(keys_seen("seqlen_q=2 seqlen_k=5 causal=1 alignment=top_left"), (Counts{1, 2}));
  EXPECT_EQ(keys_seen("seqlen_q=5 seqlen_k=2 causal=1 alignment=top_left"), (Counts{1, 2, 2, 2, 2}));
  EXPECT_EQ(keys_seen("seqlen_q=4 seqlen_k=4 window_left=1 window_right=0"), (Counts{1, 2, 2, 2}));
  EXPECT_EQ(keys_seen("seqlen_q=4 seqlen_k=4 window_left=0 window_right=2"), (Counts{3, 3, 2, 1}));
  EXPECT_EQ(keys_seen("seqlen_q=4 seqlen_k=4 window_left=1"), (Counts{4, 4, 3, 2}));
  EXPECT_EQ(keys_seen("seqlen_q=4 seqlen_k=4 window_right=1"), (Counts{2, 3, 4, 4}));
  EXPECT_EQ(keys_seen("seqlen_q=3 seqlen_k=5 window_left=0 window_right=0"), (Counts{1, 1, 1}));
}

TEST(Oracle, EmptyRow) {
  Tensors t(parsed("seqlen_q=2 seqlen_k=1 head_dim=1 head_dim_v=1 causal=1 dlse=1"));
  const auto outputs = forward_of(t);
  EXPECT_EQ(outputs.o[0], 0);
  EXPECT_EQ(outputs.lse[0], -std::numeric_limits<double>::infinity());
  EXPECT_EQ(backward_of(t).dq[0], 0);
}

TEST(Oracle, SinkOfAnEmptyRow) {
  Tensors t(parsed("seqlen_q=2 seqlen_k=1 head_dim=1 head_dim_v=1 causal=1 sinks=1 dsinks=1 dlse=1"));
  assign(t.q, {0, 0});
  assign(t.sinks, {1.5});
  assign(t.v, {8});
  assign(t.dout, {3, 0});
  assign(t.dlse, {0.25, 0});
  const auto outputs = forward_of(t);
  EXPECT_EQ(outputs.o[0], 0);
  EXPECT_EQ(outputs.lse[0], 1.5);
  EXPECT_NEAR(outputs.o[1], 8 / (1 + std::exp(1.5)), 1e-12);
  EXPECT_NEAR(outputs.lse[1], std::log(1 + std::exp(1.5)), 1e-12);
  EXPECT_NEAR(backward_of(t).dsinks[0], 0.25, 1e-12);  // row 0: p of the sink is 1, lse is the sink
}

TEST(Oracle, DropoutKeepsWhatPhiloxSays) {
  Tensors t(parsed(
      "batch=2 num_heads_q=2 seqlen_q=5 seqlen_k=20 head_dim=1 head_dim_v=1 dropout_p=0.4 seed=9 offset=3"));
  for (std::int64_t i = 0; i < t.q.size(); ++i) t.q.set(i, 0);
  for (std::int64_t i = 0; i < t.v.size(); ++i) t.v.set(i, 1);
  const Dropout dropout = Dropout::make(0.4, 9, 3);
  const auto outputs = forward_of(t);
  for (unsigned b = 0; b < 2; ++b) {
    for (unsigned i = 0; i < 5; ++i) {
      for (unsigned h = 0; h < 2; ++h) {
        int kept = 0;
        for (unsigned j = 0; j < 20; ++j) kept += dropout.keeps(b * 2 + h, i, j) ? 1 : 0;
        EXPECT_NEAR(outputs.o[(b * 5 + i) * 2 + h], kept / 20.0 * 65536 / dropout.threshold, 1e-12);
        EXPECT_NEAR(outputs.lse[(b * 2 + h) * 5 + i], std::log(20.0), 1e-12);  // lse knows no dropout
      }
    }
  }
}

TEST(Oracle, QueryHeadsShareTheKeyHeadOfTheirGroup) {
  Tensors t(parsed("num_heads_q=4 num_heads_k=2 head_dim=1 head_dim_v=1"));
  assign(t.v, {5, 7});
  assign(t.dout, {1, 2, 3, 4});
  EXPECT_EQ(forward_of(t).o, (std::vector<double>{5, 5, 7, 7}));
  EXPECT_EQ(backward_of(t).dv, (std::vector<double>{3, 7}));
}

// A packed batch gives what each of its sequences gives alone, and zeros in its padding.
TEST(Oracle, PackedAndSequsedEqualSequencesAlone) {
  Tensors t(
      parsed("packed=1 batch=5 seqlen_q=6 seqlen_k=8 tail=2 num_heads_q=2 head_dim=3 head_dim_v=2 causal=1 "
             "seqused_q=1 seqused_k=1 seed=4"));
  const Problem packed = validate(t.forward_call()).or_throw();
  const auto together = reference::forward(packed);
  std::vector<bool> real(packed.rows_q, false);
  for (std::int64_t b = 0; b < packed.batch; ++b) {
    const Sequence s = packed.sequence(b);
    Case alone = parsed("num_heads_q=2 head_dim=3 head_dim_v=2 causal=1");
    alone.seqlen_q = s.seqlen_q;
    alone.seqlen_k = s.seqlen_k;
    Tensors u(alone);
    for (std::int64_t i = 0; i < u.q.size(); ++i) u.q.set(i, t.q.get(s.q_begin * 6 + i));
    for (std::int64_t i = 0; i < u.k.size(); ++i) u.k.set(i, t.k.get(s.k_begin * 3 + i));
    for (std::int64_t i = 0; i < u.v.size(); ++i) u.v.set(i, t.v.get(s.k_begin * 2 + i));
    const auto outputs = forward_of(u);
    for (std::size_t i = 0; i < outputs.o.size(); ++i) EXPECT_EQ(together.o[s.q_begin * 4 + i], outputs.o[i]);
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t i = 0; i < s.seqlen_q; ++i) {
        EXPECT_EQ(together.lse[h * packed.rows_q + s.q_begin + i], outputs.lse[h * s.seqlen_q + i]);
        real[s.q_begin + i] = true;
      }
    }
  }
  ASSERT_NE(std::count(real.begin(), real.end(), false), 0);
  for (std::int64_t i = 0; i < packed.rows_q; ++i) {
    if (real[i]) continue;
    for (std::int64_t c = 0; c < 4; ++c) EXPECT_EQ(together.o[i * 4 + c], 0);
    for (std::int64_t h = 0; h < 2; ++h) {
      EXPECT_EQ(together.lse[h * packed.rows_q + i], -std::numeric_limits<double>::infinity());
    }
  }
}

// ---- Finite differences of L = sum o * dout + sum lse * dlse.

double loss(const Tensors& t) {
  const auto outputs = forward_of(t);
  double sum = 0;
  for (std::size_t i = 0; i < outputs.o.size(); ++i) {
    const double dout = t.dout.get(static_cast<std::int64_t>(i));
    if (!std::isnan(dout)) sum += outputs.o[i] * dout;  // NaN marks padding, where o is 0
  }
  for (std::size_t i = 0; t.dlse.given() && i < outputs.lse.size(); ++i) {
    if (std::isfinite(outputs.lse[i])) sum += outputs.lse[i] * t.dlse.get(static_cast<std::int64_t>(i));
  }
  return sum;
}

void expect_gradient(const Tensors& t, Buffer& input, const std::vector<double>& gradient, const char* name) {
  ASSERT_EQ(input.size(), static_cast<std::int64_t>(gradient.size())) << name;
  for (std::int64_t i = 0; i < input.size(); ++i) {
    const double x = input.get(i);
    if (!std::isfinite(x)) {
      EXPECT_EQ(gradient[i], 0) << name << "[" << i << "], which is padding or hidden";
      continue;
    }
    input.set(i, x + 0x1p-10);
    const double above = input.get(i), loss_above = loss(t);
    input.set(i, x - 0x1p-10);
    const double below = input.get(i), loss_below = loss(t);
    input.set(i, x);
    const double slope = (loss_above - loss_below) / (above - below);
    EXPECT_NEAR(gradient[i], slope, 2e-5 * std::max(1.0, std::abs(slope))) << name << "[" << i << "]";
  }
}

void expect_gradients(const Case& c) {
  SCOPED_TRACE(verify::to_string(c));
  Tensors t(c);
  const auto gradients = backward_of(t);
  expect_gradient(t, t.q, gradients.dq, "dq");
  expect_gradient(t, t.k, gradients.dk, "dk");
  expect_gradient(t, t.v, gradients.dv, "dv");
  if (t.bias.given()) expect_gradient(t, t.bias, gradients.dbias, "dbias");
  if (t.sinks.given()) expect_gradient(t, t.sinks, gradients.dsinks, "dsinks");
}

TEST(OracleGradients, EachOption) {
  const std::string shape =
      "batch=2 seqlen_q=4 seqlen_k=5 num_heads_q=2 head_dim=3 head_dim_v=2 dlse=1 seed=5 ";
  for (const char* option : {"",
                             "dlse=0",
                             "causal=1",
                             "causal=1 alignment=top_left",
                             "window_left=1",
                             "window_left=1 window_right=1",
                             "num_heads_k=2",
                             "softmax_scale=0.7",
                             "softcap=0.5",
                             "softcap=2",
                             "alibi=1",
                             "alibi=2",
                             "sinks=1",
                             "seqlen_q=7 causal=1 sinks=1",
                             "seqlen_q=7 causal=1",
                             "seqlen_k=0 sinks=1",
                             "bias=bhqk bias_fill=hidden",
                             "bias=bhqk bias_fill=hidden sinks=1",
                             "dropout_p=0.3",
                             "dropout_p=1",
                             "packed=1",
                             "packed=1 tail=2",
                             "seqused_q=1 seqused_k=1",
                             "packed=1 seqused_q=1 seqused_k=1 causal=1"}) {
    expect_gradients(parsed(shape + option));
  }
}

TEST(OracleGradients, EveryBroadcastOfBias) {
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    for (const char* packed : {"packed=0", "packed=1 seqused_k=1"}) {
      std::string bias = "bhqk";
      for (int d = 0; d < 4; ++d) {
        if ((broadcast >> d & 1) != 0) bias[d] = '1';
      }
      expect_gradients(
          parsed("batch=2 seqlen_q=3 seqlen_k=4 num_heads_q=2 head_dim=2 head_dim_v=2 causal=1 bias=" + bias +
                 " " + packed));
    }
  }
}

// Everything that random_case combines, shrunk, in float32.
TEST(OracleGradients, RandomCombinations) {
  std::mt19937_64 random(20260801);
  for (int n = 0; n < 60; ++n) {
    Case c = verify::random_case(random);
    c.dtype = c.o_dtype = c.grad_dtype = c.bias_dtype = c.sinks_dtype = DType::float32;
    c.batch = std::min<std::int64_t>(c.batch, 3);
    c.seqlen_q = c.seqlen_q % 6;
    c.seqlen_k = c.seqlen_k % 7;
    c.head_dim = c.head_dim % 3 + 1;
    c.head_dim_v = c.head_dim_v % 3 + 1;
    c.num_heads_k = 1;
    c.num_heads_q = c.num_heads_q % 2 + 1;
    c.magnitude = 1;
    c.bias_fill = c.bias_fill == verify::BiasFill::lowest ? verify::BiasFill::hidden : c.bias_fill;
    // A shared element has the sum of the gradients: not what is returned for an expanded input.
    for (verify::Layout* layout : {&c.q_layout, &c.k_layout, &c.v_layout, &c.dout_layout, &c.bias_layout}) {
      if (*layout == verify::Layout::expanded) *layout = verify::Layout::dense;
    }
    expect_gradients(c);
  }
}

// ---- The plain version.

double max_error(const std::vector<double>& a, const std::vector<double>& b) {
  double max = 0;
  for (std::size_t i = 0; i < a.size(); ++i) max = std::max(max, std::abs(a[i] - b[i]));
  return max;
}

TEST(OraclePlain, FloatIsCloseAndHalfIsFurther) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    const std::string line =
        "batch=2 seqlen_q=20 seqlen_k=30 num_heads_q=4 num_heads_k=2 causal=1 softcap=5 dtype=";
    Tensors t(parsed(line + dtype + " o_dtype=" + dtype + " grad_dtype=" + dtype));
    const Problem forward = validate(t.forward_call()).or_throw();
    const Problem backward = validate(t.backward_call()).or_throw();
    const auto exact = reference::forward(forward), plain = reference::plain_forward(forward);
    const auto gradients = reference::backward(backward),
               plain_gradients = reference::plain_backward(backward);
    const double unit = t.q.dtype() == DType::float32   ? 0x1p-24
                        : t.q.dtype() == DType::float16 ? 0x1p-11
                                                        : 0x1p-8;
    for (const double error :
         {max_error(exact.o, plain.o), max_error(gradients.dq, plain_gradients.dq),
          max_error(gradients.dk, plain_gradients.dk), max_error(gradients.dv, plain_gradients.dv)}) {
      EXPECT_GT(error, 0.05 * unit) << dtype;
      EXPECT_LT(error, 40 * unit) << dtype;
    }
  }
}

// The largest of some thousand errors lies a few deviations out: neither below one nor far beyond.
TEST(OraclePlain, ErrorsAreDrawnFromTheDeviations) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    for (const char* options :
         {"", "causal=1 alibi=1 sinks=1 bias=bhqk", "softcap=5 dlse=1 dropout_p=0.2 bias=b11k sinks=1"}) {
      const std::string line =
          "batch=3 seqlen_q=60 seqlen_k=70 num_heads_q=8 num_heads_k=8 head_dim=32 head_dim_v=24 ";
      const std::string types = std::string("dtype=") + dtype + " ";
      SCOPED_TRACE(types + options);
      Tensors t(parsed(line + types + options));
      const Problem forward = validate(t.forward_call()).or_throw();
      const Problem backward = validate(t.backward_call()).or_throw();
      const auto exact = reference::forward(forward), plain = reference::plain_forward(forward);
      const auto gradients = reference::backward(backward),
                 plain_gradients = reference::plain_backward(backward);
      const auto deviations = reference::deviations(backward);
      const auto expect_drawn = [](const char* name, double error, double deviation) {
        EXPECT_GT(error, 0.25 * deviation) << name;
        EXPECT_LT(error, 8 * deviation) << name;
      };
      expect_drawn("o", max_error(exact.o, plain.o), deviations.o);
      expect_drawn("dq", max_error(gradients.dq, plain_gradients.dq), deviations.dq);
      expect_drawn("dk", max_error(gradients.dk, plain_gradients.dk), deviations.dk);
      expect_drawn("dv", max_error(gradients.dv, plain_gradients.dv), deviations.dv);
    }
  }
}

TEST(OraclePlain, ResultsAreRoundedToTheirTensorsType) {
  Tensors t(
      parsed("seqlen_q=9 seqlen_k=9 dtype=bfloat16 o_dtype=bfloat16 grad_dtype=bfloat16 bias=11qk sinks=1 "
             "bias_dtype=bfloat16 sinks_dtype=bfloat16"));
  const auto outputs = reference::plain_forward(validate(t.forward_call()).or_throw());
  const auto gradients = reference::plain_backward(validate(t.backward_call()).or_throw());
  for (const auto* values :
       {&outputs.o, &gradients.dq, &gradients.dk, &gradients.dv, &gradients.dbias, &gradients.dsinks}) {
    ASSERT_FALSE(values->empty());
    for (const double x : *values) {
      EXPECT_EQ(x, to_float(from_float<bfloat16>(static_cast<float>(x))));
    }
  }
}

}  // namespace
}  // namespace tessera
