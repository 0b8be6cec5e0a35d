#pragma once
// The host as a device: calls run at once.

#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/thread_pool.h"

namespace tessera {

// It serves as well for what other devices of the host keep in its memory.
//
// Memory is pooled by size, so that the buffers of a step are those of the step
// before and fault no pages. Before the pool and what is in use together exceed
// the most that was ever in use (but for a thirty-second), memory of the pool
// goes back to the system: what the process holds is what the account says. In
// debug builds fresh and freed memory is filled with 0xff: not a number in
// every floating-point type. Under the address sanitizer touching what is not
// allocated is an error.
class CpuDevice : public RankDevice {
 public:
  // Kernels run on the caller's thread and `threads` - 1 others. Where it is
  // not `concurrent`, a rank runs all its streams in issue order. Memory begins
  // at multiples of `alignment`, a power of two from 64 to the system's page;
  // of one above 64 it goes on to the next.
  explicit CpuDevice(int threads = 1, bool concurrent = true,
                     size_t alignment = 64)
      : concurrent_(concurrent), alignment_(alignment), threads_(threads) {}
  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;
  ~CpuDevice() override;

  std::string_view name() const override { return "cpu"; }
  bool concurrent() const override { return concurrent_; }
  Result<void*> Allocate(Bytes size, MemoryCategory category) override;
  void Free(void* data) override;
  void Zero(void* data, Bytes size) override;
  void Copy(void* to, const void* from, const StridedCopy& copy) override;
  void Write(void* device_to, const void* host_from, Bytes size) override;
  void Read(void* host_to, const void* device_from, Bytes size) override;
  Result<const Kernel*> FindKernel(std::string_view kernel) const override;
  ThreadPool* threads() override { return &threads_; }
  Result<void> Synchronize() override { return {}; }

 private:
  struct Allocation {
    Bytes size;  // as asked for
    size_t capacity = 0;
    MemoryCategory category = MemoryCategory::kActivation;
  };

  void ReleasePool(size_t wanted);

  const bool concurrent_;
  const size_t alignment_;
  ThreadPool threads_;
  std::mutex mutex_;  // guards what follows, and the account
  std::unordered_map<void*, Allocation> in_use_;
  std::map<size_t, std::vector<void*>> free_;  // by capacity
  size_t in_use_bytes_ = 0;                    // capacities
  size_t peak_bytes_ = 0;                      // of in_use_bytes_
  size_t free_bytes_ = 0;
};

}  // namespace tessera
