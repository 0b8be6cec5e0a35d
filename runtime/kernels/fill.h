#pragma once
// Initial values of weights.

#include <cstdint>
#include <string_view>

#include "planner/ir/graph.h"
#include "runtime/kernels/kernel.h"

namespace tessera {

// Fills one rank's block of the weight `tensor_name` on the host. A normal
// value is drawn by (seed, name, global index), so that the blocks of any split
// hold the values of the whole. REQUIRES: fp32 or fp64.
void FillWeight(const LocalTensor& tensor, const Initializer& init,
                std::string_view tensor_name, uint64_t seed);

}  // namespace tessera
