// Stands in for CuTe's complex numbers (cuda::std::complex, 200 headers of CCCL). The complex MMA atoms name
// the type in their signatures; no kernel of ours calls one.
#pragma once

#include <cute/config.hpp>

namespace cute {

template <class T>
struct complex {
  T re = 0, im = 0;

  constexpr complex(T real = 0, T imag = 0) : re(real), im(imag) {}
  constexpr T real() const { return re; }
  constexpr T imag() const { return im; }
};
template <class T>
constexpr complex<T> operator*(complex<T> a, complex<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T>
constexpr complex<T> operator+(complex<T> a, complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}

}  // namespace cute
