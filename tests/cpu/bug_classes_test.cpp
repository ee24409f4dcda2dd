// The bug classes of the field, by name, and what random_case finds beyond them: every kernel, forward and
// backward, against the oracle.
#include <cstdlib>
#include <iostream>
#include <random>

#include "cpu/kernel_test.h"

namespace tessera::verify {
namespace {

class BugClass : public KernelTest {
 protected:
  // Every fixed case whose name starts so.
  static void expect_right_all(const std::string& prefix) {
    int count = 0;
    for (const auto& [name, c] : fixed_cases()) {
      if (!name.starts_with(prefix)) continue;
      SCOPED_TRACE(name);
      expect_right(c);
      ++count;
    }
    EXPECT_GT(count, 0);
  }
};
TESSERA_FOR_EACH_KERNEL(BugClass);

TEST_P(BugClass, Empty) { expect_right_all("empty_"); }
TEST_P(BugClass, Tiny) { expect_right_all("tiny"); }
TEST_P(BugClass, Rectangular) {
  for (const char* prefix : {"tall_", "wide_", "one_"}) expect_right_all(prefix);
}
TEST_P(BugClass, AwkwardLengths) { expect_right_all("length_"); }
TEST_P(BugClass, HeadDims) { expect_right_all("head_dim_"); }
TEST_P(BugClass, ValueDims) {
  expect_right_all("qkv_192_128");
  expect_right_all("value_");
}
TEST_P(BugClass, Groups) { expect_right_all("group_"); }
TEST_P(BugClass, Magnitude) { expect_right_all("magnitude_"); }
TEST_P(BugClass, Mean) { expect_right_all("mean_"); }
TEST_P(BugClass, Softcap) { expect_right_all("softcap_"); }
TEST_P(BugClass, Bias) { expect_right_all("bias_"); }
TEST_P(BugClass, Poison) { expect_right_all("poison_"); }
TEST_P(BugClass, Strides) { expect_right_all("strides_"); }
TEST_P(BugClass, Windows) { expect_right_all("window_"); }
TEST_P(BugClass, Dropout) { expect_right_all("dropout_"); }
TEST_P(BugClass, PackedBatches) { expect_right_all("packed_"); }
TEST_P(BugClass, Everything) { expect_right_all("everything"); }

// No fixed case that no test runs.
TEST(BugClasses, EveryFixedCaseHasATest) {
  for (const auto& [name, c] : fixed_cases()) {
    bool known = false;
    for (const char* prefix :
         {"empty_",      "tiny",     "tall_",   "wide_",      "one_",    "length_",   "head_dim_",
          "qkv_192_128", "value_",   "group_",  "magnitude_", "mean_",   "softcap_",  "bias_",
          "poison_",     "strides_", "window_", "dropout_",   "packed_", "everything"}) {
      known = known || name.starts_with(prefix);
    }
    EXPECT_TRUE(known) << name;
  }
}

// Key lengths around every tile size, in both alignments of the diagonal.
TEST_P(BugClass, TileEdges) {
  for (const int seqlen : {15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 95, 96, 127, 128, 129}) {
    Case c = parsed("num_heads_q=2 head_dim=17 head_dim_v=18");
    c.seqlen_q = seqlen;
    c.seqlen_k = seqlen + (seqlen % 3) - 1;
    c.causal = seqlen % 2 == 0;
    c.dtype = seqlen % 4 < 2 ? DType::bfloat16 : DType::float32;
    expect_right(c);
  }
}

// Of the large tiles, whose number of queries differs with the head dim.
TEST_P(BugClass, LargeTileEdges) {
  for (const int head_dim : {64, 128, 192, 256}) {
    for (const int seqlen : {191, 193, 255, 257}) {
      Case c = parsed("");
      c.head_dim = c.head_dim_v = head_dim;
      c.seqlen_q = seqlen;
      c.seqlen_k = seqlen + (seqlen % 3) - 1;
      c.causal = seqlen % 4 == 1;
      c.dtype = DType::bfloat16;
      expect_right(c);
    }
  }
}

long from_environment(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtol(text, nullptr, 10);
}

// TESSERA_RANDOM_CASES and TESSERA_RANDOM_SEED search further.
TEST_P(BugClass, RandomCases) {
  const long count = from_environment("TESSERA_RANDOM_CASES", 150);
  const long seed = from_environment("TESSERA_RANDOM_SEED", 20260801);
  std::cout << "seed " << seed << ", " << count << " cases\n";
  std::uint64_t own_seed = static_cast<std::uint64_t>(seed);  // every kernel meets other cases
  for (const char letter : GetParam().name) own_seed = own_seed * 31 + static_cast<unsigned char>(letter);
  std::mt19937_64 random(own_seed);
  for (long i = 0; i < count; ++i) expect_right(random_case(random));
}

}  // namespace
}  // namespace tessera::verify
