#pragma once
// Where the CUDA kernels under test run: a GPU (tests/gpu) or its emulation on
// the host (tests/emulation). The tests in this folder are part of both
// binaries.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

class KernelDevice {
 public:
  virtual ~KernelDevice() = default;

  // Memory of the device, aligned to 256 bytes.
  virtual std::byte* Allocate(size_t bytes) = 0;
  virtual void Free(std::byte* data) = 0;
  // From and to host memory; they wait for what is enqueued.
  virtual void Write(std::byte* to, const void* from, size_t bytes) = 0;
  virtual void Read(void* to, const std::byte* from, size_t bytes) = 0;
  // No kernel may touch these bytes, or may again.
  virtual void Guard(std::byte*, size_t) {}
  virtual void Unguard(std::byte*, size_t) {}
  // Another order of threads and blocks for the kernels that follow, where the
  // device can choose.
  virtual void Reorder(uint64_t) {}
  // From now on launches are checked, but nothing runs, or no longer so; false
  // where the device has no such choice.
  virtual bool OnlyCheckLaunches(bool) { return false; }

  virtual CudaQueue& queue() = 0;
};

// Null where this machine has none. The linker chooses.
std::unique_ptr<KernelDevice> MakeKernelDevice();

// Runs a CUDA kernel, or that of a name, on a call with host memory: tensors
// are copied to the device, at the same alignment, and back. Fails the test
// where the queue has an error, operands are changed, or bytes around a tensor
// are. What a result holds before is NaNs, unless the call adds to it or
// `in_place`.
void RunOnDevice(KernelDevice& device, const Kernel& kernel,
                 const KernelCall& call, bool in_place);
void RunOnDevice(KernelDevice& device, std::string_view kernel,
                 const KernelCall& call, bool in_place);
// The same of a call that may fail: the queue's error.
std::string ErrorOnDevice(KernelDevice& device, std::string_view kernel,
                          const KernelCall& call, bool in_place);
// The same of several calls by Kernel::run_list, which work in place. Tensors
// with one address are one.
void RunListOnDevice(KernelDevice& device, std::string_view kernel,
                     std::span<const KernelCall> calls);

}  // namespace tessera
