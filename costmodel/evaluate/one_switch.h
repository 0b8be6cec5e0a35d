#pragma once
// A cluster as its network would be at best.

#include <optional>

#include "planner/ir/cluster.h"

namespace tessera {

// `cluster` with all that lies between its hosts replaced by one switch, at
// which every host's links end: of a route between hosts its first and last
// links are left, shared with nobody else, so nothing takes longer. Nothing
// where all hosts hang on the same places of the network, which are alike
// then, and where hosts are joined beside it, or a vertex of a host has several
// links to it.
std::optional<Cluster> OnOneSwitch(const Cluster& cluster);

}  // namespace tessera
