#pragma once
// What a cluster costs while somebody has it. An instance of a cloud is rented
// whole: a node that is named after one ("p5.48xlarge:1x4") costs what all
// devices of the instance do, however many of them the cluster has. Devices
// that a plan leaves idle are paid for, too. Functions without state.

#include <optional>
#include <string>

#include "planner/ir/cluster.h"

namespace tessera {

// USD; nothing where a device has no price.
std::optional<double> UsdPerHour(const Cluster& cluster);

// "…: instances are rented whole" where the cluster has parts of some; else "".
std::string PartsOfInstancesNote(const Cluster& cluster);

}  // namespace tessera
