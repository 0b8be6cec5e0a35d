#include "runtime/device/process_memory.h"

#include <fstream>
#include <string>

namespace tessera {
namespace {

// A line of /proc/self/status, such as "VmHWM:     1234 kB".
Bytes StatusLine(const std::string& key) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kibibytes = 0;
    if (word == key && status >> kibibytes) return {kibibytes * 1024};
  }
  return {};
}

}  // namespace

Bytes ResidentBytes() {
  return StatusLine("VmRSS:");
}

Bytes PeakResidentBytes() {
  return StatusLine("VmHWM:");
}

void ResetPeakResident() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

}  // namespace tessera
