#include "planner/base/threads.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace tessera {

int ThreadCount(int threads) {
  if (threads > 0) return threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void OnThreads(int threads, const std::function<void()>& work) {
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
}

void ForEach(int threads, size_t count,
             const std::function<void(size_t)>& work) {
  std::atomic<size_t> next = 0;
  const size_t most =
      std::min(count, static_cast<size_t>(std::max(threads, 1)));
  OnThreads(static_cast<int>(most), [&] {
    for (size_t i; (i = next.fetch_add(1)) < count;) work(i);
  });
}

}  // namespace tessera
