#include "cli/pack/jobs.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <stdexcept>

namespace tessera::cli {
namespace {

// What a child sends: this, the text, the image.
struct Message {
  std::uint64_t text_bytes, image_bytes;
  std::uint32_t ok;  // the text is the log, not an error
  cuda::Resources resources;
  double seconds;
};

struct Child {
  std::size_t job;
  pid_t process;
  int pipe;
  std::string received;
};

void send(int pipe, const void* data, std::size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size != 0) {
    const ssize_t put = ::write(pipe, bytes, size);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) ::_exit(1);
    bytes += put;
    size -= static_cast<std::size_t>(put);
  }
}

[[noreturn]] void work_in_child(int pipe, const std::function<Result<cuda::Cubin>()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  const Result<cuda::Cubin> cubin = work();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const std::string& text = cubin.ok() ? cubin.value().log : cubin.status().message();
  Message message{};
  message.text_bytes = text.size();
  message.ok = cubin.ok() ? 1 : 0;
  message.seconds = took.count();
  if (cubin.ok()) {
    message.image_bytes = cubin.value().image.size();
    message.resources = cubin.value().resources;
  }
  send(pipe, &message, sizeof(message));
  send(pipe, text.data(), text.size());
  if (cubin.ok()) send(pipe, cubin.value().image.data(), cubin.value().image.size());
  ::_exit(0);
}

Child start(std::size_t job, const std::function<Result<cuda::Cubin>(std::size_t)>& work) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error(std::string("pipe: ") + std::strerror(errno));
  const pid_t process = ::fork();
  if (process < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (process == 0) {
    ::close(ends[0]);
    work_in_child(ends[1], [&] { return work(job); });
  }
  ::close(ends[1]);
  return {job, process, ends[0], {}};
}

Outcome outcome_of(const Child& child, int status) {
  Outcome outcome;
  Message message{};
  const std::string& bytes = child.received;
  if (bytes.size() >= sizeof(message)) std::memcpy(&message, bytes.data(), sizeof(message));
  if (WIFSIGNALED(status)) {
    outcome.error = std::string("the compiler crashed: ") + ::strsignal(WTERMSIG(status));
  } else if (bytes.size() < sizeof(message) ||
             bytes.size() != sizeof(message) + message.text_bytes + message.image_bytes) {
    outcome.error = "the compiler's process ended early";
  } else {
    const std::string text = bytes.substr(sizeof(message), message.text_bytes);
    const char* image = bytes.data() + sizeof(message) + message.text_bytes;
    outcome.seconds = message.seconds;
    if (message.ok == 0) outcome.error = text;
    outcome.cubin.log = text;
    outcome.cubin.resources = message.resources;
    outcome.cubin.image.resize(message.image_bytes);
    if (message.image_bytes != 0) std::memcpy(outcome.cubin.image.data(), image, message.image_bytes);
  }
  return outcome;
}

}  // namespace

void run_jobs(std::size_t count, int jobs, const std::function<Result<cuda::Cubin>(std::size_t)>& work,
              const std::function<void(std::size_t, Outcome)>& done) {
  std::vector<Child> children;
  std::size_t next = 0;
  while (next < count || !children.empty()) {
    while (next < count && children.size() < static_cast<std::size_t>(jobs))
      children.push_back(start(next++, work));

    std::vector<pollfd> pipes;
    pipes.reserve(children.size());
    for (const Child& child : children) pipes.push_back({child.pipe, POLLIN, 0});
    if (::poll(pipes.data(), pipes.size(), -1) < 0 && errno != EINTR)
      throw std::runtime_error(std::string("poll: ") + std::strerror(errno));

    for (std::size_t i = children.size(); i-- > 0;) {  // from the end, so that one can be erased
      if (pipes[i].revents == 0) continue;
      std::array<char, 65536> part{};
      const ssize_t got = ::read(children[i].pipe, part.data(), part.size());
      if (got > 0) children[i].received.append(part.data(), static_cast<std::size_t>(got));
      if (got > 0 || (got < 0 && errno == EINTR)) continue;
      const Child child = std::move(children[i]);
      children.erase(children.begin() + static_cast<std::ptrdiff_t>(i));
      ::close(child.pipe);
      int status = 0;
      ::waitpid(child.process, &status, 0);
      done(child.job, outcome_of(child, status));
    }
  }
}

}  // namespace tessera::cli
