#pragma once
// Binary trees across the hosts of a group.

#include <functional>
#include <vector>

#include "costmodel/collective/algorithms.h"

namespace tessera {

// One round for each level, sums going up and then results coming down, between
// head(host, chain) of each host. Chunk chain * trees + t goes along tree t; of
// two trees the inner hosts of one are leaves of the other.
// REQUIRES: hosts of equal size; `trees` is 1 or 2.
std::vector<Round> TreesAcrossHosts(
    const CollectiveGroup& group, int trees,
    const std::function<int(size_t host, int chain)>& head);

}  // namespace tessera
