#pragma once
// The last-level caches of a host, which measurements of its memory go past.

#include <cstdint>
#include <string>

#include "planner/base/units.h"

namespace tessera {

struct HostCache {
  // Of each of them, and the processors that share it. Where nothing is said,
  // as an AMD EPYC 7003 has them.
  Bytes size = {int64_t{32} << 20};
  int cpus = 16;
  bool operator==(const HostCache&) const = default;
};

// That of the first processor, from the files below `root` as Linux has them in
// "/" (sys/devices/system/cpu). (sysconf says in a virtual machine what the
// whole socket has.)
HostCache ReadHostCache(const std::string& root = "");

// How much of these caches a thread can fill, where `threads` run at once on
// `cpus` processors: a whole one, or what others leave of it.
Bytes CacheOfThread(const HostCache& cache, int threads, int cpus);

}  // namespace tessera
