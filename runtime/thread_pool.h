#pragma once
// ThreadPool: the threads on which a rank's kernels run, for loops whose
// iterations are independent of each other. Thread-safe: the workers serve one
// loop at a time, and who calls meanwhile runs its loop alone.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

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

// On which this process may run (sched_getaffinity(2)), or as many as a
// container has the time of (QuotaOf): a launcher, a batch system or a
// container may have left it some of the host's.
int HostCores();
// The cores whose time a control group has at most, rounded up, from its
// cpu.max ("800000 100000": microseconds of each period; cgroups(7), version
// 2); 0 where that says no limit.
int QuotaOf(const std::string& cpu_max);
// All that the host has.
int OnlineCores();
// The threads of each of `ranks` ranks that share this host's cores: at
// least 1.
int ThreadsPerRank(int ranks);

}  // namespace tessera
