// What the library promises beyond right numbers: repeatable bits, whatever the threads and the rest of the
// batch; the kernel that was asked for; calls from many threads; dropout's statistics; unbiased rounding.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <thread>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "core/philox.h"
#include "cpu/kernel_test.h"

namespace tessera::verify {
namespace {

using Contract = KernelTest;
TESSERA_FOR_EACH_KERNEL(Contract);

std::vector<Case> typical_cases() {
  return {
      parsed("batch=2 seqlen_q=100 seqlen_k=130 num_heads_q=4 num_heads_k=2 head_dim=40 head_dim_v=40 "
             "causal=1 threads=3 "
             "bias=1hqk dbias=1 sinks=1 dsinks=1 dropout_p=0.1 deterministic=1 dlse=1"),
      parsed("packed=1 batch=5 tail=3 seqlen_q=90 seqlen_k=120 num_heads_q=6 num_heads_k=2 head_dim=64 "
             "head_dim_v=32 "
             "dtype=bfloat16 o_dtype=bfloat16 grad_dtype=bfloat16 window_left=40 causal=1 softcap=20 alibi=1 "
             "threads=2 "
             "bias=b11k dbias=1 deterministic=1"),
  };
}

// ---- Determinism.

TEST_P(Contract, FiftyRepeatsGiveTheSameBits) {
  for (const Case& c : typical_cases()) {
    Tensors tensors(forced(c));
    const Snapshot first = run_both(tensors);
    for (int i = 1; i < 50; ++i)
      ASSERT_EQ(run_both(tensors), first) << "repeat " << i << ": " << to_string(tensors.settings);
  }
}

TEST_P(Contract, ThreadsDoNotChangeTheBits) {
  if (on_gpu()) GTEST_SKIP() << "the host has no part in it";
  for (Case c : typical_cases()) {
    c.threads = 1;
    Tensors tensors(forced(c));
    const Snapshot alone = run_both(tensors);
    for (const int threads : {2, 3, 7, 0}) {
      tensors.settings.threads = threads;
      EXPECT_EQ(run_both(tensors), alone) << threads << " threads: " << to_string(tensors.settings);
    }
  }
}

// A forked child has none of its parent's worker threads: it starts its own.
TEST_P(Contract, RunsInAForkedChild) {
  if (on_gpu()) GTEST_SKIP() << "the CUDA driver does not survive a fork";
  Case c = typical_cases()[0];
  c.threads = 3;
  Tensors tensors(forced(c));
  const Snapshot before = run_both(tensors);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(run_both(tensors) == before ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(run_both(tensors), before) << "in the parent, after the fork";
}

// A row's bits do not depend on the rows that share its tile: decoding token by token gives what the whole
// prompt gave.
TEST_P(Contract, ARowAloneHasTheBitsOfTheRowInItsTile) {
  for (const char* option : {"causal=1", "causal=1 window_left=63", "causal=1 window_left=100 alibi=1"}) {
    Tensors whole(
        forced(parsed(std::string("seqlen_q=290 seqlen_k=290 num_heads_q=2 num_heads_k=1 head_dim=48 "
                                  "head_dim_v=48 ") +
                      option)));
    (void)run_both(whole);
    const Forward call = whole.forward_call();
    for (std::int64_t i = 0; i < 290; ++i) {
      const Tensor row_o = slice(call.o, 1, i, 1), row_lse = slice(call.lse, 2, i, 1);
      const Owned o(row_o), lse(row_lse);
      const Forward alone{slice(call.q, 1, i, 1),
                          slice(call.k, 1, 0, i + 1),
                          slice(call.v, 1, 0, i + 1),
                          o.tensor,
                          lse.tensor,
                          call.options,
                          {}};
      const Status status = run_call<Forward>(alone, forward);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_EQ(differences(o.tensor, row_o), 0) << option << ", row " << i;
      ASSERT_EQ(differences(lse.tensor, row_lse), 0) << option << ", row " << i;
    }
  }
}

// The largest weight of a row is 1 before it is rounded. Taken from elsewhere than its maximum it would be
// off by a rounding, and so would o wherever one key has nearly all the weight.
TEST_P(Contract, ARowThatSeesOneKeyIsItsValue) {
  for (const char* type : {"bfloat16", "float16"}) {
    Tensors tensors(
        forced(parsed(std::string("seqlen_q=300 seqlen_k=300 num_heads_q=2 num_heads_k=2 head_dim=64 "
                                  "head_dim_v=64 window_left=0 window_right=0 o_dtype=float32 dtype=") +
                      type)));
    (void)run_both(tensors);
    for (std::int64_t i = 0; i < tensors.o.size(); ++i) {
      const double v = tensors.v.get(i);
      ASSERT_NEAR(tensors.o.get(i), v, 1e-6 * std::abs(v)) << type;
    }
  }
}

// Runs one sequence of a batch by itself and expects the bits that the whole batch gave. part(t, of_k) cuts
// the sequence out of a tensor of tokens, part_lse out of lse.
template <class Part, class PartLse>
void expect_same_alone(const Tensors& whole, Options options, Part&& part, PartLse&& part_lse) {
  const Owned o(part(whole.o.tensor(), false)), lse(part_lse(whole.lse.tensor()));
  const Owned dq(part(whole.dq.tensor(), false)), dk(part(whole.dk.tensor(), true)),
      dv(part(whole.dv.tensor(), true));
  Forward forward_call{part(whole.q.tensor(), false),
                       part(whole.k.tensor(), true),
                       part(whole.v.tensor(), true),
                       o.tensor,
                       lse.tensor,
                       options,
                       {}};
  Backward backward_call = whole.backward_call();
  backward_call.q = forward_call.q;
  backward_call.k = forward_call.k;
  backward_call.v = forward_call.v;
  backward_call.o = o.tensor;
  backward_call.lse = lse.tensor;
  backward_call.dout = part(whole.dout.tensor(), false);
  backward_call.dq = dq.tensor;
  backward_call.dk = dk.tensor;
  backward_call.dv = dv.tensor;
  backward_call.options = options;
  const Status forward_status = run_call<Forward>(forward_call, forward);
  ASSERT_TRUE(forward_status.ok()) << forward_status.message();
  const Status backward_status = run_call<Backward>(backward_call, backward);
  ASSERT_TRUE(backward_status.ok()) << backward_status.message();
  EXPECT_EQ(differences(o.tensor, part(whole.o.tensor(), false)), 0);
  EXPECT_EQ(differences(lse.tensor, part_lse(whole.lse.tensor())), 0);
  EXPECT_EQ(differences(dq.tensor, part(whole.dq.tensor(), false)), 0);
  EXPECT_EQ(differences(dk.tensor, part(whole.dk.tensor(), true)), 0);
  EXPECT_EQ(differences(dv.tensor, part(whole.dv.tensor(), true)), 0);
}

TEST_P(Contract, TheRestOfADenseBatchDoesNotMatter) {
  Case c = parsed(
      "batch=4 seqlen_q=70 seqlen_k=150 num_heads_q=4 num_heads_k=2 head_dim=48 head_dim_v=48 causal=1 "
      "alibi=1 "
      "sinks=1 softcap=15 deterministic=1 threads=2");
  Tensors whole(forced(c));
  (void)run_both(whole);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    SCOPED_TRACE(b);
    Options options = whole.forward_call().options;
    options.num_threads = 1;
    expect_same_alone(
        whole, options, [&](const Tensor& t, bool) { return slice(t, 0, b, 1); },
        [&](const Tensor& t) { return slice(t, 0, b, 1); });
  }
}

TEST_P(Contract, TheRestOfAPackedBatchDoesNotMatter) {
  Case c = parsed(
      "packed=1 batch=7 tail=3 seqlen_q=140 seqlen_k=270 num_heads_q=4 num_heads_k=2 head_dim=32 "
      "head_dim_v=48 "
      "causal=1 alibi=1 sinks=1 deterministic=1 threads=2 seed=1");
  Tensors whole(forced(c));
  (void)run_both(whole);
  const Problem problem = validate(whole.forward_call()).or_throw();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    SCOPED_TRACE(b);
    const Sequence s = problem.sequence(b);
    const std::int32_t cu_q[] = {0, static_cast<std::int32_t>(s.seqlen_q)};
    const std::int32_t cu_k[] = {0, static_cast<std::int32_t>(s.seqlen_k)};
    Options options = whole.forward_call().options;
    options.cu_seqlens_q = Tensor(cu_q, DType::int32, {2});
    options.cu_seqlens_k = Tensor(cu_k, DType::int32, {2});
    expect_same_alone(
        whole, options,
        [&](const Tensor& t, bool of_k) {
          return of_k ? slice(t, 0, s.k_begin, s.seqlen_k) : slice(t, 0, s.q_begin, s.seqlen_q);
        },
        [&](const Tensor& t) { return slice(t, 1, s.q_begin, s.seqlen_q); });
  }
}

// ---- Layout: q, k, v in one buffer, and their gradients in another, as frameworks hold them.

TEST_P(Contract, OneBufferForQkvGivesTheSameBits) {
  const std::int64_t batch = 2, seqlen = 75, heads = 3, dim = 40;
  Tensors apart(forced(
      parsed("batch=2 seqlen_q=75 seqlen_k=75 num_heads_q=3 num_heads_k=3 head_dim=40 head_dim_v=40 causal=1 "
             "deterministic=1")));
  (void)run_both(apart);
  const auto buffer_like = [&](const Tensor& t) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(batch * seqlen * 3 * heads * dim) * t.dtype.bits /
                                 8);
    return bytes;
  };
  std::vector<std::byte> qkv = buffer_like(apart.q.tensor()), dqkv = buffer_like(apart.dq.tensor());
  const auto third = [&](std::vector<std::byte>& bytes, const Tensor& like, std::int64_t which) {
    Tensor t = like;
    t.data = bytes.data() + which * heads * dim * (like.dtype.bits / 8);
    t.stride = {seqlen * 3 * heads * dim, 3 * heads * dim, dim, 1};
    return t;
  };
  Backward call = apart.backward_call();
  call.q = third(qkv, apart.q.tensor(), 0);
  call.k = third(qkv, apart.k.tensor(), 1);
  call.v = third(qkv, apart.v.tensor(), 2);
  copy_elements(apart.q.tensor(), call.q);
  copy_elements(apart.k.tensor(), call.k);
  copy_elements(apart.v.tensor(), call.v);
  call.dq = third(dqkv, apart.dq.tensor(), 0);
  call.dk = third(dqkv, apart.dk.tensor(), 1);
  call.dv = third(dqkv, apart.dv.tensor(), 2);
  const Owned o(apart.o.tensor()), lse(apart.lse.tensor());
  const Status status =
      run_call<Forward>({call.q, call.k, call.v, o.tensor, lse.tensor, call.options, {}}, forward);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(differences(o.tensor, apart.o.tensor()), 0);
  const Status backward_status = run_call<Backward>(call, backward);
  ASSERT_TRUE(backward_status.ok()) << backward_status.message();
  EXPECT_EQ(differences(call.dq, apart.dq.tensor()), 0);
  EXPECT_EQ(differences(call.dk, apart.dk.tensor()), 0);
  EXPECT_EQ(differences(call.dv, apart.dv.tensor()), 0);
}

// ---- Which kernel, and from where.

TEST_P(Contract, TheForcedKernelRuns) {
  const Case c = forced(parsed("seqlen_q=20 seqlen_k=20"));
  Tensors tensors(c);
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    ASSERT_TRUE(run(tensors, direction).ok());
    EXPECT_EQ(last_kernel(), GetParam().name);
  }
  EXPECT_EQ(explain(as_planned(tensors.forward_call())).or_throw().kernel, GetParam().name);
  EXPECT_EQ(explain(as_planned(tensors.backward_call())).or_throw().kernel, GetParam().name);
  EXPECT_TRUE(prepare(as_planned(tensors.forward_call())).ok());
  EXPECT_TRUE(prepare(as_planned(tensors.backward_call())).ok());
}

TEST_P(Contract, ConcurrentCallsDoNotMeet) {
  constexpr int callers = 4;
  std::vector<Tensors> tensors;
  std::vector<Snapshot> alone;
  for (int i = 0; i < callers; ++i) {
    Case c = typical_cases()[i % 2];
    c.seed = i;
    c.threads = i % 2 + 1;
    tensors.emplace_back(forced(c));
    alone.push_back(run_both(tensors.back()));
  }
  std::vector<std::thread> threads;
  threads.reserve(callers);
  std::vector<int> wrong(callers, 0);
  std::vector<std::string> names(callers);
  for (int i = 0; i < callers; ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 10; ++repeat) wrong[i] += run_both(tensors[i]) == alone[i] ? 0 : 1;
      names[i] = last_kernel();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < callers; ++i) {
    EXPECT_EQ(wrong[i], 0) << i;
    EXPECT_EQ(names[i], GetParam().name) << i;
  }
}

TEST(Dispatch, LastKernelBelongsToTheThread) {
  Tensors tensors(parsed("seqlen_q=3 seqlen_k=3"));
  ASSERT_TRUE(run(tensors, Direction::forward).ok());
  EXPECT_EQ(last_kernel(), explain(tensors.forward_call()).or_throw().kernel);
  std::string elsewhere = "unset";
  std::thread([&] { elsewhere = last_kernel(); }).join();
  EXPECT_EQ(elsewhere, "");
}

TEST(Dispatch, TakesTheFirstKernelThatFits) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    Tensors tensors(parsed(std::string("seqlen_q=3 seqlen_k=3 dtype=") + dtype + " o_dtype=" + dtype));
    std::string first;
    for (const KernelInfo& info : kernels()) {
      if (!first.empty() || !info.available) continue;
      Forward call = tensors.forward_call();
      call.options.kernel = info.name;
      if (workspace_size(call).ok()) first = info.name;
    }
    ASSERT_FALSE(first.empty());
    ASSERT_TRUE(run(tensors, Direction::forward).ok());
    EXPECT_EQ(last_kernel(), first) << dtype;
  }
}

// ---- Dropout.

// With q = 0 and v = 1, o counts the kept keys.
TEST_P(Contract, DropoutKeepsExactlyWhatPhiloxSays) {
  for (const double p : {0.001, 0.1, 0.5, 1.0}) {
    Case c = parsed(
        "batch=2 num_heads_q=3 num_heads_k=1 seqlen_q=60 seqlen_k=256 head_dim=8 head_dim_v=8 seed=77 "
        "offset=5");
    c.dropout_p = p;
    Tensors tensors(forced(c));
    for (std::int64_t i = 0; i < tensors.q.size(); ++i) tensors.q.set(i, 0);
    for (std::int64_t i = 0; i < tensors.v.size(); ++i) tensors.v.set(i, 1);
    for (std::int64_t i = 0; i < tensors.dout.size(); ++i) tensors.dout.set(i, i % 8 == 0 ? 1 : 0);
    (void)run_both(tensors);
    const Dropout dropout = Dropout::make(p, 77, 5);
    const double scale = dropout.threshold == 0 ? 0 : 65536.0 / dropout.threshold;
    const double unit = tensors.settings.dtype == DType::float32 ? 1e-5 : 1e-2;
    std::int64_t all_kept = 0;
    std::vector<double> dv(2 * 256);
    for (unsigned b = 0; b < 2; ++b) {
      for (unsigned i = 0; i < 60; ++i) {
        for (unsigned h = 0; h < 3; ++h) {
          int kept = 0;
          for (unsigned j = 0; j < 256; ++j) {
            if (!dropout.keeps(b * 3 + h, i, j)) continue;
            ++kept;
            dv[b * 256 + j] += scale / 256;
          }
          all_kept += kept;
          ASSERT_NEAR(tensors.o.get(((b * 60 + i) * 3 + h) * 8), kept * scale / 256, unit);
        }
      }
    }
    // Backward drops the same elements: dv's first column sums the kept probabilities of each key.
    for (std::int64_t j = 0; j < 512; ++j) ASSERT_NEAR(tensors.dv.get(j * 8), dv[j], 2 * unit) << p;
    const double count = 2 * 3 * 60 * 256, keep = dropout.threshold / 65536.0;
    EXPECT_NEAR(static_cast<double>(all_kept) / count, keep, 5 * std::sqrt(keep * (1 - keep) / count));
  }
}

// ---- Rounding.

// Probabilities that are rounded to the input type must not drift to one side: with v = 1 every output is 1,
// and the mean error stays far below one rounding.
TEST_P(Contract, RoundingIsUnbiased) {
  for (const char* dtype : {"bfloat16", "float16"}) {
    Case c = forced(parsed(
        std::string("batch=2 num_heads_q=4 num_heads_k=4 seqlen_q=100 seqlen_k=200 head_dim=32 head_dim_v=8 "
                    "magnitude=2 dtype=") +
        dtype));
    c.o_dtype = DType::float32;
    Tensors tensors(c);
    for (std::int64_t i = 0; i < tensors.v.size(); ++i) tensors.v.set(i, 1);
    ASSERT_TRUE(run(tensors, Direction::forward).ok());
    double sum = 0;
    for (std::int64_t i = 0; i < tensors.o.size(); ++i) sum += tensors.o.get(i) - 1;
    const double unit = c.dtype == DType::bfloat16 ? 0x1p-8 : 0x1p-11;
    EXPECT_LT(std::abs(sum / static_cast<double>(tensors.o.size())), 0.02 * unit) << dtype;
  }
}

// Conversions keep what has no ordinary value: an overflow is infinity, NaN stays NaN and stays where it
// belongs.
TEST_P(Contract, InfinityAndNaNSurviveTheHalfTypes) {
  for (const char* dtype : {"bfloat16", "float16"}) {
    const std::string types = std::string("dtype=") + dtype + " o_dtype=" + dtype + " grad_dtype=" + dtype;
    Tensors tensors(forced(parsed("seqlen_q=4 head_dim=24 head_dim_v=24 " + types)));
    const double large = tensors.settings.dtype == DType::float16 ? 60000.0 : 3e38;
    for (std::int64_t i = 0; i < tensors.dout.size(); ++i) tensors.dout.set(i, large);
    for (std::int64_t i = 0; i < tensors.v.size(); ++i) tensors.v.set(i, 0);
    tensors.v.set(5, std::nan(""));
    tensors.v.set(6, -INFINITY);
    (void)run_both(tensors);
    for (std::int64_t c = 0; c < 24; ++c) EXPECT_EQ(tensors.dv.get(c), INFINITY) << types << " " << c;
    for (std::int64_t i = 0; i < tensors.o.size(); ++i) {
      const double o = tensors.o.get(i);
      if (i % 24 == 5) {
        EXPECT_TRUE(std::isnan(o)) << types << " " << i << ": " << o;
      } else {
        EXPECT_EQ(o, i % 24 == 6 ? -INFINITY : 0.0) << types << " " << i;
      }
    }
  }
}

// ---- The ends of the number range.

void expect_forward_right(const Case& c) {
  Tensors tensors(c);
  const Expected expected = expect(tensors);
  ASSERT_TRUE(run(tensors, Direction::forward).ok());
  Verdict verdict;
  verdict.settings = c;
  compare(tensors, expected, Direction::forward, verdict);
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
}

// Scores so large that rounding one of them by half a unit moves its exponential by hundreds of powers of
// two.
TEST_P(Contract, HugeScoresPickTheirMaximum) {
  for (const char* magnitude : {"10000", "30000", "100000"}) {
    expect_forward_right(forced(
        parsed(std::string("seqlen_q=64 seqlen_k=64 head_dim=4 head_dim_v=4 magnitude=") + magnitude)));
  }
}

// A NaN whose payload is not zero must not become a number on its way through the exponential.
TEST_P(Contract, AnyNaNStaysNaN) {
  for (const std::uint32_t bits : {0x7FC00001u, 0xFFFFFFFFu, 0x7FC00000u}) {
    Tensors tensors(forced(parsed("seqlen_q=3 seqlen_k=5 head_dim=4 head_dim_v=4")));
    std::memcpy(static_cast<float*>(tensors.k.tensor().data) + 9, &bits, sizeof(bits));
    (void)run_both(tensors);
    for (std::int64_t i = 0; i < tensors.o.size(); ++i)
      EXPECT_TRUE(std::isnan(tensors.o.get(i))) << std::hex << bits;
    for (std::int64_t i = 0; i < tensors.lse.size(); ++i)
      EXPECT_TRUE(std::isnan(tensors.lse.get(i))) << std::hex << bits;
  }
}

// The same in backward, where p and ds may be rounded to bfloat16 on their way.
TEST_P(Contract, AnyNaNReachesTheGradients) {
  const std::uint32_t bits = 0xFFFFFFFFu;
  const auto expect_nan = [](const Buffer& buffer, const std::string& what) {
    for (std::int64_t i = 0; i < buffer.size(); ++i)
      EXPECT_TRUE(std::isnan(buffer.get(i))) << what << ' ' << i;
  };
  for (const std::string option : {"dlse=1", "alibi=1", "bias=bhqk bias_dtype=float32"}) {
    Tensors tensors(forced(parsed("seqlen_q=1 seqlen_k=5 head_dim=4 head_dim_v=4 " + option)));
    Buffer& poisoned = option == "dlse=1"    ? tensors.dlse
                       : option == "alibi=1" ? tensors.alibi_slopes
                                             : tensors.bias;
    std::memcpy(poisoned.tensor().data, &bits, sizeof(bits));
    (void)run_both(tensors);
    expect_nan(tensors.dq, option + ", dq");
    expect_nan(tensors.dk, option + ", dk");
  }
}

#if defined(__x86_64__)
// A kernel flushes denormals for its own use only.
TEST_P(Contract, LeavesTheFloatingPointModeAlone) {
  if (on_gpu()) GTEST_SKIP() << "the host has no part in it";
  const unsigned before = _mm_getcsr() & ~0x3Fu;  // without the sticky flags
  Tensors tensors(forced(parsed("seqlen_q=65 seqlen_k=130 head_dim=16 head_dim_v=16")));
  (void)run_both(tensors);
  EXPECT_EQ(_mm_getcsr() & ~0x3Fu, before);
}
#endif

// Nothing depends on a row that sees no key: not even on a NaN in its dlse, which autograd makes of lse =
// -inf.
TEST_P(Contract, DlseOfAnEmptyRowIsIgnored) {
  Tensors tensors(forced(parsed("seqlen_q=3 seqlen_k=1 head_dim=8 head_dim_v=8 causal=1 dlse=1")));
  tensors.dlse.set(0, std::nan(""));
  tensors.dlse.set(1, std::nan(""));
  (void)run_both(tensors);
  for (std::int64_t i = 0; i < tensors.dq.size(); ++i) EXPECT_TRUE(std::isfinite(tensors.dq.get(i))) << i;
  for (std::int64_t i = 0; i < tensors.dk.size(); ++i) EXPECT_TRUE(std::isfinite(tensors.dk.get(i))) << i;
}

// The lowest float is a customary mask. Where it hides everything it hides nothing: the row is a plain mean.
TEST_P(Contract, TheLowestBiasIsFinite) {
  Tensors tensors(forced(parsed("seqlen_q=2 seqlen_k=4 head_dim=8 head_dim_v=8 bias=bhqk softmax_scale=0")));
  for (std::int64_t i = 0; i < tensors.bias.size(); ++i) tensors.bias.set(i, -3.4028234663852886e38);
  (void)run_both(tensors);
  for (std::int64_t c = 0; c < 8; ++c) {
    double mean = 0;
    for (std::int64_t j = 0; j < 4; ++j) mean += tensors.v.get(j * 8 + c) / 4;
    EXPECT_NEAR(tensors.o.get(c), mean, tensors.settings.dtype == DType::float32 ? 1e-5 : 1e-2) << c;
  }
}

}  // namespace
}  // namespace tessera::verify
