// Threads for the CPU kernels: one pool for the process, shared by all callers.
//
// A job is a number of tasks that threads take in ascending order. The caller works on its own job, so a job
// ends even when no worker is free, and a task may wait for an earlier one: that one has been taken by a
// thread that is running. Workers are started when first needed, and again after a fork.
#pragma once

#include <cstdint>

namespace tessera::cpu {

// A callable that outlives the call it is passed to: std::function without an allocation.
class TaskRef {
 public:
  template <class Body>
  TaskRef(const Body& body)  // NOLINT(google-explicit-constructor)
      : body_(&body), call_([](const void* b, std::int64_t task, int slot) {
          (*static_cast<const Body*>(b))(task, slot);
        }) {}
  void operator()(std::int64_t task, int slot) const { call_(body_, task, slot); }

 private:
  const void* body_;
  void (*call_)(const void*, std::int64_t, int);
};

// Calls body(task, slot) for task = 0 .. tasks - 1 on at most `threads` threads. slot < threads names the
// thread for the length of the job: it owns the slot's scratch memory. body must not throw.
void parallel_for(std::int64_t tasks, int threads, TaskRef body);

// Waits a little: a spinning thread calls it with its own counter.
void relax(int& spins);

}  // namespace tessera::cpu
