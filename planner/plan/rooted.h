#pragma once
// Rooted data parallelism of a whole plan: the root of the data axes scatters
// the inputs, gathers the logits and computes the loss, scatters its gradient,
// reduces the weights' gradients, steps alone and broadcasts what it has
// updated.
//
// Functions without state; thread-safe.

#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// Moves the loss to the root of its group's data axes, with what it reads that
// has no weights and runs once a step, and the state of all weights that the
// data axes replicate. `data` is by group. REQUIRES: no weight is cut.
void SetRooted(const GraphIndex& index, const std::vector<AxisSet>& data,
               Plan& plan);

// Whether anything is at a root.
bool UsesRoot(const Plan& plan);

// The plan without its roots, whose work the data axes share again: that of a
// node without samples each of their ranks does.
Plan WithoutRoot(const GraphIndex& index, Plan plan);

}  // namespace tessera
