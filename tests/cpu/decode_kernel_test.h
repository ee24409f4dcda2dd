// What the tests of decode share: a case on each kernel, and random ones.
#pragma once

#include <functional>
#include <string>

#include "cpu/kernel_test.h"
#include "verify/decode.h"

namespace tessera::verify {

class DecodeTest : public KernelTest {
 public:
  // The case on this kernel, in a dtype of q that it takes.
  static DecodeCase forced(DecodeCase c) {
    c.kernel = GetParam().name;
    if (!workspace_size(as_planned(DecodeTensors(c).call())).ok()) c.dtype = c.o_dtype = DType::bfloat16;
    return c;
  }
  static void expect_right(const DecodeCase& c, const std::string& what) {
    EXPECT_EQ(judge(forced(c)), "") << what;
  }
  // One part of the cases with seeds 1 to `cases`: tests are dealt out to processes, and each compiles.
  static constexpr std::uint64_t parts = 4;
  static void expect_right_part(std::uint64_t part, std::uint64_t cases,
                                const std::function<DecodeCase(std::uint64_t seed)>& draw) {
    for (std::uint64_t seed = 1 + part; seed <= cases; seed += parts)
      expect_right(draw(seed), "seed " + std::to_string(seed));
  }
};

}  // namespace tessera::verify
