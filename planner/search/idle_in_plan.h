#pragma once
// Keys of a strategy that say something on the cluster, and yet change nothing
// of the plan that they are of: planner/plan/idle_keys.h has the others.
//
// Functions without state; thread-safe.

#include <optional>

#include "planner/ir/cluster.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/idle_keys.h"
#include "planner/plan/plan.h"
#include "planner/plan/strategy.h"
#include "planner/search/search_space.h"

namespace tessera {

// The first key without which the plan is the same, up to names. REQUIRES:
// `plan` is that of `strategy`.
std::optional<IdleKey> FirstIdleIn(const GraphIndex& index,
                                   const Cluster& cluster,
                                   const Strategy& strategy, const Plan& plan);

// `strategy` without what changes nothing of its plan, as --strategy takes it.
// REQUIRES: it gives a plan.
Strategy WithoutIdle(const SearchSpace& space, Strategy strategy);

}  // namespace tessera
