// GPU 0 as a device of CUDA kernels.

#include <cuda_runtime_api.h>

#include "planner/base/check.h"
#include "runtime/device/cuda_device.h"
#include "tests/kernels/kernel_device.h"

namespace tessera {
namespace {

class GpuDevice : public KernelDevice {
 public:
  explicit GpuDevice(std::unique_ptr<CudaDevice> device)
      : device_(std::move(device)) {}

  std::byte* Allocate(size_t bytes) override {
    return static_cast<std::byte*>(device_
                                       ->Allocate({static_cast<int64_t>(bytes)},
                                                  MemoryCategory::kActivation)
                                       .value());
  }
  void Free(std::byte* data) override { device_->Free(data); }
  void Write(std::byte* to, const void* from, size_t bytes) override {
    device_->Write(to, from, {static_cast<int64_t>(bytes)});
  }
  void Read(void* to, const std::byte* from, size_t bytes) override {
    device_->Read(to, from, {static_cast<int64_t>(bytes)});
    const auto done = device_->Synchronize();
    if (!done) queue().error = done.error().message;
  }
  CudaQueue& queue() override { return *device_->kernel_queue(); }

 private:
  std::unique_ptr<CudaDevice> device_;
};

}  // namespace

std::unique_ptr<KernelDevice> MakeKernelDevice() {
  if (CudaDeviceCount() == 0) return nullptr;
  return std::make_unique<GpuDevice>(MakeCudaDevice(0).value());
}

}  // namespace tessera
