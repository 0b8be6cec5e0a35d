#pragma once
// The host as a device: calls run at once.

#include <map>
#include <unordered_map>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/thread_pool.h"

namespace tessera {

// Memory is pooled by size, so that the buffers of a step are those of the step
// before and fault no pages. In debug builds fresh and freed memory is filled
// with 0xff: not a number in every floating-point type. Under the address
// sanitizer touching what is not allocated is an error.
class CpuDevice : public RankDevice {
 public:
  // Kernels run on the caller's thread and `threads` - 1 others.
  explicit CpuDevice(int threads = 1) : threads_(threads) {}
  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;
  ~CpuDevice() override;

  std::string_view name() const override { return "cpu"; }
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

  ThreadPool threads_;
  std::unordered_map<void*, Allocation> in_use_;
  std::map<size_t, std::vector<void*>> free_;  // by capacity
};

}  // namespace tessera
