#pragma once
// What the CPU's and CUDA's losses of elements (planner/ops/losses.cc) share.

#include "runtime/kernels/kernel.h"

namespace tessera {

// Of each element: the loss's over the number of elements on all ranks.
inline double WeightOf(const KernelCall& call, const LocalTensor& tensor) {
  double n = 1;
  for (int64_t extent : tensor.global_shape) n *= static_cast<double>(extent);
  return call.attribute("weight") / n;
}

}  // namespace tessera
