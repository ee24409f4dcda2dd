// A progress bar.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

namespace tessera::cli {

// On a terminal one line that is drawn over and over; elsewhere nothing.
class Progress {
 public:
  Progress(int total, bool silent) : total_(total), shown_(!silent && isatty(STDERR_FILENO) != 0) {}

  void show(int done, int failed) const {
    if (!shown_) return;
    constexpr int width = 40;
    const int filled = total_ == 0 ? width : width * done / total_;
    const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                            std::string(static_cast<std::size_t>(width - filled), '.');
    std::fprintf(stderr, "\r[%s] %d/%d, %d failed", bar.c_str(), done, total_, failed);
    std::fflush(stderr);
  }
  void clear() const {
    if (shown_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  int total_;
  bool shown_;
};

}  // namespace tessera::cli
