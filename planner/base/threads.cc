#include "planner/base/threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

namespace tessera {

HostCpus ReadHostCpus() {
  HostCpus cpus;
  cpus.online = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t set;
  const bool known = sched_getaffinity(0, sizeof(set), &set) == 0;
  cpus.allowed = known ? std::max(1, CPU_COUNT(&set)) : cpus.online;
  // A container sees its own group there; elsewhere it is the root, without a
  // limit.
  std::string cpu_max;
  std::getline(std::ifstream("/sys/fs/cgroup/cpu.max"), cpu_max);
  cpus.quota = QuotaOf(cpu_max);
  return cpus;
}

int QuotaOf(const std::string& cpu_max) {
  std::istringstream words(cpu_max);
  int64_t time = 0;
  int64_t period = 0;
  if (!(words >> time >> period) || time <= 0 || period <= 0) return 0;
  constexpr int64_t kMost = 1 << 20;  // more cores than any host has
  const int64_t cores = time / period + (time % period == 0 ? 0 : 1);
  return static_cast<int>(std::min(kMost, cores));
}

int CoresTogether(const HostCpus& cpus, int processes, bool bound) {
  int64_t cores = cpus.allowed;
  if (bound && cpus.allowed < cpus.online) {
    cores = std::min<int64_t>(cores * std::max(1, processes), cpus.online);
  }
  if (cpus.quota > 0) cores = std::min<int64_t>(cores, cpus.quota);
  return static_cast<int>(cores);
}

int HostCores() {
  return CoresTogether(ReadHostCpus(), 1, /*bound=*/false);
}

int ThreadCount(int threads) {
  return threads > 0 ? threads : HostCores();
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
