#include "cuda/driver/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace tessera::cuda {

File::File(const std::filesystem::path& path, int flags, unsigned mode) {
  do {
    fd_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd_ < 0 && errno == EINTR);
}

File::~File() {
  if (is_open()) ::close(fd_);
}

bool File::close() { return ::close(std::exchange(fd_, -1)) == 0; }

bool File::read_at(void* data, std::size_t size, std::size_t offset) const {
  auto* bytes = static_cast<std::byte*>(data);
  while (size != 0) {
    const ssize_t got = ::pread(fd_, bytes, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    bytes += got;
    offset += static_cast<std::size_t>(got);
    size -= static_cast<std::size_t>(got);
  }
  return true;
}

bool File::write(const void* data, std::size_t size) const {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (size != 0) {
    const ssize_t put = ::write(fd_, bytes, size);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    bytes += put;
    size -= static_cast<std::size_t>(put);
  }
  return true;
}

}  // namespace tessera::cuda
