#pragma once
// ThreadPool: the threads on which a rank's kernels run, for loops whose
// iterations are independent of each other. Thread-safe: the workers serve one
// loop at a time, and who calls meanwhile runs its loop alone.

#include <cstdint>
#include <functional>
#include <memory>

namespace tessera {

class ThreadPool {
 public:
  // `threads` - 1 threads of its own beside the caller's. REQUIRES: at least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls f(0), …, f(n - 1), in any order and on any of the threads; returns
  // when all have. f does not call For.
  void For(int64_t n, const std::function<void(int64_t)>& f);

 private:
  struct Shared;

  const int threads_;
  std::unique_ptr<Shared> shared_;  // null with one thread
};

}  // namespace tessera
