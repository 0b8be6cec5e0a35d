#pragma once
// How many devices a host has. Pure.

#include <algorithm>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// As many as a host has at most. REQUIRES: there are devices.
inline int MostDevicesOfHost(const Cluster& cluster) {
  std::vector<int> count(static_cast<size_t>(cluster.num_nodes()));
  for (const Device& device : cluster.devices) {
    ++count[static_cast<size_t>(device.node)];
  }
  return std::ranges::max(count);
}

}  // namespace tessera
