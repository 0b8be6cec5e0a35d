#pragma once
// Clusters of unlike nodes: the nodes of several presets behind one network.

#include <vector>

#include "planner/ir/cluster.h"
#include "planner/topology/topologies.h"

namespace tessera {

// Some nodes of one preset.
struct ClusterPart {
  const Topology* topology = nullptr;
  Cluster nodes;
};

// All nodes of the parts, in their order. NIC r of every node that has one is
// on leaf switch r, and all leaves on one spine that carries what they do.
// REQUIRES: two parts at least, each as its preset makes it, and with NICs.
Cluster MixtureOf(const std::vector<ClusterPart>& clusters);

}  // namespace tessera
