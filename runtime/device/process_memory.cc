#include "runtime/device/process_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace tessera {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// The number behind a word of a file; 0 if it has none.
int64_t NumberBehind(const std::string& key, const std::string& path) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    int64_t number = 0;
    if (word == key && file >> number) return number;
  }
  return 0;
}

// A line of a file such as "VmHWM:     1234 kB"; 0 if it has none.
Bytes Line(const std::string& path, const std::string& key) {
  return {NumberBehind(key, path) * 1024};
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
  if (available == 0) available = kMost;
  // Of this process's own namespace.
  return std::min(Bytes{available}, RoomInGroup("/sys/fs/cgroup"));
}

Bytes RoomInGroup(const std::string& folder) {
  int64_t limit = 0;  // "max" is no number
  int64_t used = 0;
  if (!(std::ifstream(folder + "/memory.max") >> limit) ||
      !(std::ifstream(folder + "/memory.current") >> used)) {
    return {kMost};
  }
  // Pages of tmpfs and of shared memory are in neither list.
  for (const char* const list : {"inactive_file", "active_file"}) {
    used -= NumberBehind(list, folder + "/memory.stat");
  }
  return {std::clamp<int64_t>(limit - used, 0, limit)};
}

}  // namespace tessera
