#pragma once
// Binary trees across the hosts of a group.

#include <cstddef>
#include <vector>

#include "costmodel/collective/algorithms.h"

namespace tessera {

// The rank that is this door (CollectiveGroup::doors) of a host.
int DoorRank(const CollectiveGroup& group, size_t host, int door);

// Of a host.
int MostRanks(const CollectiveGroup& group);

// One round for each level, sums going up and then results coming down, between
// the hosts' doors. Chunk door * trees + t goes along tree t; of two trees the
// inner hosts of one are leaves of the other, but for host 0 of an odd number
// of them, the first one's root, which has children in both. REQUIRES: `trees`
// is 1 or 2.
std::vector<Round> TreesAcrossHosts(const CollectiveGroup& group, int trees);

}  // namespace tessera
