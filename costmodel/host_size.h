#pragma once
// How many devices a host has. Pure.

#include <algorithm>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// By host.
inline std::vector<int> DevicesOfHosts(const Cluster& cluster) {
  std::vector<int> count(static_cast<size_t>(cluster.num_nodes()));
  for (const Device& device : cluster.devices) {
    ++count[static_cast<size_t>(device.node)];
  }
  return count;
}

// As many as a host has at most. REQUIRES: there are devices.
inline int MostDevicesOfHost(const Cluster& cluster) {
  return std::ranges::max(DevicesOfHosts(cluster));
}

// As few as a host has that has some. REQUIRES: there are devices.
inline int LeastDevicesOfHost(const Cluster& cluster) {
  std::vector<int> count = DevicesOfHosts(cluster);
  std::erase(count, 0);
  return std::ranges::min(count);
}

}  // namespace tessera
