#pragma once
// Peak bytes on the devices of a plan, from the lifetimes of values.
//
// Tasks are walked in issue order: the order in which a rank's memory is taken
// and given back, whatever the clock says. A persistent value counts always;
// another one from the first task that touches it to the last (LastUses), both
// included. An alias is its root. Shards may differ by one element: the largest
// counts for every device. Kernels need no scratch worth counting. The world's
// values have a copy on every device.

#include <vector>

#include "planner/lower/task_graph.h"
#include "planner/plan/evaluation.h"

namespace tessera {

// By DeviceSets of the plan's groups (planner/plan/stages.h): a device holds
// what all its groups do. The parts are those at the first moment of the peak.
std::vector<MemoryUse> PeakMemory(const TaskGraph& tasks);

}  // namespace tessera
