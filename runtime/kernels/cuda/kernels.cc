#include <vector>

#include "planner/base/table.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

#define TESSERA_KERNELS(family) std::vector<Kernel> Cuda##family##Kernels();
#include "runtime/kernels/kernels.def"
#undef TESSERA_KERNELS
std::vector<Kernel> CudaFusedElementwiseKernels();
std::vector<Kernel> CudaFusedLinearKernels();
std::vector<Kernel> CudaFusedNormKernels();
std::vector<Kernel> CudaFusedOptimizerKernels();

std::span<const Kernel> CudaKernels() {
  static const std::vector<Kernel>* const table = [] {
    auto* kernels = new std::vector<Kernel>();
#define TESSERA_KERNELS(family)                        \
  for (const Kernel& kernel : Cuda##family##Kernels()) \
    kernels->push_back(kernel);
#include "runtime/kernels/kernels.def"
#undef TESSERA_KERNELS
    return kernels;
  }();
  return *table;
}

Result<const Kernel*> FindCudaKernel(std::string_view name) {
  return Find("CUDA kernel", CudaKernels(), name);
}

std::span<const Kernel> CudaFusedKernels() {
  static const std::vector<Kernel>* const table = [] {
    auto* kernels = new std::vector<Kernel>();
    for (const auto& family :
         {CudaFusedElementwiseKernels(), CudaFusedLinearKernels(),
          CudaFusedNormKernels(), CudaFusedOptimizerKernels()}) {
      kernels->insert(kernels->end(), family.begin(), family.end());
    }
    return kernels;
  }();
  return *table;
}

}  // namespace tessera
