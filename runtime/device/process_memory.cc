#include "runtime/device/process_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace tessera {
namespace {

// A line of a file such as "VmHWM:     1234 kB"; 0 if it has none.
Bytes Line(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    int64_t kibibytes = 0;
    if (word == key && file >> kibibytes) return {kibibytes * 1024};
  }
  return {};
}

}  // namespace

Bytes ResidentBytes() {
  return Line("/proc/self/status", "VmRSS:");
}

Bytes PeakResidentBytes() {
  return Line("/proc/self/status", "VmHWM:");
}

void ResetPeakResident() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

Bytes AvailableMemory() {
  int64_t available = Line("/proc/meminfo", "MemAvailable:").value;
  if (available == 0) available = std::numeric_limits<int64_t>::max();
  // Version 2, of this process's own namespace; "max" is no number.
  int64_t limit = 0;
  int64_t used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    available = std::min(available, std::max<int64_t>(limit - used, 0));
  }
  return {available};
}

}  // namespace tessera
