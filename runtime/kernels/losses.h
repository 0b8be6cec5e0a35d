#pragma once
// What the CPU's and CUDA's losses share.

#include "runtime/kernels/kernel.h"

namespace tessera {

// Of each element (planner/ops/losses.cc): the loss's over the number of
// elements on all ranks.
inline double WeightOf(const KernelCall& call, const LocalTensor& tensor) {
  double n = 1;
  for (int64_t extent : tensor.global_shape) n *= static_cast<double>(extent);
  return call.attribute("weight") / n;
}

// Of the balance of experts (planner/ops/moe.cc): a sample's loss is this times
// the sum of share * probability.
inline double BalanceScale(const KernelCall& call) {
  const LocalTensor& logits = call.operands[0];
  return call.attribute("coefficient") * static_cast<double>(logits.shape[2]) /
         static_cast<double>(logits.global_shape[0]);
}

}  // namespace tessera
