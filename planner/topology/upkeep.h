#pragma once
// What the presets' devices cost while they run, as far as that is public: two
// tables with the source of every number.

#include <string_view>

#include "planner/ir/cluster.h"

namespace tessera {

// Fills in DeviceType::upkeep of a cluster made from the preset `topology`, or
// from none ("": no price); figures that no table has stay 0.
void SetUpkeep(std::string_view topology, Cluster& cluster);

}  // namespace tessera
