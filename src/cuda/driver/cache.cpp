#include "cuda/driver/cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr const char* folder_name = "cubins-1";  // the format's version: another one is another folder
constexpr std::string_view entry_suffix = ".cubin";
constexpr std::string_view temporary_prefix = "new-";
constexpr std::array<char, 8> magic = {'T', 'S', 'R', 'C', 'U', 'B', 'N', '1'};
constexpr std::uint64_t largest_image = 1ULL << 28;

struct Header {
  std::array<char, 8> magic;
  Digest key;
  std::uint64_t image_bytes;
  std::int32_t registers, spill_bytes, stack_bytes, shared_bytes;
  Digest checksum;  // of everything else
};
static_assert(sizeof(Header) == 96 && std::is_trivially_copyable_v<Header>);

Digest checksum_of(const Header& header, const std::vector<std::byte>& image) {
  return Sha256().add(&header, offsetof(Header, checksum)).add(image.data(), image.size()).finish();
}

// Ours, and only we could have written it.
bool is_private(const struct stat& status) {
  return status.st_uid == geteuid() && (status.st_mode & 022) == 0;
}

bool make_folders(const fs::path& folder) {
  if (folder.empty()) return false;
  struct stat status {};
  if (::stat(folder.c_str(), &status) == 0) return S_ISDIR(status.st_mode);
  if (folder.has_parent_path() && folder != folder.parent_path() && !make_folders(folder.parent_path()))
    return false;
  return ::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST;
}

std::optional<Cubin> read_entry(const fs::path& path, const Digest& key) {
  const File file(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat status {};
  if (!file.is_open() || ::fstat(file.fd(), &status) != 0) return {};
  if (!S_ISREG(status.st_mode) || !is_private(status)) return {};
  Header header{};
  if (!file.read_at(&header, sizeof(header), 0)) return {};
  if (header.magic != magic || header.key != key || header.image_bytes > largest_image ||
      static_cast<std::uint64_t>(status.st_size) != sizeof(header) + header.image_bytes)
    return {};
  Cubin cubin;
  cubin.image.resize(header.image_bytes);
  if (!file.read_at(cubin.image.data(), cubin.image.size(), sizeof(header))) return {};
  if (checksum_of(header, cubin.image) != header.checksum) return {};
  cubin.resources = {header.registers, header.spill_bytes, header.stack_bytes, header.shared_bytes};
  ::futimens(file.fd(), nullptr);  // used just now; reading alone need not leave a trace (noatime)
  return cubin;
}

}  // namespace

DiskCache::DiskCache(const fs::path& folder, std::uint64_t max_bytes)
    : folder_(folder.empty() || max_bytes == 0 ? fs::path() : folder / folder_name), max_bytes_(max_bytes) {}

DiskCache DiskCache::of(const std::function<std::string(const char*)>& environment) {
  std::uint64_t bytes = default_bytes;
  const std::string given = environment("TESSERA_CACHE_BYTES");
  std::uint64_t number = 0;
  if (const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), number);
      error == std::errc() && end == given.data() + given.size())
    bytes = number;
  if (const std::string folder = environment("TESSERA_CACHE_DIR"); !folder.empty()) return {folder, bytes};
  if (const std::string folder = environment("XDG_CACHE_HOME"); !folder.empty())
    return {fs::path(folder) / "tessera", bytes};
  if (const std::string home = environment("HOME"); !home.empty())
    return {fs::path(home) / ".cache" / "tessera", bytes};
  return {{}, 0};
}

fs::path DiskCache::path_of(const Digest& key) const {
  return folder_ / (to_hex(key) + std::string(entry_suffix));
}

std::optional<Cubin> DiskCache::read(const Digest& key) const {
  if (folder_.empty()) return {};
  std::optional<Cubin> cubin = read_entry(path_of(key), key);
  if (!cubin) remove(key);
  return cubin;
}

void DiskCache::remove(const Digest& key) const {
  if (!folder_.empty()) ::unlink(path_of(key).c_str());
}

bool DiskCache::prepare() const {
  struct stat status {};
  return make_folders(folder_) && ::lstat(folder_.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
         is_private(status);
}

void DiskCache::write(const Digest& key, const Cubin& cubin) const {
  if (sizeof(Header) + cubin.image.size() > max_bytes_ || cubin.image.size() > largest_image || !prepare())
    return;
  Header header{magic,
                key,
                cubin.image.size(),
                cubin.resources.registers,
                cubin.resources.spill_bytes,
                cubin.resources.stack_bytes,
                cubin.resources.shared_bytes,
                {}};
  header.checksum = checksum_of(header, cubin.image);

  static std::atomic<unsigned> count{0};
  const fs::path temporary = folder_ / (std::string(temporary_prefix) + std::to_string(::getpid()) + "-" +
                                        std::to_string(count.fetch_add(1)));
  ::unlink(temporary.c_str());  // of a process that had our number and died
  File file(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
  if (!file.is_open()) return;
  const bool written =
      file.write(&header, sizeof(header)) && file.write(cubin.image.data(), cubin.image.size());
  const bool closed = file.close();
  if (!written || !closed || ::rename(temporary.c_str(), path_of(key).c_str()) != 0) {
    ::unlink(temporary.c_str());
    return;
  }
  tidy();
}

void DiskCache::tidy() const {
  struct Entry {
    fs::path path;
    std::uint64_t bytes;
    timespec used;
  };
  std::vector<Entry> entries;
  std::uint64_t total = 0;
  const std::time_t an_hour_ago = ::time(nullptr) - 3600;
  std::error_code error;
  for (fs::directory_iterator i(folder_, error), end; !error && i != end; i.increment(error)) {
    struct stat status {};
    if (::lstat(i->path().c_str(), &status) != 0) continue;
    const std::string name = i->path().filename().string();
    if (name.starts_with(temporary_prefix)) {
      // Nobody writes for an hour: its process died.
      if (status.st_mtim.tv_sec < an_hour_ago) ::unlink(i->path().c_str());
    } else if (name.ends_with(entry_suffix)) {
      entries.push_back({i->path(), static_cast<std::uint64_t>(status.st_size), status.st_mtim});
      total += static_cast<std::uint64_t>(status.st_size);
    }
  }
  if (total <= max_bytes_) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.used.tv_sec != b.used.tv_sec ? a.used.tv_sec < b.used.tv_sec : a.used.tv_nsec < b.used.tv_nsec;
  });
  for (const Entry& entry : entries) {
    if (total <= max_bytes_) return;
    ::unlink(entry.path.c_str());
    total -= entry.bytes;
  }
}

File DiskCache::lock(const Digest& key, double patience_seconds) const {
  if (folder_.empty() || !prepare()) return {};
  // One of 256 files that stay: to remove a lock while others may be opening it is a race of its own.
  File file(folder_ / ("lock-" + to_hex(key).substr(0, 2)), O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
  if (!file.is_open()) return {};
  const auto begin = std::chrono::steady_clock::now();
  // Not a blocking flock: a stopped process, or a network file system, may hold it for ever.
  while (::flock(file.fd(), LOCK_EX | LOCK_NB) != 0) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if ((errno != EWOULDBLOCK && errno != EINTR) || waited.count() > patience_seconds) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return file;
}

}  // namespace tessera::cuda
