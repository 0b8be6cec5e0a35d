#pragma once
// Whether the choice of a cluster's collectives (Cluster::collective) changes
// the step of a plan.

#include <string>

#include "costmodel/profile/profile_db.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"

namespace tessera {

// That it does not: no collective of the plan can run so, or all do anyway, or
// their time is hidden. Empty where it does, and where the cluster has no
// choice. `profile` may be null, and `whole`, the cluster before something of
// it failed (Evaluator). REQUIRES: `plan` is valid for the cluster.
// Prices the plan twice, without what shared links cost.
std::string IdleCollectiveNote(const Graph& graph, const Cluster& cluster,
                               const Plan& plan, const ProfileDb* profile,
                               const TrainingOptions& training,
                               const Cluster* whole = nullptr);

}  // namespace tessera
