// SHA-256 (FIPS 180-4): names what is cached by its content.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::cuda {

using Digest = std::array<std::uint8_t, 32>;

class Sha256 {
 public:
  Sha256& add(const void* data, std::size_t size);
  // The text behind its length, so that ("ab", "c") and ("a", "bc") differ.
  Sha256& add_text(std::string_view text);
  [[nodiscard]] Digest finish();

 private:
  void block(const std::uint8_t* bytes);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> pending_{};
  std::uint64_t size_ = 0;  // bytes so far; size_ % 64 of them are pending
};

[[nodiscard]] std::string to_hex(const Digest& digest);

}  // namespace tessera::cuda
