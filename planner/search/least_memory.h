#pragma once

#include <algorithm>

#include "planner/ir/cluster.h"
#include "planner/plan/stages.h"

namespace tessera {

// That of the set's device that has least.
inline Bytes LeastMemory(const Cluster& cluster, const DeviceSet& set) {
  Bytes least = cluster.TypeOf(set.devices[0]).memory;
  for (DeviceId device : set.devices) {
    least = std::min(least, cluster.TypeOf(device).memory);
  }
  return least;
}

}  // namespace tessera
