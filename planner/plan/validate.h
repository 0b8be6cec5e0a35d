#pragma once
// The checks behind Validate (planner/plan/plan.h), with the graph's lookups
// made beforehand: for callers that validate many plans of one graph.

#include <vector>

#include "planner/base/result.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// As Validate(*index.graph, cluster, plan). A plan that was made for a cluster
// of another name is not an error: what counts is that its devices exist.
std::vector<Error> Validate(const GraphIndex& index, const Cluster& cluster,
                            const Plan& plan);

// Whether there are none, which a broken plan shows sooner.
bool IsValid(const GraphIndex& index, const Cluster& cluster, const Plan& plan);

}  // namespace tessera
