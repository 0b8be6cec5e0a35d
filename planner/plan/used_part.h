#pragma once
// Plans that leave devices of a cluster without work, as plans of the part that
// they use.
//
// Functions without state; thread-safe.

#include <optional>
#include <vector>

#include "planner/ir/cluster.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/strategy.h"

namespace tessera {

// By device, whether the plan uses it.
std::vector<bool> UsedDevices(const Cluster& cluster, const Plan& plan);

struct UsedPart {
  // The devices that the plan uses in the order of the whole, which are not
  // linked anew: for what asks for devices and not for routes between them.
  Cluster cluster;
  Plan plan;  // on these
};

// Nothing where the plan uses all devices.
std::optional<UsedPart> UsedPartOf(const Cluster& cluster, const Plan& plan);

// The strategy that gives the plan on the devices that it uses
// (UniformStrategy), be they all or not.
std::optional<Strategy> StrategyOnPart(const GraphIndex& index,
                                       const Cluster& cluster,
                                       const Plan& plan);

}  // namespace tessera
