// Which keys a query sees: the one definition of causal, window and alignment (docs/semantics.md, Mask).
//
// The keys of a row are an interval, its ends never decrease from row to row, and so do those of a tile:
// everything below follows from keys_of_row.
#pragma once

#include "core/host_device.h"

namespace tessera {

struct Range {
  long long begin = 0, end = 0;

  [[nodiscard]] TESSERA_HD constexpr bool empty() const { return begin >= end; }
  [[nodiscard]] TESSERA_HD constexpr long long size() const { return empty() ? 0 : end - begin; }
  [[nodiscard]] TESSERA_HD constexpr bool contains(long long i) const { return begin <= i && i < end; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

struct Mask {
  // A window side at or beyond this is unbounded. Far enough from the ends of the type to add lengths to it.
  static constexpr long long unbounded = 1LL << 60;

  long long seqlen_q = 0, seqlen_k = 0;
  long long left = unbounded, right = unbounded;
  long long shift = 0;  // query i stands at key position i + shift

  [[nodiscard]] TESSERA_HD constexpr Range keys_of_row(long long i) const {
    return clamp(i + shift - left, i + shift + right + 1, seqlen_k);
  }
  // The keys that some row of rows sees, and the keys that each of them sees.
  [[nodiscard]] TESSERA_HD constexpr Range keys_of_any(Range rows) const {
    if (rows.empty()) return {};
    return clamp(rows.begin + shift - left, rows.end - 1 + shift + right + 1, seqlen_k);
  }
  [[nodiscard]] TESSERA_HD constexpr Range keys_of_all(Range rows) const {
    if (rows.empty()) return {};
    return clamp(rows.end - 1 + shift - left, rows.begin + shift + right + 1, seqlen_k);
  }
  // The rows that see some key of keys.
  [[nodiscard]] TESSERA_HD constexpr Range rows_of_any(Range keys) const {
    if (keys.empty()) return {};
    return clamp(keys.begin - shift - right, keys.end - 1 - shift + left + 1, seqlen_q);
  }

 private:
  [[nodiscard]] static TESSERA_HD constexpr Range clamp(long long begin, long long end, long long size) {
    begin = begin < 0 ? 0 : begin > size ? size : begin;
    end = end > size ? size : end;
    return {begin, end < begin ? begin : end};
  }
};

}  // namespace tessera
