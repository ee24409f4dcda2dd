// Cubins on disk, by content hash. Everything that goes wrong here means only that a kernel is compiled
// again: no function fails, and nothing that was read is trusted before its checksum is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "cuda/driver/driver.h"
#include "cuda/driver/file.h"
#include "cuda/driver/sha256.h"

namespace tessera::cuda {

class DiskCache {
 public:
  static constexpr std::uint64_t default_bytes = 256ULL << 20;

  // In a folder of its own below `folder`. An empty path or 0 bytes: no cache.
  DiskCache(const std::filesystem::path& folder, std::uint64_t max_bytes);
  // TESSERA_CACHE_DIR, else XDG_CACHE_HOME/tessera, else HOME/.cache/tessera; TESSERA_CACHE_BYTES.
  [[nodiscard]] static DiskCache of(const std::function<std::string(const char*)>& environment);

  // None: not there, or not to be trusted; then it is gone afterwards. The log is not kept.
  [[nodiscard]] std::optional<Cubin> read(const Digest& key) const;
  // Whole or not at all. Then the entries that were not used for longest go until the rest fits.
  void write(const Digest& key, const Cubin& cubin) const;
  void remove(const Digest& key) const;

  // Held while a key is compiled, so that other processes wait for the result. Not held where that is
  // impossible, or where another process holds it for longer than `patience_seconds`.
  [[nodiscard]] File lock(const Digest& key, double patience_seconds = 120) const;

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] std::filesystem::path path_of(const Digest& key) const;

 private:
  [[nodiscard]] bool prepare() const;  // makes the folder; false: it is not one to write in
  void tidy() const;

  std::filesystem::path folder_;  // empty: no cache
  std::uint64_t max_bytes_;
};

}  // namespace tessera::cuda
