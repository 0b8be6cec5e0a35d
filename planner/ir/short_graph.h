#pragma once
// ShortGraph: a graph without most of its repeated blocks, on which what holds
// for each kind of block is found out in less time.

#include <vector>

#include "planner/ir/graph.h"

namespace tessera {

struct ShortGraph {
  Graph graph;                // differentiated
  std::vector<int> block_of;  // by block of the whole graph
};

// Of each run of equal blocks (BlockClasses) the first two and the last stay;
// what the last read from the one before it, it reads from the second. Every
// operator that stays has as many readers of its operands as in the whole
// graph, so that what is derived from them is the same; but what all layers
// read, as those of a decoder what the encoder left, has fewer of them, several
// still, so that the sum of its gradients has fewer terms. Where that cannot be
// the graph stays whole. REQUIRES: `graph` is differentiated.
ShortGraph Shorten(const Graph& graph);

}  // namespace tessera
