#include "planner/base/threads.h"

#include <algorithm>
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

}  // namespace tessera
