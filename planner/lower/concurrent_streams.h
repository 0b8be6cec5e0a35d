#pragma once
// Whether the devices of a plan compute and communicate at the same time: then
// tasks have a stream for each of both, else one for all. Pure.

#include "planner/ir/cluster.h"
#include "planner/plan/plan.h"

namespace tessera {

inline bool HasConcurrentStreams(const Cluster& cluster, const Plan& plan) {
  return cluster.stack.overlaps &&
         cluster.TypeOf(plan.groups[0].devices[0]).concurrent_streams;
}

}  // namespace tessera
