#pragma once
// Rings within one host.

#include <span>
#include <vector>

#include "planner/ir/cluster.h"

namespace tessera {

// By device, its links to other devices.
struct DirectLink {
  DeviceId to;
  double bandwidth = 0;  // bytes a second
};
using DirectLinks = std::vector<std::vector<DirectLink>>;
DirectLinks DirectLinksOf(const Cluster& cluster);

// Bytes a second from the i-th to the j-th of some devices over direct links; 0
// where there is none, or not both ways.
using DirectRates = std::vector<std::vector<double>>;
DirectRates RatesAmong(const DirectLinks& links,
                       std::span<const DeviceId> devices);

struct NodeOrders {
  std::vector<std::vector<int>> rings;  // at least one
  // Whether direct links join the devices to a chain that does not close: the
  // one ring is that chain.
  bool open_chain = false;
  // Whether direct links make the rings.
  bool meshed = false;
};

// Orders in which rings may visit devices, as positions among them. Where the
// devices are joined by direct links (a mesh of NVLinks) these are as many
// Hamiltonian cycles as were found that share no link, each in both directions:
// on a DGX-1 with V100, where pairs have two, one or no NVLinks, three cycles,
// hence six rings, which use all 48 link directions. Rings are of one rate: of
// sets of them at the rates of the links, or half of these, the one that is
// fastest together. Where there is no cycle but a chain, as of five of those
// V100, it is the first found from the device with the fewest links. Elsewhere
// (a switch, two devices) it is the one ring in the given order. REQUIRES: at
// least one device.
NodeOrders NodeRings(const DirectRates& rates);

}  // namespace tessera
