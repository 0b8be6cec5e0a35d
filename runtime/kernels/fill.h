#pragma once
// Initial values of weights.

#include <cstdint>
#include <string_view>

#include "planner/ir/graph.h"
#include "planner/plan/layout.h"
#include "runtime/kernels/kernel.h"
#include "runtime/thread_pool.h"

namespace tessera {

// Fills one rank's block of the weight `tensor_name` on the host. A normal
// value is drawn by (seed, name, global index), so that the blocks of any split
// hold the values of the whole. REQUIRES: fp32 or fp64.
void FillWeight(const LocalTensor& tensor, const Initializer& init,
                std::string_view tensor_name, uint64_t seed);
// A part of it: the elements of the block from `elements`.begin on, row by row,
// which go to the beginning of `tensor`.data. On `threads`, where there are
// some; no bit depends on them.
void FillWeight(const LocalTensor& tensor, Range elements,
                const Initializer& init, std::string_view tensor_name,
                uint64_t seed, ThreadPool* threads);

}  // namespace tessera
