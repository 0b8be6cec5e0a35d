#include "profiler/host_speed.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/storage/file_tier.h"
#include "runtime/thread_pool.h"

namespace tessera {
namespace {

constexpr int kRuns = 5;
// Of each thread, and as many of the copy: more than a core's share of caches
// (12 MiB of AMD's EPYC 9684X: 1,152 MiB of 96 cores), and a few gigabytes in
// all also of hundreds of cores.
int64_t CopyBytes(int threads) {
  constexpr int64_t kLeast = int64_t{16} << 20;
  constexpr int64_t kMost = int64_t{64} << 20;
  constexpr int64_t kAll = int64_t{2} << 30;
  return std::clamp(kAll / threads, kLeast, kMost);
}

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

BytesPerSecond MeasureCopies(int threads) {
  const int64_t bytes = CopyBytes(threads);
  std::vector<Buffer> from;
  std::vector<Buffer> to;
  for (int t = 0; t < threads; ++t) {
    from.push_back(MakeBuffer(bytes));
    to.push_back(MakeBuffer(bytes));
  }
  ThreadPool pool(threads);
  std::array<double, kRuns> seconds = {};
  for (double& run : seconds) {
    run = SecondsOf([&] {
      pool.For(threads, [&](int64_t t) {
        std::memcpy(to[static_cast<size_t>(t)].get(),
                    from[static_cast<size_t>(t)].get(),
                    static_cast<size_t>(bytes));
      });
    });
  }
  return {static_cast<double>(bytes) * threads / Median(seconds)};
}

Result<StorageSpeed> MeasureStorage(const std::string& directory) {
  StorageSpeed speed;
  speed.free = FreeBytesOf(directory);
  const int64_t bytes = std::min(kStorageBytes, speed.free.value / 2) /
                        kFileBlockBytes * kFileBlockBytes;
  if (bytes == 0) {
    return Error{ErrorCode::kInfeasible, "no space is free", directory};
  }
  TESSERA_TRY(const auto file,
              FileTier::Open({.directory = directory}, Bytes{bytes}));
  const Buffer buffer = MakeBuffer(bytes);
  const FileTier::Transfer all = {0, buffer.get(), bytes};
  std::array<double, kRuns> writes = {};
  std::array<double, kRuns> reads = {};
  for (size_t run = 0; run < kRuns; ++run) {
    Result<void> done;
    writes[run] = SecondsOf([&] { done = file->Write({&all, 1}); });
    TESSERA_RETURN_IF_ERROR(done);
    reads[run] = SecondsOf([&] { done = file->Read({&all, 1}); });
    TESSERA_RETURN_IF_ERROR(done);
  }
  speed.write = {static_cast<double>(bytes) / Median(writes)};
  speed.read = {static_cast<double>(bytes) / Median(reads)};
  return speed;
}

}  // namespace tessera
