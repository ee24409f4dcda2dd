// Decode against the oracle: pages of every size, append at every boundary, all options, and the contract:
// the same bits whatever the batch, the threads and the pages.
#include <cmath>
#include <cstring>
#include <random>

#include "cpu/decode_kernel_test.h"
#include "cpu/features.h"

namespace tessera::verify {
namespace {

// o and lse, from poisoned outputs.
Snapshot outputs(DecodeTensors& tensors) {
  tensors.o.poison();
  tensors.lse.poison();
  const Status status = run(tensors);
  EXPECT_TRUE(status.ok()) << status.message();
  return {tensors.o.bytes(), tensors.lse.bytes()};
}

using Pages = DecodeTest;
using DecodeOptions = DecodeTest;
using DecodeContract = DecodeTest;
TESSERA_FOR_EACH_KERNEL(Pages);
TESSERA_FOR_EACH_KERNEL(DecodeOptions);
TESSERA_FOR_EACH_KERNEL(DecodeContract);

constexpr std::int64_t page_sizes[] = {0, 1, 2, 3, 16, 19, 64, 256};

std::string text_of(const char* name, std::int64_t value) {
  return std::string(name) + "=" + std::to_string(value) + " ";
}

// ---- Where the keys lie.

TEST_P(Pages, EverySizeWithPartialAndUnusedPages) {
  for (const std::int64_t page : page_sizes) {
    for (const bool head_major : {false, true}) {
      for (const std::int64_t seqlen_q : {1, 2, 16, 129}) {
        if (seqlen_q == 129 && head_major == (page < 16)) continue;  // for the sake of time
        DecodeCase c;
        c.cache_seqlens = {300, 0, 1, 257, 64};
        c.num_heads_q = 4;
        c.num_heads_k = 2;
        c.page_size = page;
        c.head_major = head_major;
        c.seqlen_q = seqlen_q;
        c.causal = head_major;
        c.dtype = c.o_dtype = page % 2 == 0 ? DType::bfloat16 : DType::float32;
        expect_right(c, text_of("page", page) + text_of("seqlen_q", seqlen_q) + text_of("heads", head_major));
      }
    }
  }
}

TEST_P(Pages, AppendAtEveryBoundary) {
  for (const std::int64_t page : page_sizes) {
    for (const std::int64_t count : {1, 5}) {
      DecodeCase c;
      c.cache_seqlens.clear();
      const int around = page == 0 ? 16 : static_cast<int>(page);
      for (int length = std::max(0, around - 4); length <= around + 2; ++length)
        c.cache_seqlens.push_back(length);
      c.cache_seqlens.push_back(2 * around - 1);
      c.seqlen_new = count;
      c.seqlen_q = count;
      c.causal = true;
      c.page_size = page;
      c.num_heads_q = 4;
      c.num_heads_k = 2;
      c.head_dim = 40;
      c.head_dim_v = 24;
      c.dtype = c.o_dtype = DType::float16;
      expect_right(c, text_of("page", page) + text_of("new", count));
      c.room = 0;  // the last key has the last slot
      expect_right(c, text_of("page", page) + text_of("new", count) + "and no room behind them");
    }
  }
}

TEST_P(Pages, EmptyCaches) {
  for (const std::int64_t page : {0, 3}) {
    for (const bool sinks : {false, true}) {
      DecodeCase c;
      c.cache_seqlens = {0, 0};
      c.page_size = page;
      c.sinks = sinks;
      expect_right(c, "empty");
      c.room = 0;
      expect_right(c, "no room at all");
      c.room = 5;
      c.seqlen_new = 1;
      expect_right(c, "the first key");
      c.seqlen_q = 0;
      expect_right(c, "no queries");
    }
  }
  DecodeCase c;
  c.cache_seqlens = {};
  Buffer lengths(Buffer::Role::input, DType::int32, Tensor(nullptr, DType::int32, {0}), 0);
  DecodeTensors tensors(forced(c));
  tensors.cache_seqlens = std::move(lengths);
  EXPECT_TRUE(run(tensors).ok()) << "a batch of 0";
}

TEST_P(Pages, BatchIndicesAndLeftPadding) {
  DecodeCase c;
  c.cache_seqlens = {90, 3, 140, 70};
  c.batch_idx = {5, 1, 0, 3};
  c.num_heads_q = 4;
  expect_right(c, "indices");
  c.leftpad = {10, 3, 129, 0};
  expect_right(c, "indices and padding");
  c.causal = true;
  c.seqlen_q = c.seqlen_new = 3;
  c.rotary_dim = 32;
  expect_right(c, "and an append with rotary");
  c.batch_idx.clear();
  c.alibi = true;
  expect_right(c, "padding");
}

// All begin with the last's pages, or have one row of the cache, and what is appended there all of them see.
TEST_P(Pages, SharedPagesAndRowsWithAnAppend) {
  DecodeCase c;
  c.cache_seqlens = {40, 49, 90};  // the first appends to slots 40 and 41, of the last page that is shared
  c.num_heads_q = 4;
  c.num_heads_k = 2;
  c.page_size = 16;
  c.seqlen_q = c.seqlen_new = 2;
  c.causal = true;
  DecodeTensors paged(forced(c));
  const std::int64_t columns = paged.page_table.tensor().shape[1];
  for (const std::int64_t b : {0, 1}) {
    for (std::int64_t i = 0; i < 3; ++i)
      paged.page_table.set(b * columns + i, paged.page_table.get(2 * columns + i));
  }
  paged.page_table.freeze();
  EXPECT_EQ(judge(paged), "");

  c.page_size = 0;
  c.cache_seqlens = {20, 70, 50};
  c.batch_idx = {1, 0, 1};  // the first's new keys are the last's slots 20 and 21
  expect_right(c, "a row");
}

TEST_P(Pages, DuplicateBatchIndicesRead) {
  DecodeCase c;
  c.cache_seqlens = {90, 90, 90, 50};
  c.batch_idx = {1, 1, 0, 1};
  expect_right(c, "the same row of the cache");
}

// ---- Options.

TEST_P(DecodeOptions, Rotary) {
  for (const bool interleaved : {false, true}) {
    for (const std::int64_t rotary_dim : {2, 24, 64}) {
      for (const int mask : {0, 1, 2}) {
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
          for (const std::int64_t seqlen_q : {1, 3, 20}) {
            DecodeCase c;
            c.cache_seqlens = {37, 0, 130};
            c.seqlen_q = seqlen_q;
            c.seqlen_new = mask == 2 ? 2 : seqlen_q;
            c.page_size = rotary_dim == 24 ? 16 : 0;
            c.causal = mask == 1;
            if (mask == 2) c.window_left = 30;
            c.rotary_dim = rotary_dim;
            c.interleaved = interleaved;
            c.dtype = c.o_dtype = dtype;
            c.seed = static_cast<std::uint64_t>(rotary_dim / 2 + mask);
            expect_right(c, text_of("interleaved", interleaved) + text_of("rotary_dim", rotary_dim) +
                                text_of("mask", mask) + text_of("seqlen_q", seqlen_q));
          }
        }
      }
    }
  }
}

// Many heads side by side in one task: none may touch another's state.
TEST_P(DecodeOptions, ManyHeads) {
  for (const std::int64_t group : {1, 4, 8}) {
    for (const bool sinks : {false, true}) {
      DecodeCase c;
      c.cache_seqlens.assign(12, 90);
      c.num_heads_k = 64 / group;
      c.num_heads_q = 64;
      c.head_dim = c.head_dim_v = 128;
      c.dtype = c.o_dtype = DType::bfloat16;
      c.magnitude = 30;  // rows whose largest score is far below 0 are among them
      c.sinks = sinks;
      c.threads = 1;
      expect_right(c, text_of("group", group) + text_of("sinks", sinks));
    }
  }
}

// Every kind of score, and keys that end anywhere in a block. The last has scores that are subtracted before
// they are scaled.
std::vector<DecodeCase> cases_of_group(std::int64_t group, std::int64_t num_heads_k, std::int64_t other_dim) {
  std::vector<DecodeCase> cases;
  for (int option = 0; option < 7; ++option) {
    DecodeCase c;
    c.cache_seqlens = {1, 33, 64, 95, 600};
    c.num_heads_k = num_heads_k;
    c.num_heads_q = num_heads_k * group;
    c.head_dim = option % 2 == 0 ? 128 : other_dim;
    c.head_dim_v = option % 3 == 0 ? 128 : other_dim + 16;
    c.page_size = option % 2 == 0 ? 16 : 19;
    c.dtype = c.o_dtype = DType::bfloat16;
    c.softcap = option == 1 ? 5 : 0;
    c.alibi = option == 2;
    if (option == 3) c.window_left = 70;
    c.sinks = option == 4;
    if (option == 5) {
      c.causal = true;
      c.seqlen_q = 2;
    }
    if (option == 6) c.magnitude = 100;
    cases.push_back(c);
  }
  return cases;
}

// From one row of a key head to more than a tile's.
TEST_P(DecodeOptions, GroupsOfEverySize) {
  for (const std::int64_t group : {1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17}) {
    for (const DecodeCase& c : cases_of_group(group, 2, 72)) expect_right(c, text_of("group", group));
  }
}

// So many key heads that a row of the cache is some KiB, and numbers of them, and head dims, that fill no
// vector; all of them in one task, and in several.
TEST_P(DecodeOptions, LongRows) {
  for (const std::int64_t group : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const std::int64_t num_heads_k = group <= 4 ? 15 : 8;
    for (const int threads : {1, 2}) {
      for (DecodeCase c : cases_of_group(group, num_heads_k, group <= 4 ? 71 + group : 130 + group)) {
        c.cache_seqlens = threads == 1 ? std::vector<std::int32_t>{95, 1, 64, 161} : std::vector{33, 90};
        c.threads = threads;
        expect_right(c, text_of("group", group) + text_of("threads", threads));
      }
    }
  }
}

// CPUs differ in how lines are asked for, how many keys go in step, and from how long a row on heads are
// taken together: what others do is tried on this one.
class WayOfCpu {
 public:
  explicit WayOfCpu(cpu::Prefetches way) : own_(cpu::set_prefetches(way)) {}
  WayOfCpu(const WayOfCpu&) = delete;
  WayOfCpu& operator=(const WayOfCpu&) = delete;
  ~WayOfCpu() { cpu::set_prefetches(own_); }

 private:
  cpu::Prefetches own_;
};
std::vector<cpu::Prefetches> ways_of_other_cpus() {
  std::vector<cpu::Prefetches> ways = {cpu::Prefetches::ask_once, cpu::Prefetches::ask_again,
                                       cpu::Prefetches::ask_often};
  std::erase(ways, cpu::prefetches());
  return ways;
}

TEST_P(DecodeOptions, WaysOfOtherCpus) {
  if (on_gpu()) GTEST_SKIP() << "not a CPU's";
  for (const cpu::Prefetches way : ways_of_other_cpus()) {
    const WayOfCpu set(way);
    for (const std::int64_t group : {1, 2, 3, 4, 5, 8, 16}) {
      for (const std::int64_t num_heads_k : {1, 2, 7, 16}) {
        if (num_heads_k * group > 64) continue;
        const std::vector<DecodeCase> cases =
            cases_of_group(group, num_heads_k, num_heads_k == 16 ? 64 : 152);
        for (std::size_t i = static_cast<std::size_t>((group + num_heads_k) % 3); i < cases.size(); i += 3) {
          DecodeCase c = cases[i];
          c.cache_seqlens = {1, 77, 161};
          expect_right(c, text_of("way", static_cast<int>(way)) + text_of("group", group) +
                              text_of("heads", num_heads_k));
        }
      }
    }
  }
}

DecodeCase random_case_of_long_rows(std::uint64_t seed) {
  DecodeCase c = random_decode_case(seed);
  const std::int64_t heads[] = {8, 16, 33, 64}, group = 1 + static_cast<std::int64_t>(seed % 8);
  c.num_heads_k = heads[seed / 8 % 4];
  c.num_heads_q = c.num_heads_k * std::min(group, 64 / c.num_heads_k);
  const std::int64_t least = 1024 / c.num_heads_k;  // of numbers, 2 KiB
  c.head_dim = std::max(c.head_dim, least);
  c.head_dim_v = std::max(c.head_dim_v, least);
  c.dtype = DType::bfloat16;
  c.num_splits = static_cast<std::int64_t>(seed % 3);
  for (std::int32_t& length : c.cache_seqlens) length = length % 300;
  for (std::size_t b = 0; b < c.leftpad.size(); ++b)
    c.leftpad[b] = std::min(c.leftpad[b], c.cache_seqlens[b]);
  c.seqlen_q = std::min<std::int64_t>(c.seqlen_q, 3);
  c.rotary_dim = std::min<std::int64_t>(c.rotary_dim, 16);
  c.threads = seed % 2 == 0 ? 1 : 2;
  return c;
}
TEST_P(DecodeOptions, RandomLongRows1) { expect_right_part(0, 96, random_case_of_long_rows); }
TEST_P(DecodeOptions, RandomLongRows2) { expect_right_part(1, 96, random_case_of_long_rows); }
TEST_P(DecodeOptions, RandomLongRows3) { expect_right_part(2, 96, random_case_of_long_rows); }
TEST_P(DecodeOptions, RandomLongRows4) { expect_right_part(3, 96, random_case_of_long_rows); }

void random_cases(std::uint64_t part) { DecodeTest::expect_right_part(part, 120, random_decode_case); }
TEST_P(DecodeOptions, RandomCases1) { random_cases(0); }
TEST_P(DecodeOptions, RandomCases2) { random_cases(1); }
TEST_P(DecodeOptions, RandomCases3) { random_cases(2); }
TEST_P(DecodeOptions, RandomCases4) { random_cases(3); }

TEST_P(DecodeOptions, AnyNumberOfSplits) {
  for (const std::int64_t splits : {0, 1, 2, 3, 7, 128, 65536}) {
    for (const std::int64_t seqlen_q : {1, 10}) {
      DecodeCase c;
      c.cache_seqlens = {2000, 0, 129, 1};
      c.num_heads_q = 4;
      c.num_heads_k = 2;
      c.head_dim = c.head_dim_v = 32;
      c.seqlen_q = seqlen_q;
      c.causal = true;
      c.sinks = true;
      c.num_splits = splits;
      expect_right(c, text_of("splits", splits) + text_of("seqlen_q", seqlen_q));
      c.window_left = 100;  // most splits see nothing
      expect_right(c, text_of("window, splits", splits) + text_of("seqlen_q", seqlen_q));
    }
  }
}

// A new request in the place of sequence b, on its pages in another order.
void start_anew(DecodeTensors& tensors, std::int64_t b) {
  tensors.settings.cache_seqlens[static_cast<std::size_t>(b)] = 0;
  if (tensors.settings.page_size == 0) return;
  const std::int64_t columns = tensors.page_table.tensor().shape[1];
  std::int64_t used = 0;
  while (used < columns && tensors.page_table.get(b * columns + used) >= 0) ++used;
  for (std::int64_t i = 0; i < used / 2; ++i) {
    const std::int64_t left = b * columns + i, right = b * columns + used - 1 - i;
    const double page = tensors.page_table.get(left);
    tensors.page_table.set(left, tensors.page_table.get(right));
    tensors.page_table.set(right, page);
  }
  tensors.page_table.freeze();
}

// Token by token and in larger steps, sequences that come and go, on one cache: each step is judged
// against the oracle on all that was appended until then.
void expect_right_steps(DecodeCase c, const std::string& what) {
  c.cache_seqlens = {0, 17, 5};
  c.num_heads_q = 4;
  c.num_heads_k = 2;
  c.room = 90;
  c.rotary_dim = 16;
  c.seqlen_new = 1;
  c = DecodeTest::forced(c);
  std::mt19937_64 random(c.seed);
  DecodeTensors tensors(c);
  for (int step = 0; step < 12; ++step) {
    // A step's tensors, over the cache of all steps.
    DecodeCase now = tensors.settings;
    now.seqlen_q = now.seqlen_new = static_cast<std::int64_t>(random() % 7) + 1;
    now.seed = static_cast<std::uint64_t>(step) + 2;
    DecodeTensors next(now);
    next.k_cache = std::move(tensors.k_cache);
    next.v_cache = std::move(tensors.v_cache);
    if (c.page_size > 0) next.page_table = std::move(tensors.page_table);
    ASSERT_EQ(judge(next), "") << what << text_of("step", step);
    for (std::int32_t& length : next.settings.cache_seqlens)
      length += static_cast<std::int32_t>(now.seqlen_new);
    if (step == 6) start_anew(next, 1);
    tensors = std::move(next);
    tensors.set_lengths();
  }
}

TEST_P(DecodeOptions, SequencesOfSteps) {
  for (const std::int64_t page : {0, 1, 3, 16}) {
    for (const int variant : {0, 1, 2}) {
      DecodeCase c;
      c.page_size = page;
      c.causal = variant != 1;
      if (variant == 1) c.window_left = 9;
      if (variant == 1 && page == 0) c.batch_idx = {4, 0, 2};
      if (variant == 2) c.cache_dtype = page == 3 ? DType::int8 : DType::float8_e4m3fn;
      if (variant == 2) c.cache_scale = 0.03;
      c.seed = static_cast<std::uint64_t>(7 + variant);
      expect_right_steps(c, text_of("page", page) + text_of("variant", variant));
    }
  }
}

// ---- The contract.

DecodeCase typical() {
  DecodeCase c;
  c.cache_seqlens = {700, 1300, 64, 0, 513};
  c.num_heads_q = 8;
  c.num_heads_k = 2;
  c.causal = true;
  c.seqlen_q = 2;
  return c;
}

// A row of its cache is 256 bytes for each key head.
DecodeCase of_rows(std::int64_t group, std::int64_t num_heads_k) {
  DecodeCase c = typical();
  c.num_heads_q = group * num_heads_k;
  c.num_heads_k = num_heads_k;
  c.seqlen_q = 1;
  c.head_dim = c.head_dim_v = 128;
  c.dtype = c.o_dtype = DType::bfloat16;
  return c;
}

void expect_the_same_bits(const DecodeCase& c, int repeats) {
  DecodeTensors tensors(DecodeTest::forced(c));
  const Snapshot first = outputs(tensors);
  for (const int threads : {1, 2, 3, 7, 0}) {
    tensors.settings.threads = threads;
    for (int i = 0; i < repeats; ++i) EXPECT_EQ(outputs(tensors), first) << threads << " threads";
  }
}

TEST_P(DecodeContract, RepeatsAndThreadsGiveTheSameBits) {
  // Threads take some of the heads each, and numbers of them that fill no vector.
  for (const DecodeCase& c :
       {typical(), of_rows(1, 15), of_rows(2, 9), of_rows(3, 15), of_rows(5, 8), of_rows(8, 8)})
    expect_the_same_bits(c, 5);
}

TEST_P(DecodeContract, ThreadsGiveTheSameBitsInTheWaysOfOtherCpus) {
  if (on_gpu()) GTEST_SKIP() << "not a CPU's";
  for (const cpu::Prefetches way : ways_of_other_cpus()) {
    const WayOfCpu set(way);
    for (const DecodeCase& c : {of_rows(1, 15), of_rows(4, 1), of_rows(8, 2)}) expect_the_same_bits(c, 1);
  }
}

DecodeCase one_sequence_of(std::int64_t group, std::int64_t num_heads_k) {
  DecodeCase c;
  c.cache_seqlens = {100};
  c.num_heads_k = num_heads_k;
  c.num_heads_q = num_heads_k * group;
  c.head_dim = c.head_dim_v = 128;
  c.dtype = c.o_dtype = DType::bfloat16;
  return c;
}

// Values that are no numbers reach their own column of their own head's rows, and no other.
TEST_P(DecodeContract, InfinityAndNaNStayInTheirColumns) {
  for (const std::int64_t group : {1, 4, 8, 16}) {
    for (const std::int64_t num_heads_k : {2, 8}) {
      const DecodeCase c = one_sequence_of(group, num_heads_k);
      DecodeTensors tensors(forced(c));
      const std::int64_t row = tensors.row_of(0, 5) * c.num_heads_k * c.head_dim_v;
      tensors.v_cache.set(row + 6, -INFINITY);
      tensors.v_cache.set(row + 9, std::nan(""));
      ASSERT_TRUE(run(tensors).ok());
      for (std::int64_t i = 0; i < tensors.o.size(); ++i) {
        const std::int64_t column = i / c.head_dim_v < group ? i % c.head_dim_v : 0;
        const double o = tensors.o.get(i);
        EXPECT_TRUE(column == 9   ? std::isnan(o)
                    : column == 6 ? o == -INFINITY
                                  : std::isfinite(o))
            << text_of("group", group) << text_of("heads", num_heads_k) << i << ": " << o;
      }
    }
  }
}

TEST_P(DecodeContract, AQueryThatIsNoNumberStaysInItsRow) {
  for (const std::int64_t group : {1, 2, 4, 7, 8, 13}) {
    for (const std::int64_t num_heads_k : {2, 8}) {
      const DecodeCase c = one_sequence_of(group, num_heads_k);
      DecodeTensors tensors(forced(c));
      const std::int64_t row = group - 1;
      tensors.q.set(row * c.head_dim + 3, std::nan(""));
      ASSERT_TRUE(run(tensors).ok());
      for (std::int64_t i = 0; i < tensors.o.size(); ++i) {
        const double o = tensors.o.get(i);
        EXPECT_TRUE(i / c.head_dim_v == row ? std::isnan(o) : std::isfinite(o))
            << text_of("group", group) << text_of("heads", num_heads_k) << i << ": " << o;
      }
    }
  }
}

// Those of sequence b to another cache, of the same head dims, that has this sequence alone.
void copy_keys(const DecodeTensors& from, std::int64_t b, DecodeTensors& to) {
  const DecodeCase& c = from.settings;
  const std::int64_t row = c.num_heads_k * c.head_dim;
  const auto copy_row = [&](const Buffer& cache, std::int64_t place, const Buffer& other,
                            std::int64_t there) {
    std::memcpy(element_of(other.tensor(), there * row), element_of(cache.tensor(), place * row),
                static_cast<std::size_t>(row * size_of(cache.dtype())));
  };
  for (std::int64_t s = 0; s < c.cache_seqlens[static_cast<std::size_t>(b)]; ++s) {
    copy_row(from.k_cache, from.row_of(b, s), to.k_cache, to.row_of(0, s));
    copy_row(from.v_cache, from.row_of(b, s), to.v_cache, to.row_of(0, s));
  }
}

// Whatever else is in the batch, however its pages lie, and whatever room the cache has.
TEST_P(DecodeContract, ASequenceHasItsBitsInAnyBatch) {
  for (DecodeCase c : {typical(), of_rows(2, 8)}) {
    for (const std::int64_t seqlen_q : {1, 2, 40}) {
      if (seqlen_q == 40 && c.dtype == DType::bfloat16) continue;  // for the sake of time
      for (const std::int64_t splits : {0, 3}) {
        c.seqlen_q = seqlen_q;
        c.num_splits = splits;
        DecodeTensors whole(forced(c));
        (void)outputs(whole);
        for (std::int64_t b = 0; b < whole.batch(); ++b) {
          for (const std::int64_t page : {0, 1, 3, 64}) {
            DecodeCase one = whole.settings;
            one.cache_seqlens = {c.cache_seqlens[b]};
            one.page_size = page;
            one.room = 100 * page;
            DecodeTensors alone(one);
            copy_keys(whole, b, alone);
            copy_elements(slice(whole.q.tensor(), 0, b, 1), alone.q.tensor());
            (void)outputs(alone);
            EXPECT_EQ(differences(alone.o.tensor(), slice(whole.o.tensor(), 0, b, 1)), 0)
                << "sequence " << b << " " << text_of("page", page) << text_of("seqlen_q", seqlen_q);
            EXPECT_EQ(differences(alone.lse.tensor(), slice(whole.lse.tensor(), 0, b, 1)), 0)
                << "sequence " << b;
          }
        }
      }
    }
  }
}

// A prompt takes forward's way and the single tokens beside it stream, with tasks of as many key heads as
// their own rows allow.
TEST_P(DecodeContract, PromptsAndSingleTokensInOneBatch) {
  for (const std::int64_t group : {1, 2, 3, 5, 8}) {
    for (const std::int64_t head_dim : {20, 128}) {
      DecodeCase c;
      c.cache_seqlens = {1, 163, 63, 130, 0};
      c.lengths_q = {1, 1, 17, 1, 0};
      c.num_heads_k = 3;
      c.num_heads_q = 3 * group;
      c.head_dim = head_dim;
      c.head_dim_v = head_dim == 20 ? 72 : 128;
      c.causal = true;
      c.dtype = c.o_dtype = DType::bfloat16;
      expect_right(c, text_of("group", group) + text_of("head_dim", head_dim));
      DecodeTensors tensors(forced(c));
      const Snapshot first = outputs(tensors);
      for (const int threads : {1, 3}) {
        tensors.settings.threads = threads;
        EXPECT_EQ(outputs(tensors), first) << text_of("threads", threads) << text_of("group", group);
      }
    }
  }
}

// Prompts beside a sequence change the tiles it is in, and no bit of it.
TEST_P(DecodeContract, ASequenceOfAPackedBatchHasItsBitsAlone) {
  for (const std::int64_t head_dim : {64, 128, 256}) {
    for (const std::int64_t group : {1, 4}) {
      for (const bool narrow : {false, true}) {
        if (head_dim != 128 && (narrow || group == 1)) continue;  // for the sake of time
        DecodeCase c;
        c.cache_seqlens = {600, 200, 300, 33, 9, 1100};
        c.lengths_q = {1, 70, 3, 1, 0, 2};
        c.num_heads_k = 2;
        c.num_heads_q = 2 * group;
        c.head_dim = c.head_dim_v = head_dim;
        c.causal = true;
        c.dtype = c.o_dtype = DType::bfloat16;
        if (narrow) c.cache_dtype = DType::int8;
        if (narrow) c.cache_scale = 0.03;
        DecodeTensors whole(forced(c));
        (void)outputs(whole);
        std::int64_t first = 0;
        for (std::size_t b = 0; b < c.lengths_q.size(); first += c.lengths_q[b++]) {
          for (const bool packed : {false, true}) {
            DecodeCase one = whole.settings;
            one.cache_seqlens = {c.cache_seqlens[b]};
            one.seqlen_q = c.lengths_q[b];
            one.lengths_q.clear();
            if (packed) one.lengths_q = {c.lengths_q[b]};
            DecodeTensors alone(one);
            const auto index = static_cast<std::int64_t>(b);
            copy_keys(whole, index, alone);
            const std::int64_t rows = c.lengths_q[b];
            copy_elements(slice(whole.q.tensor(), 0, first, rows), alone.q.tensor());
            (void)outputs(alone);
            const std::string what = text_of("head_dim", head_dim) + text_of("group", group) +
                                     text_of("sequence", index) + text_of("packed", packed) +
                                     text_of("narrow", narrow);
            EXPECT_EQ(differences(alone.o.tensor(), slice(whole.o.tensor(), 0, first, rows)), 0) << what;
            EXPECT_EQ(differences(alone.lse.tensor(), slice(whole.lse.tensor(), 1, first, rows)), 0) << what;
          }
        }
      }
    }
  }
}

// The workspace is a matter of shapes: a server may take it once.
TEST_P(DecodeContract, TheWorkspaceDoesNotDependOnTheLengths) {
  DecodeTensors tensors(forced(typical()));
  const std::size_t before = workspace_size(as_planned(tensors.call())).or_throw();
  for (std::int32_t& length : tensors.settings.cache_seqlens) length /= 2;
  tensors.set_lengths();
  EXPECT_EQ(workspace_size(as_planned(tensors.call())).or_throw(), before);
  Decode shorter = tensors.call();
  shorter.options.max_seqlen_k = 700;
  EXPECT_LE(workspace_size(as_planned(shorter)).or_throw(), before);
}

TEST_P(DecodeContract, ExplainCountsTheKeysInUse) {
  if (on_gpu()) GTEST_SKIP() << "the host does not read a GPU's lengths";
  const DecodeTensors tensors(forced(typical()));
  const Explanation explanation = explain(tensors.call()).or_throw();
  EXPECT_EQ(explanation.kernel, GetParam().name);
  EXPECT_EQ(explanation.dense_flops, 2.0 * (64 + 64) * 8 * 2 * (700 + 1300 + 64 + 513));
}

}  // namespace
}  // namespace tessera::verify
