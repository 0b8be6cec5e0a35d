#include "planner/base/table.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// runtime/kernels/cuda/<family>.cu defines those of its family.
std::vector<Kernel> CudaAttentionKernels();
std::vector<Kernel> CudaElementwiseKernels();
std::vector<Kernel> CudaLinearKernels();

std::span<const Kernel> CudaKernels() {
  static const std::vector<Kernel>* const table = [] {
    auto* kernels = new std::vector<Kernel>();
    for (const auto& family : {
             CudaAttentionKernels(),
             CudaElementwiseKernels(),
             CudaLinearKernels(),
         }) {
      kernels->insert(kernels->end(), family.begin(), family.end());
    }
    return kernels;
  }();
  return *table;
}

Result<const Kernel*> FindCudaKernel(std::string_view name) {
  return Find("CUDA kernel", CudaKernels(), name);
}

}  // namespace tessera
