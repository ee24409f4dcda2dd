// Stands in for CuTe's arithmetic on any type: UniversalFMA names cute::fma, nothing of ours calls it.
#pragma once

#include <cute/config.hpp>

namespace cute {

template <class D, class A, class B, class C>
constexpr void fma(D& d, const A& a, const B& b, const C& c) {
  d = a * b + c;
}

}  // namespace cute
