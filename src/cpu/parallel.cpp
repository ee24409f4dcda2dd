#include "cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::cpu {
namespace {

// How often a thread looks for work, or for the end of it, before it goes to sleep: waking it costs tens of
// microseconds, and the next call, or the last task, is often nearer than that.
constexpr int patience = 2000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

struct Job {
  TaskRef body;
  std::int64_t tasks;
  int slots;  // threads that may join, the caller among them
  std::atomic<std::int64_t> next_task{0};
  int next_slot = 1;            // the caller has slot 0; guarded by the pool's mutex
  std::atomic<int> working{0};  // workers inside; changed under the pool's mutex

  void work(int slot) {
    for (;;) {
      const std::int64_t task = next_task.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      body(task, slot);
    }
  }
};

class Pool {
 public:
  // Never destroyed: workers may outlive static destruction.
  static Pool& instance() {
    static std::atomic<Pool*> current{new Pool};
    // A forked child has none of its parent's threads and must not touch their locks: it begins anew.
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(new Pool); });
    (void)registered;
    return *current.load();
  }

  void run(Job& job) {
    bool anyone_asleep = false;
    {
      const std::lock_guard lock(mutex_);
      start_workers(job.slots - 1);
      jobs_.push_back(&job);
      open_jobs_.store(static_cast<int>(jobs_.size()), std::memory_order_relaxed);
      anyone_asleep = asleep_ > 0;
    }
    if (anyone_asleep) wake_.notify_all();
    job.work(0);
    {
      const std::lock_guard lock(mutex_);
      close(job);
    }
    for (int i = 0; i < patience && job.working.load(std::memory_order_acquire) != 0; ++i) pause();
    if (job.working.load(std::memory_order_acquire) == 0) return;
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return job.working.load(std::memory_order_acquire) == 0; });
  }

 private:
  void start_workers(int wanted) {
    for (; workers_ < wanted; ++workers_) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // the system has no more threads to give: the job runs on those it has
      }
    }
  }

  // No more threads join the job. The mutex is held.
  void close(const Job& job) {
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    open_jobs_.store(static_cast<int>(jobs_.size()), std::memory_order_relaxed);
  }

  [[noreturn]] void serve() {
    for (;;) {
      for (int i = 0; i < patience && open_jobs_.load(std::memory_order_relaxed) == 0; ++i) pause();
      std::unique_lock lock(mutex_);
      ++asleep_;
      wake_.wait(lock, [&] { return !jobs_.empty(); });
      --asleep_;
      Job& job = *jobs_.front();
      const int slot = job.next_slot++;
      if (job.next_slot >= job.slots) close(job);
      job.working.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job.work(slot);
      lock.lock();
      close(job);  // no task is left in it
      // The caller may return, and the job end, as soon as this is 0.
      if (job.working.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job*> jobs_;          // those with a free slot
  std::atomic<int> open_jobs_{0};  // their number, to be looked at without the mutex
  int workers_ = 0, asleep_ = 0;
};

}  // namespace

void parallel_for(std::int64_t tasks, int threads, TaskRef body) {
  threads = static_cast<int>(std::min<std::int64_t>(threads, tasks));
  if (threads <= 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  Job job{body, tasks, threads};
  Pool::instance().run(job);
}

void relax(int& spins) {
  if (++spins < 64) {
    pause();
  } else {
    std::this_thread::yield();
  }
}

}  // namespace tessera::cpu
