// The host as a device of CUDA kernels.

#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/emulation/cuda_emulation.h"
#include "tests/kernels/kernel_device.h"
#include "tests/support/host_matmul.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tessera {
namespace {

class EmulatedDevice : public KernelDevice {
 public:
  EmulatedDevice() : workspace_(Allocate(kWorkspaceBytes)) {
    queue_.workspace = workspace_;
    queue_.workspace_bytes = kWorkspaceBytes;
    queue_.multiprocessors = 2;  // so that threads loop
    queue_.matmul = &matmul_;
    std::memset(workspace_, 0xff, kWorkspaceBytes);
  }
  ~EmulatedDevice() override { Free(workspace_); }

  std::byte* Allocate(size_t bytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, 256, bytes) != 0) std::abort();
    return static_cast<std::byte*>(data);
  }
  void Free(std::byte* data) override { std::free(data); }
  void Write(std::byte* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void Read(void* to, const std::byte* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
#ifdef __SANITIZE_ADDRESS__
  void Guard(std::byte* data, size_t bytes) override {
    __asan_poison_memory_region(data, bytes);
  }
  void Unguard(std::byte* data, size_t bytes) override {
    __asan_unpoison_memory_region(data, bytes);
  }
#endif
  void Reorder(uint64_t seed) override {
    emulation::SetSeed(seed);
  }

  bool OnlyCheckLaunches(bool yes) override {
    emulation::SetRunsBlocks(!yes);
    return true;
  }

  CudaQueue& queue() override {
    return queue_;
  }

 private:
  static constexpr size_t kWorkspaceBytes = 1 << 20;

  std::byte* workspace_;
  HostMatMul matmul_;
  CudaQueue queue_;
};

}  // namespace

std::unique_ptr<KernelDevice> MakeKernelDevice() {
  return std::make_unique<EmulatedDevice>();
}

}  // namespace tessera
