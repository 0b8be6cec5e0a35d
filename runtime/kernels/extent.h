#pragma once
// Extents of the matrices that a linear layer's tensors are
// (planner/ops/linear.cc).

#include "runtime/kernels/kernel.h"

namespace tessera {

// Product of the extents of those dimensions of operand `a` that are (or are
// not) dimensions of operand `b`.
inline int64_t Extent(const KernelCall& call, int a, int b, bool shared) {
  const Indices& indices = call.rule->operands[a];
  int64_t extent = 1;
  for (size_t dim = 0; dim < indices.size(); ++dim) {
    if (Holds(call.rule->operands[b], indices[dim]) == shared) {
      extent *= call.operands[a].shape[dim];
    }
  }
  return extent;
}

}  // namespace tessera
