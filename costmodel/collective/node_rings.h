#pragma once
// Rings within one host.

#include <span>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// The links of `cluster` that join two devices.
std::vector<LinkId> DirectLinks(const Cluster& cluster);

struct NodeOrders {
  std::vector<std::vector<int>> rings;  // at least one
  // Whether direct links join the devices to a chain that does not close: the
  // one ring is that chain.
  bool open_chain = false;
  // Whether direct links make the rings.
  bool meshed = false;
};

// Orders in which rings may visit `devices`, as positions in it. Where the
// devices are joined by direct links (a mesh of NVLinks) these are as many
// Hamiltonian cycles as were found that share no link, each in both directions:
// on a DGX-1 with V100, where pairs have two, one or no NVLinks, three cycles,
// hence six rings, which use all 48 link directions. Rings are of one rate: of
// sets of them at the rates of the links, or half of these, the one that is
// fastest together. Where there is no cycle but a chain, as of five of those
// V100, it is the first found from the device with the fewest links. Elsewhere
// (a switch, two devices) it is the one ring in the given order. REQUIRES:
// `devices` is not empty; `direct_links` is DirectLinks(cluster).
NodeOrders NodeRings(const Cluster& cluster,
                     std::span<const LinkId> direct_links,
                     std::span<const DeviceId> devices);

}  // namespace tessera
