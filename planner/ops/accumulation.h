#pragma once
// Which operators can add what they compute to what their results hold
// (runtime/kernels/kernel.h, KernelCall::accumulate): so the gradient of a
// weight grows over microbatches and uses. What others make is written anew,
// and added by a `sum` behind it.

#include <cstddef>

#include "planner/ir/graph.h"

namespace tessera {

// Whether its kernel can add to its results. Thread-safe.
bool Accumulates(const OpDef& op);

// Whether a call that accumulates adds to result k; else it writes it anew.
// REQUIRES: Accumulates(op).
bool AddsToResult(const OpDef& op, size_t k);

// Whether a node's kernel adds to its gradients of weights, if it has such, and
// to nothing else.
bool AddsItsGradients(const Graph& graph, const Node& node);

}  // namespace tessera
