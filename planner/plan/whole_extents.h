#pragma once
// The extents of a node's factors, unsplit.

#include <array>

#include "planner/ir/graph.h"

namespace tessera {

// Over the whole batch, as the node's tensors have them; 0 of a factor that
// none has.
std::array<int64_t, kMaxFactors> WholeExtents(const Graph& graph,
                                              const Node& node);

}  // namespace tessera
