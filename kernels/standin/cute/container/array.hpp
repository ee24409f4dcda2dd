// Stands in for cute::array, in which copy_sm90_desc.hpp takes the new shape of a tensor map.
#pragma once

namespace cute {

template <class T, decltype(sizeof(0)) size>
struct array {
  T values[size];

  constexpr T& operator[](int i) { return values[i]; }
  constexpr const T& operator[](int i) const { return values[i]; }
};

}  // namespace cute
