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
  // Of the tile that begins at (query, key); sizes of tiles are below 2^29.
  [[nodiscard]] TESSERA_HD constexpr TileMask tile(long long query, long long key) const {
    return {narrow(query + shift - left - key), narrow(query + shift + right + 1 - key),
            narrow(seqlen_k - key)};
  }

 private:
  // Beyond `far` all numbers mean the same to a tile.
  [[nodiscard]] static TESSERA_HD constexpr int narrow(long long x) {
    constexpr int far = 1 << 29;
    return x < -far ? -far : x > far ? far : static_cast<int>(x);
  }
  [[nodiscard]] static TESSERA_HD constexpr Range clamp(long long begin, long long end, long long size) {
    begin = begin < 0 ? 0 : begin > size ? size : begin;
    end = end > size ? size : end;
    return {begin, end < begin ? begin : end};
  }
};

}  // namespace tessera
