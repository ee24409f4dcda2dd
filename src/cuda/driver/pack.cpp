#include "cuda/driver/pack.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <type_traits>

#include "cuda/driver/library.h"

namespace tessera::cuda {
namespace {

constexpr std::array<char, 8> magic = {'T', 'S', 'R', 'P', 'A', 'C', 'K', '1'};
constexpr std::uint64_t most_entries = 1 << 20;
constexpr std::uint32_t largest_image = 1U << 28;
constexpr int compression_level = 19;

struct Header {
  std::array<char, 8> magic;
  std::uint64_t entries;
  std::array<char, 16> compiler;
  Digest checksum;  // of the above and the index
};
static_assert(sizeof(Header) == 64 && std::is_trivially_copyable_v<Header>);
static_assert(sizeof(PackIndexEntry) == 64 && std::is_trivially_copyable_v<PackIndexEntry>);

Digest checksum_of(const Header& header, const std::vector<PackIndexEntry>& index) {
  return Sha256()
      .add(&header, offsetof(Header, checksum))
      .add(index.data(), index.size() * sizeof(PackIndexEntry))
      .finish();
}

bool fits(const PackIndexEntry& entry, std::uint64_t file_bytes) {
  return entry.image_bytes <= largest_image && entry.offset <= file_bytes &&
         entry.packed_bytes <= file_bytes - entry.offset;
}

Result<std::vector<std::byte>> compressed(const std::vector<std::byte>& image) {
  std::vector<std::byte> frame(ZSTD_compressBound(image.size()));
  ZSTD_CCtx* context = ZSTD_createCCtx();
  if (context == nullptr) return Status(Code::internal, "zstd: no memory");
  ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, compression_level);
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);  // so that a damaged frame does not pass
  const std::size_t size = ZSTD_compress2(context, frame.data(), frame.size(), image.data(), image.size());
  ZSTD_freeCCtx(context);
  if (ZSTD_isError(size) != 0U)
    return Status(Code::internal, std::string("zstd: ") + ZSTD_getErrorName(size));
  frame.resize(size);
  return frame;
}

}  // namespace

std::filesystem::path Pack::default_path() {
  if (const std::string given = environment("TESSERA_PACK"); !given.empty()) return given;
  Dl_info info{};
  static const char here = 0;
  if (dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path() / "tessera.pack";
}

Pack::Pack(const std::filesystem::path& path) {
  File file(path, O_RDONLY | O_NONBLOCK);
  struct stat status {};
  Header header{};
  if (!file.is_open() || ::fstat(file.fd(), &status) != 0 || !S_ISREG(status.st_mode)) return;
  if (!file.read_at(&header, sizeof(header), 0) || header.magic != magic || header.entries > most_entries)
    return;
  std::vector<PackIndexEntry> index(header.entries);
  if (!file.read_at(index.data(), index.size() * sizeof(PackIndexEntry), sizeof(header)) ||
      checksum_of(header, index) != header.checksum)
    return;
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  if (!std::all_of(index.begin(), index.end(),
                   [&](const PackIndexEntry& entry) { return fits(entry, bytes); }))
    return;
  file_ = std::move(file);
  index_ = std::move(index);
  compiler_.assign(header.compiler.data(), ::strnlen(header.compiler.data(), header.compiler.size()));
}

std::optional<Cubin> Pack::find(const Digest& key) const {
  const auto entry = std::lower_bound(index_.begin(), index_.end(), key,
                                      [](const PackIndexEntry& a, const Digest& b) { return a.key < b; });
  if (entry == index_.end() || entry->key != key) return {};
  // Read, not mapped: the file may be replaced or cut while the process runs.
  std::vector<std::byte> frame(entry->packed_bytes);
  if (!file_.read_at(frame.data(), frame.size(), entry->offset)) return {};
  Cubin cubin;
  cubin.image.resize(entry->image_bytes);
  if (ZSTD_decompress(cubin.image.data(), cubin.image.size(), frame.data(), frame.size()) !=
      cubin.image.size())
    return {};
  cubin.resources = {entry->registers, entry->spill_bytes, entry->stack_bytes, entry->shared_bytes};
  return cubin;
}

Status write_pack(const std::filesystem::path& path, const std::vector<PackedCubin>& cubins,
                  std::string_view compiler) {
  std::map<Digest, const Cubin*> sorted;
  for (const PackedCubin& packed : cubins) sorted.emplace(packed.key, &packed.cubin);

  std::vector<PackIndexEntry> index;
  std::vector<std::byte> frames;
  const std::size_t frames_at = sizeof(Header) + sorted.size() * sizeof(PackIndexEntry);
  for (const auto& [key, cubin] : sorted) {
    const Result<std::vector<std::byte>> frame = compressed(cubin->image);
    if (!frame.ok()) return frame.status();
    const Resources& r = cubin->resources;
    index.push_back({key, frames_at + frames.size(), static_cast<std::uint32_t>(frame.value().size()),
                     static_cast<std::uint32_t>(cubin->image.size()), r.registers, r.spill_bytes,
                     r.stack_bytes, r.shared_bytes});
    frames.insert(frames.end(), frame.value().begin(), frame.value().end());
  }
  Header header{magic, index.size(), {}, {}};
  compiler.copy(header.compiler.data(), header.compiler.size());
  header.checksum = checksum_of(header, index);

  const std::filesystem::path temporary = path.string() + ".new";
  const auto failed = [&] {
    const std::string reason =
        std::strerror(errno);  // NOLINT(concurrency-mt-unsafe): of a tool with one thread
    ::unlink(temporary.c_str());
    return Status(Code::internal, path.string() + ": cannot be written: " + reason);
  };
  File file(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (!file.is_open()) return failed();
  if (!file.write(&header, sizeof(header)) ||
      !file.write(index.data(), index.size() * sizeof(PackIndexEntry)) ||
      !file.write(frames.data(), frames.size()) || !file.close())
    return failed();
  if (::rename(temporary.c_str(), path.c_str()) != 0) return failed();
  return {};
}

}  // namespace tessera::cuda
