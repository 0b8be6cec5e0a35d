#include "profiler/host_speed.h"

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "planner/base/threads.h"
#include "runtime/storage/file_tier.h"

namespace tessera {
namespace {

constexpr int kRuns = 5;
constexpr int64_t kStorageBytes = int64_t{256} << 20;

double SecondsOf(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

double Median(std::array<double, kRuns> values) {
  std::ranges::sort(values);
  return values[kRuns / 2];
}

struct FreeMemory {
  void operator()(void* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<std::byte, FreeMemory>;

// Written once, so that the system has given its pages.
Buffer MakeBuffer(int64_t bytes) {
  Buffer buffer(static_cast<std::byte*>(
      std::aligned_alloc(kFileBlockBytes, static_cast<size_t>(bytes))));
  TESSERA_CHECK(buffer != nullptr) << "no memory for " << bytes << " bytes";
  std::memset(buffer.get(), 1, static_cast<size_t>(bytes));
  return buffer;
}

}  // namespace

// A few gigabytes in all also of hundreds of cores.
Bytes CopiedByEach(int threads, int cpus, const HostCache& cache) {
  constexpr int64_t kLeast = int64_t{16} << 20;
  constexpr int64_t kMost = int64_t{64} << 20;
  constexpr int64_t kAll = int64_t{2} << 30;
  return {std::max(std::clamp(kAll / threads, kLeast, kMost),
                   2 * CacheOfThread(cache, threads, cpus).value)};
}

// The system puts a page where the core is that first writes it: threads make
// their buffers themselves.
BytesPerSecond MeasureCopies(int threads) {
  using Clock = std::chrono::steady_clock;
  const int64_t bytes =
      CopiedByEach(threads, HostCores(), ReadHostCache()).value;
  // When all were ready for the first run, and had done each.
  std::vector<Clock::time_point> ends;
  std::barrier meeting(threads,
                       [&ends]() noexcept { ends.push_back(Clock::now()); });
  ends.reserve(kRuns + 1);
  OnThreads(threads, [&] {
    const Buffer from = MakeBuffer(bytes);
    const Buffer to = MakeBuffer(bytes);
    meeting.arrive_and_wait();
    for (int run = 0; run < kRuns; ++run) {
      std::memcpy(to.get(), from.get(), static_cast<size_t>(bytes));
      meeting.arrive_and_wait();
    }
  });
  std::array<double, kRuns> seconds = {};
  for (size_t run = 0; run < kRuns; ++run) {
    seconds[run] =
        std::chrono::duration<double>(ends[run + 1] - ends[run]).count();
  }
  return {static_cast<double>(bytes) * threads / Median(seconds)};
}

Result<StorageSpeed> MeasureStorage(const std::string& directory) {
  StorageSpeed speed;
  speed.free = FreeBytesOf(directory);
  const int64_t bytes = std::min(kStorageBytes, speed.free.value / 2) /
                        kFileBlockBytes * kFileBlockBytes;
  if (bytes == 0) return InvalidInput("no space is free", directory);
  TESSERA_TRY(const auto file,
              FileTier::Open({.directory = directory}, Bytes{bytes}));
  speed.direct = file->direct();
  speed.shared = IsOnNetwork(directory);
  const Buffer buffer = MakeBuffer(bytes);
  const FileTier::Transfer all = {0, buffer.get(), bytes};
  std::array<double, kRuns> writes = {};
  std::array<double, kRuns> reads = {};
  for (size_t run = 0; run < kRuns; ++run) {
    Result<void> done;
    writes[run] = SecondsOf([&] {
      done = file->Write({&all, 1});
      if (done && !speed.direct) done = file->DropCached();
    });
    TESSERA_RETURN_IF_ERROR(done);
    reads[run] = SecondsOf([&] { done = file->Read({&all, 1}); });
    TESSERA_RETURN_IF_ERROR(done);
    // Or the next run would write over what is in memory.
    if (!speed.direct) TESSERA_RETURN_IF_ERROR(file->DropCached());
  }
  speed.write = {static_cast<double>(bytes) / Median(writes)};
  speed.read = {static_cast<double>(bytes) / Median(reads)};
  return speed;
}

}  // namespace tessera
