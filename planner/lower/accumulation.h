#pragma once
// Whose gradients add up over microbatches and uses without a `sum`.

#include "planner/ir/graph.h"

namespace tessera {

// Whether a node's kernel adds to its gradients of weights, if it has such, and
// to nothing else. Thread-safe.
bool AddsItsGradients(const Graph& graph, const Node& node);

}  // namespace tessera
