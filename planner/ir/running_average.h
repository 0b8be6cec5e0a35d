#pragma once
// Running averages: what a tracked batch norm keeps of the statistics of the
// batches that training has seen, to norm by outside of training. They are
// weights of the graph, with shards, replicas, ZeRO and checkpoints, but have
// no gradients: in the place of one stands their distance from what a step has
// seen, and the step takes them a share of it nearer.

#include <vector>

#include "planner/ir/graph.h"

namespace tessera {

// By tensor: which share of the distance an update takes (PyTorch's momentum of
// batch norms, 0.1), or -1 for what is no running average.
std::vector<double> RunningMomenta(const Graph& graph);

}  // namespace tessera
