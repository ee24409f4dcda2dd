// The pack: cubins made ahead, one zstd frame each in one file beside the library.
//
//   "TSRPACK1" · number of entries · compiler · checksum | index, sorted by key | frames
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "cuda/driver/driver.h"
#include "cuda/driver/file.h"
#include "cuda/driver/sha256.h"

namespace tessera::cuda {

// Where one cubin is.
struct PackIndexEntry {
  Digest key;
  std::uint64_t offset;  // of its frame in the file
  std::uint32_t packed_bytes, image_bytes;
  std::int32_t registers, spill_bytes, stack_bytes, shared_bytes;
};

class Pack {
 public:
  Pack() = default;  // an empty one
  // Empty, too, where the file is absent or damaged.
  explicit Pack(const std::filesystem::path& path);
  // TESSERA_PACK, else tessera.pack beside the library.
  [[nodiscard]] static std::filesystem::path default_path();

  [[nodiscard]] std::optional<Cubin> find(const Digest& key) const;  // none: not in it, or damaged
  [[nodiscard]] std::size_t size() const { return index_.size(); }
  [[nodiscard]] const std::string& compiler() const {
    return compiler_;
  }  // the version of NVRTC that made it

 private:
  File file_;
  std::vector<PackIndexEntry> index_;
  std::string compiler_;
};

struct PackedCubin {
  Digest key;
  Cubin cubin;
};
// Replaces the file at once or not at all. Equal keys are kept once.
[[nodiscard]] Status write_pack(const std::filesystem::path& path, const std::vector<PackedCubin>& cubins,
                                std::string_view compiler);

}  // namespace tessera::cuda
