#pragma once
// The slopes of ALiBi (planner/ops/attention.cc).

#include <vector>

#include "runtime/kernels/kernel.h"

namespace tessera {

// Of the heads that a call has, in the order (g, r) of its queries; empty for
// attention without biases.
std::vector<double> AlibiSlopes(const KernelCall& call, const LocalTensor& q);

}  // namespace tessera
