// softcap * tanh(softmax_scale * s / softcap) for the exponential: s times a polynomial of s^2, in powers of
// two.
//
// It is tanh to 2e-6 of itself while softmax_scale * s <= 0.32 softcap, and falls without bound below -0.32
// softcap, where tanh does not. That does not show if the row has a score of 0 or more: then such a key's p
// is off by less than 1e-8 of the largest, for softcap >= 30; from 40 on, if it has one of -2 or more. -inf
// stays -inf.
#pragma once

#include "core/host_device.h"

namespace tessera {

struct CapInExponent {
  static constexpr float up_to = 0.32f;
  bool possible = false;
  float inner = 0.0f;    // softmax_scale / softcap
  float least = 0.0f;    // that a row's largest score may be, in powers of two
  float highest = 0.0f;  // what it makes of the largest score that it is for; it rises with the score
  // times * s * ((s^2 + a)^2 + b): as many instructions as by Horner's rule, which read fewer registers.
  float a = 0.0f, b = 0.0f, times = 0.0f;

  CapInExponent() = default;
  CapInExponent(float scale, float softcap) : inner(scale / softcap) {
    constexpr float c0 = 0.9999983f, c1 = -0.33303372f, c2 = 0.12541972f, log2_e = 1.44269504f;
    // The coefficients are powers of inner.
    possible = softcap >= 30.0f && inner > 1e-6f && inner < 1e3f;
    if (!possible) return;
    const float square = inner * inner;
    a = 0.5f * c1 / c2 / square;
    b = c0 / c2 / square / square - a * a;
    times = c2 * scale * log2_e * square * square;
    least = softcap >= 40.0f ? -2.0f * log2_e : 0.0f;
    highest = (*this)(up_to / inner, 0.0f);
  }

  // The exponent, less `from`.
  [[nodiscard]] TESSERA_HD float operator()(float s, float from) const {
    const float x = s * s + a;
    return s * (x * x + b) * times - from;
  }
};

}  // namespace tessera
