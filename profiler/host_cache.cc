#include "profiler/host_cache.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <vector>

#include "planner/base/divide.h"
#include "profiler/first_line.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// The number that a text begins with, and what is behind it; or -1.
int64_t TakeNumber(std::string_view& text) {
  int64_t number = -1;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return -1;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

// "32768K"; 0 where it is none.
int64_t BytesIn(std::string_view text) {
  const int64_t number = std::max<int64_t>(TakeNumber(text), 0);
  return text == "K"    ? number << 10
         : text == "M"  ? number << 20
         : text.empty() ? number
                        : 0;
}

// How many are in "0-7,64-71"; 0 where it is no such list.
int CountIn(std::string_view list) {
  int64_t count = 0;
  while (!list.empty()) {
    const int64_t first = TakeNumber(list);
    int64_t last = first;
    if (list.starts_with('-')) {
      list.remove_prefix(1);
      last = TakeNumber(list);
    }
    if (first < 0 || last < first) return 0;
    count += last - first + 1;
    if (list.starts_with(',')) list.remove_prefix(1);
  }
  return static_cast<int>(count);
}

}  // namespace

HostCache ReadHostCache(const std::string& root) {
  HostCache found;
  int64_t highest = 0;
  std::error_code error;
  const fs::path folder = root + "/sys/devices/system/cpu/cpu0/cache";
  for (fs::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    const std::string line = FirstLine(at->path() / "level");
    std::string_view text = line;
    const int64_t level = TakeNumber(text);
    const int64_t bytes = BytesIn(FirstLine(at->path() / "size"));
    const int cpus = CountIn(FirstLine(at->path() / "shared_cpu_list"));
    const bool of_code = FirstLine(at->path() / "type") == "Instruction";
    if (of_code || level <= highest || bytes == 0 || cpus == 0) continue;
    highest = level;
    found = {{bytes}, cpus};
  }
  return found;
}

Bytes CacheOfThread(const HostCache& cache, int threads, int cpus) {
  const int64_t together = std::min(cache.cpus, cpus);
  const int64_t sharers = DivideUp(int64_t{threads} * together, cpus);
  return {DivideUp(cache.size.value, std::max<int64_t>(sharers, 1))};
}

}  // namespace tessera
