#pragma once
// What the presets' devices cost while they run, as far as that is public: two
// tables with the source of every number.

#include <string_view>

#include "planner/ir/cluster.h"

namespace tessera {

// Watts that the board of a device type may draw. REQUIRES: the table has it.
double BoardWatts(std::string_view device);

// Fills in DeviceType::upkeep of a cluster made from the preset `topology`, or
// from none ("": no price); figures that no table has stay 0.
void SetUpkeep(std::string_view topology, Cluster& cluster);

// How many devices of the type `device` are rented together as one instance
// called `topology`; 0 where there is no such instance.
int InstanceDevices(std::string_view topology, std::string_view device);

}  // namespace tessera
