// A file descriptor that closes itself, and whole reads and writes.
#pragma once

#include <cstddef>
#include <filesystem>
#include <utility>

namespace tessera::cuda {

class File {
 public:
  File() = default;
  // Flags and mode of open(2); never inherited by a program that the process starts.
  File(const std::filesystem::path& path, int flags, unsigned mode = 0);
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  [[nodiscard]] int fd() const { return fd_; }
  // False: less was there, or an error.
  [[nodiscard]] bool read_at(void* data, std::size_t size, std::size_t offset) const;
  [[nodiscard]] bool write(const void* data, std::size_t size) const;
  [[nodiscard]] bool close();  // false: what was written may not be there

 private:
  int fd_ = -1;
};

}  // namespace tessera::cuda
