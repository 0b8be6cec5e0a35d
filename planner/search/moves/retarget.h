#pragma once
// Which factor of a node an axis serves, and its change.

#include <optional>

#include "planner/base/rng.h"
#include "planner/search/search_space.h"

namespace tessera {

struct Retarget {
  AxisSet axis = 0;
  int from = -1;  // factor, or -1: none
  int to = -1;
};

// The factor that `axis` serves, or -1.
int FactorServedBy(const OpPlacement& placement, AxisSet axis);

// A uniform axis of the node's group and a uniform other target, or nothing
// where there is none.
std::optional<Retarget> DrawRetarget(const Plan& plan, const SearchSpace& space,
                                     NodeId node, Rng& rng);

void Apply(const Retarget& change, OpPlacement& placement);

}  // namespace tessera
