#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace tessera {

// The cores of this host, as this process sees them.
struct HostCpus {
  int allowed = 1;  // on which it may run (sched_getaffinity(2))
  int online = 1;   // all of them
  // The cores whose time its container has at most; 0: no limit.
  int quota = 0;
};
HostCpus ReadHostCpus();

// The cores whose time a control group has at most, rounded up, from its
// cpu.max ("800000 100000": microseconds of each period; cgroups(7), version
// 2); 0 where that says no limit.
int QuotaOf(const std::string& cpu_max);

// The cores that so many processes of this host, which see what this one does,
// have together: the same ones, or, where each may be `bound`, its own, as far
// as there are so many. Either way they are of one container, whose time they
// share.
int CoresTogether(const HostCpus& cpus, int processes, bool bound);

// Those that this process has: a launcher, a batch system or a container may
// have left it some of the host's. At least 1.
int HostCores();

// `threads`, or with 0 as many as run at once.
int ThreadCount(int threads);

// Calls `work` on so many threads, this one among them, and waits for all.
void OnThreads(int threads, const std::function<void()>& work);

// Calls `work(i)` for each i < count, each once, on so many threads.
void ForEach(int threads, size_t count,
             const std::function<void(size_t)>& work);

}  // namespace tessera
