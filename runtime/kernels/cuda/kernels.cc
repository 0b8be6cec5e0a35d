#include "planner/base/table.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

std::span<const Kernel> CudaKernels() {
  static const std::vector<Kernel>* const table = new std::vector<Kernel>();
  return *table;
}

Result<const Kernel*> FindCudaKernel(std::string_view name) {
  return Find("CUDA kernel", CudaKernels(), name);
}

}  // namespace tessera
