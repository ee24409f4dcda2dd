// Which keys a query sees: the one definition of causal, window and alignment (docs/semantics.md, Mask).
//
// The keys of a row are an interval, its ends never decrease from row to row, and so do those of a tile:
// everything below follows from keys_of_row.
#pragma once

#include "core/host_device.h"

namespace tessera {

template <class Int>
struct BasicRange {
  Int begin = 0, end = 0;

  [[nodiscard]] TESSERA_HD constexpr bool empty() const { return begin >= end; }
  [[nodiscard]] TESSERA_HD constexpr Int size() const { return empty() ? 0 : end - begin; }
  [[nodiscard]] TESSERA_HD constexpr bool contains(Int i) const { return begin <= i && i < end; }
  friend constexpr bool operator==(const BasicRange&, const BasicRange&) = default;
};
using Range = BasicRange<long long>;

// The mask within a tile, whose rows are queries and whose columns are keys: small numbers, for device code.
// Row i sees columns left + i .. right + i - 1, and none from end on.
struct TileMask {
  int left = 0, right = 0, end = 0;

  [[nodiscard]] TESSERA_HD constexpr bool sees(int row, int col) const {
    return left + row <= col && col < right + row && col < end;
  }
  // Whether each of the rows sees each of the columns.
  [[nodiscard]] TESSERA_HD constexpr bool sees_all(int rows, int cols) const {
    return left + rows - 1 <= 0 && right >= cols && end >= cols;
  }
};

template <class Int>
struct BasicMask {
  using Range = BasicRange<Int>;
  // A window side at or beyond this is unbounded. Far enough from the ends of the type to add lengths to it.
  static constexpr Int unbounded = Int(1) << (sizeof(Int) == 8 ? 60 : 29);

  Int seqlen_q = 0, seqlen_k = 0;
  Int left = unbounded, right = unbounded;
  Int shift = 0;  // query i stands at key position i + shift

  [[nodiscard]] TESSERA_HD constexpr Range keys_of_row(Int i) const {
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
  // Of the tile that begins at (query, key); sizes of tiles are below 2^29.
  [[nodiscard]] TESSERA_HD constexpr TileMask tile(Int query, Int key) const {
    return {narrow(query + shift - left - key), narrow(query + shift + right + 1 - key),
            narrow(seqlen_k - key)};
  }

 private:
  // Beyond `far` all numbers mean the same to a tile.
  [[nodiscard]] static TESSERA_HD constexpr int narrow(Int x) {
    if constexpr (sizeof(Int) == sizeof(int)) {
      return x;
    } else {
      constexpr int far = 1 << 29;
      return x < -far ? -far : x > far ? far : static_cast<int>(x);
    }
  }
  [[nodiscard]] static TESSERA_HD constexpr Range clamp(Int begin, Int end, Int size) {
    begin = begin < 0 ? 0 : begin > size ? size : begin;
    end = end > size ? size : end;
    return {begin, end < begin ? begin : end};
  }
};
using Mask = BasicMask<long long>;
// Half the work on a GPU, for lengths below `unbounded`.
using NarrowMask = BasicMask<int>;

}  // namespace tessera
