#pragma once
// Clusters with parts that failed, that are slow, that stand by, or that were
// added. Functions without state; clusters are values.

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/cluster.h"

namespace tessera {

// Takes parts out of `cluster`, all by the names of the whole one:
// "node3.nic0" (any vertex), "node3.gpu1--node3.nvswitch" (the links between
// two, in both directions), "device17" (by rank) or "node3". Of a node that
// loses a device the others leave too, as schedulers drain it, unless it is the
// only one. What was done is said in `notes`, what failed in the cluster's
// name. Ranks and nodes are numbered anew. Errors: a part that there is not,
// one given twice, and what leaves devices that do not reach each other, or
// none. `whole`, if it is not null, becomes the cluster with the same devices
// before anything else failed. REQUIRES: `cluster` is valid.
Result<void> Fail(const std::vector<std::string>& parts, Cluster& cluster,
                  std::vector<std::string>& notes, Cluster* whole = nullptr);

// Multiplies the peaks of all element types.
void ScalePeaks(double factor, DeviceType& type);

// Makes a device ("device17", "node3.gpu1") or all of a node ("node3") slower
// by `factor`, a type of its own by the same name (DeviceType::slowness). Of
// any other vertex ("node3.nic0") its links, or the links between two
// ("node3.gpu1--node3.nvswitch"), have so much less bandwidth
// (LinkType::slowness). REQUIRES: factor > 0.
Result<void> SlowDown(std::string_view part, double factor, Cluster& cluster);
void SlowDown(const std::vector<DeviceId>& devices, double factor,
              Cluster& cluster);

// The cluster with `nodes` nodes: those it lacks are copies of its own in turn,
// with their bridges and NICs, on the switches that these are on. So switches
// have as many ports as it takes, and trunks stay as they are. REQUIRES: nodes
// is at least its own. An error where nodes are joined to nothing outside.
Result<Cluster> WithMoreNodes(const Cluster& cluster, int nodes);

// The devices that are `kept`, by rank, with their nodes; the others stand by.
// REQUIRES: one at least is.
Cluster OnlyDevices(const Cluster& cluster, const std::vector<bool>& kept);
// The first `devices` of them. REQUIRES: 1 <= devices <=
// cluster.devices.size().
Cluster FirstDevices(const Cluster& cluster, size_t devices);

}  // namespace tessera
