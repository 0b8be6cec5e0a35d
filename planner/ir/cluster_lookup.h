#pragma once
// What is where in a cluster. REQUIRES of all: it is valid.

#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// The type of a link, as Cluster::TypeOf is that of a device.
inline const LinkType& TypeOf(const Cluster& cluster, const Link& link) {
  return cluster.link_types[static_cast<size_t>(link.type)];
}
inline const LinkType& TypeOf(const Cluster& cluster, LinkId link) {
  return TypeOf(cluster, cluster.links[link.index()]);
}

// By vertex the device that it is; invalid where it is none.
inline std::vector<DeviceId> DevicesAtVertices(const Cluster& cluster) {
  std::vector<DeviceId> at(cluster.vertices.size());
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    at[cluster.devices[d].vertex.index()] = DeviceId(static_cast<int64_t>(d));
  }
  return at;
}

// By node the first of its devices, and behind the last node how many there are
// of all.
inline std::vector<int> FirstDevicesOfNodes(const Cluster& cluster) {
  std::vector<int> first;
  for (size_t d = 0; d < cluster.devices.size(); ++d) {
    if (cluster.devices[d].node == static_cast<int>(first.size())) {
      first.push_back(static_cast<int>(d));
    }
  }
  first.push_back(static_cast<int>(cluster.devices.size()));
  return first;
}

}  // namespace tessera
