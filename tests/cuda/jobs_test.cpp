// tessera-pack's children: every job is answered, whatever its process does.
#include "cli/pack/jobs.h"

#include <csignal>

#include "scratch.h"

namespace tessera::cli {
namespace {

cuda::Cubin cubin_of(std::size_t i) {
  cuda::Cubin cubin;
  cubin.image.resize(100'000 * i, static_cast<std::byte>(i));  // more than a pipe holds
  cubin.log = "log " + std::to_string(i);
  cubin.resources.registers = static_cast<int>(i);
  return cubin;
}

TEST(Jobs, EachIsAnsweredOnceAndWhole) {
  for (const int jobs : {1, 3, 50}) {
    std::map<std::size_t, int> answers;
    run_jobs(
        10, jobs, [](std::size_t i) -> Result<cuda::Cubin> { return cubin_of(i); },
        [&](std::size_t i, const Outcome& outcome) {
          ++answers[i];
          EXPECT_EQ(outcome.error, "");
          EXPECT_EQ(outcome.cubin.image, cubin_of(i).image);
          EXPECT_EQ(outcome.cubin.log, cubin_of(i).log);
          EXPECT_EQ(outcome.cubin.resources.registers, static_cast<int>(i));
        });
    EXPECT_EQ(answers.size(), 10U);
    for (const auto& [i, count] : answers) EXPECT_EQ(count, 1) << i;
  }
}

TEST(Jobs, ACrashOrAnErrorIsThatOfOneJob) {
  std::map<std::size_t, std::string> errors;
  run_jobs(
      5, 2,
      [](std::size_t i) -> Result<cuda::Cubin> {
        if (i == 1) std::raise(SIGKILL);
        if (i == 2) ::_exit(0);
        if (i == 3) return Status(Code::internal, "does not compile");
        return cubin_of(i);
      },
      [&](std::size_t i, const Outcome& outcome) { errors[i] = outcome.error; });
  EXPECT_EQ(errors, (std::map<std::size_t, std::string>{{0, ""},
                                                        {1, "the compiler crashed: Killed"},
                                                        {2, "the compiler's process ended early"},
                                                        {3, "does not compile"},
                                                        {4, ""}}));
}

}  // namespace
}  // namespace tessera::cli
