#pragma once
// Rings over the ranks of a group.

#include <vector>

#include "costmodel/collective/algorithms.h"

namespace tessera {

// The orders in which the rings visit all ranks. Within one host its own;
// across hosts one for each door (doors.h). In a host it goes by one of the
// host's orders; those that direct links make are shared out among the rings.
std::vector<std::vector<int>> RingOrders(const CollectiveGroup& group);

}  // namespace tessera
