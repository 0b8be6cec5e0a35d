#pragma once
// RankDevice: the memory and the kernels of one rank. Implementations:
// CpuDevice (cpu_device.h) and CudaDevice (cuda_device.h).
//
// All work of a device (copies, zeroing, kernels) runs in one queue, in the
// order of the calls; Synchronize waits for it. Pointers are the device's own:
// only Read and Write reach them from the host. A device belongs to one thread
// at a time, unless it is concurrent().

#include <array>
#include <cstddef>
#include <string_view>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/layout.h"
#include "runtime/device/memory_account.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// A copy of runs of `run_bytes` bytes: one for each point of a grid of
// extents[0, dims), the last innermost, whose first bytes lie at these strides
// (in bytes) on either side.
struct StridedCopy {
  int64_t run_bytes = 0;
  int dims = 0;
  std::array<int64_t, kMaxDims> extents = {};
  std::array<int64_t, kMaxDims> from_strides = {};
  std::array<int64_t, kMaxDims> to_strides = {};
};

class RankDevice {
 public:
  virtual ~RankDevice() = default;

  // "cpu"; for messages.
  virtual std::string_view name() const = 0;

  // Whether several threads may call this device and its kernels at once; each
  // thread's calls then have ended when they return.
  virtual bool concurrent() const = 0;

  // Memory for `size` bytes (at least one), aligned to 64 bytes, with unknown
  // contents. kUnavailable when there is no more. Freed memory is kept for
  // later allocations, so that steps after the first ask the system for none.
  virtual Result<void*> Allocate(Bytes size, MemoryCategory category) = 0;
  // REQUIRES: `data` came from Allocate and has not been freed.
  virtual void Free(void* data) = 0;

  virtual void Zero(void* data, Bytes size) = 0;
  // The two sides do not overlap.
  virtual void Copy(void* to, const void* from, const StridedCopy& copy) = 0;
  // To and from host memory. They wait for the copy to end.
  virtual void Write(void* device_to, const void* host_from, Bytes size) = 0;
  virtual void Read(void* host_to, const void* device_from, Bytes size) = 0;

  // kNotFound for an unknown kernel.
  virtual Result<const Kernel*> FindKernel(std::string_view kernel) const = 0;

  // On which the kernels may run; null for one.
  virtual ThreadPool* threads() { return nullptr; }
  // Where kernels are enqueued; null where they run in their call.
  virtual CudaQueue* kernel_queue() { return nullptr; }

  virtual Result<void> Synchronize() = 0;

  const MemoryAccount& account() const { return account_; }

 protected:
  MemoryAccount account_;
};

}  // namespace tessera
