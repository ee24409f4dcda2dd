// Runs a Case through the public API and holds every output against the oracle (docs/semantics.md, Accuracy).
//
//   const Verdict verdict = judge(c);
//   if (!verdict.ok()) std::cerr << verdict.to_string();  // what, where, by how much, and how to repeat it
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "reference/oracle.h"
#include "verify/case.h"
#include "verify/tensors.h"

namespace tessera::verify {

// One tensor against the oracle. lse is judged element by element, so that error and tolerance are those of
// its worst element.
struct Score {
  std::string tensor;
  double error = 0;        // max over the elements
  double plain_error = 0;  // of the plain computation in the same dtype
  double tolerance = 0;
};

struct Verdict {
  Case settings;
  std::string kernel;  // that ran; empty if none did
  std::vector<Score> scores;
  std::vector<std::string> failures;

  [[nodiscard]] bool ok() const { return failures.empty(); }
  [[nodiscard]] std::string to_string() const;
};

// Holds outputs against the oracle: every element written and close enough. Failures say what, where and by
// how much.
class Comparison {
 public:
  Comparison(std::vector<Score>& scores, std::vector<std::string>& failures)
      : scores_(scores), failures_(failures) {}

  void tensor(const char* name, const Buffer& buffer, const std::vector<double>& exact,
              const std::vector<double>& plain, double deviation);
  void lse(const Buffer& buffer, const std::vector<double>& exact, const std::vector<double>& plain,
           double deviation);
  void fail(std::string what) { failures_.push_back(std::move(what)); }

 private:
  template <class Tolerance>
  void elements(const char* name, const Buffer& buffer, const std::vector<double>& exact, double plain_error,
                Tolerance&& allowed);

  std::vector<Score>& scores_;
  std::vector<std::string>& failures_;
};

// What a case should give: by the oracle, by the plain computation, and how far roundings may lead.
struct Expected {
  reference::Outputs outputs, plain_outputs;
  reference::Gradients gradients, plain_gradients;
  reference::Deviations deviations;
};
[[nodiscard]] Expected expect(const Tensors& tensors);

// Compares what lies in tensors, after a forward or a backward call: every output element written and close
// enough, everything around them and the inputs untouched.
void compare(Tensors& tensors, const Expected& expected, Direction direction, Verdict& verdict);

// The case on that kernel; where it does not take the case's dtypes, layouts or head dims, with others that
// it does take.
[[nodiscard]] Case forced(Case c, const std::string& kernel);

// Runs the call with a poisoned, guarded workspace of exactly the size that it asks for.
[[nodiscard]] Status run(const Tensors& tensors, Direction direction);

[[nodiscard]] Verdict judge(const Case& c);

}  // namespace tessera::verify
