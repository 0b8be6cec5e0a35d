#pragma once
// A sample of a graph's blocks, from which estimates for all of them are found
// in less time.

#include <vector>

#include "planner/ir/graph.h"

namespace tessera {

// So many blocks of each form are in a sample.
inline constexpr int kSampledOfForm = 32;

// By block the one that stands for it: of blocks with the same operators, in
// the order of their sizes, every so many stand for those next to them.
std::vector<int> SampleBlocks(const Graph& graph);

}  // namespace tessera
