// Dropout's random numbers: Philox4x32-7 (Salmon et al., SC 2011), one block for 8 neighbouring keys.
//
// The block is a function of (seed, offset, batch, query head, query, key) alone, so every backend, tile
// size and split drops the same elements. An element takes 16 of the block's 128 bits.
#pragma once

#include "core/host_device.h"

namespace tessera {

struct Philox {
  static constexpr int rounds = 7;
  static constexpr unsigned mul0 = 0xD2511F53u, mul1 = 0xCD9E8D57u;
  static constexpr unsigned weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
  static constexpr int keys_per_block = 8;
  static constexpr unsigned long long max_offset = (1ULL << 36) - 1;

  struct Block {
    unsigned word[4];
  };

  [[nodiscard]] static TESSERA_HD constexpr Block generate(Block counter, unsigned key0, unsigned key1) {
    for (int r = 0; r < rounds; ++r) {
      const unsigned a = counter.word[0], b = counter.word[2];
      counter = {{multiply_high(mul1, b) ^ counter.word[1] ^ key0, mul1 * b,
                  multiply_high(mul0, a) ^ counter.word[3] ^ key1, mul0 * a}};
      key0 += weyl0;
      key1 += weyl1;
    }
    return counter;
  }
};

struct Dropout {
  unsigned long long seed = 0, offset = 0;
  unsigned threshold = 65536;  // keep where 16 random bits are below; 65536 keeps all
  float scale = 1.0f;          // 1 / the realised keep probability; 0 where nothing is kept

  // threshold and scale from p, the probability to drop: the realised one is a multiple of 2^-16.
  [[nodiscard]] static constexpr Dropout make(double p, unsigned long long seed, unsigned long long offset) {
    // Not lround: device code has no <cmath>, and the operand is never negative.
    const auto threshold =
        static_cast<unsigned>((1.0 - p) * 65536.0 + 0.5);  // NOLINT(bugprone-incorrect-roundings)
    return {seed, offset, threshold, threshold == 0 ? 0.0f : static_cast<float>(65536.0 / threshold)};
  }
  [[nodiscard]] TESSERA_HD constexpr bool active() const { return threshold < 65536; }

  // The counter of the block that holds keys 8 * key_block .. 8 * key_block + 7. head_index is
  // batch index * num_heads_q + query head.
  [[nodiscard]] TESSERA_HD constexpr Philox::Block counter(unsigned head_index, unsigned query,
                                                           unsigned key_block) const {
    return {{key_block | static_cast<unsigned>(offset >> 32) << 28, query, head_index,
             static_cast<unsigned>(offset)}};
  }
  [[nodiscard]] TESSERA_HD constexpr unsigned bits(unsigned head_index, unsigned query, unsigned key) const {
    const Philox::Block block =
        Philox::generate(counter(head_index, query, key / Philox::keys_per_block),
                         static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32));
    const unsigned element = key % Philox::keys_per_block;
    return block.word[element / 2] >> (16 * (element % 2)) & 0xFFFFu;
  }
  // Which of the keys 8 * key_block .. 8 * key_block + 7 are kept, one bit each.
  [[nodiscard]] TESSERA_HD constexpr unsigned keep_mask(unsigned head_index, unsigned query,
                                                        unsigned key_block) const {
    const Philox::Block block =
        Philox::generate(counter(head_index, query, key_block), static_cast<unsigned>(seed),
                         static_cast<unsigned>(seed >> 32));
    unsigned mask = 0;
    for (int i = Philox::keys_per_block - 1; i >= 0; --i) {
      const unsigned bits = block.word[i / 2] >> (16 * (i % 2)) & 0xFFFFu;
      mask = mask << 1 | (bits - threshold) >> 31;  // whether the difference is below 0
    }
    return mask;
  }
  [[nodiscard]] TESSERA_HD constexpr bool keeps(unsigned head_index, unsigned query, unsigned key) const {
    return bits(head_index, query, key) < threshold;
  }
};

}  // namespace tessera
