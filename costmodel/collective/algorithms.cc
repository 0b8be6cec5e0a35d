#include "costmodel/collective/algorithms.h"

#include <array>

namespace tessera {

std::span<const CollectiveAlgorithm> CollectiveAlgorithms() {
  static constexpr std::array kAlgorithms = {
      CollectiveAlgorithm{"ring", "rings over all ranks", RingApplies,
                          RingRounds},
      CollectiveAlgorithm{"hierarchical", "within each host, then across hosts",
                          HierarchicalApplies, HierarchicalRounds},
      CollectiveAlgorithm{"direct", "every rank to every other at once",
                          DirectApplies, DirectRounds},
      CollectiveAlgorithm{"rooted", "between one rank and all others",
                          RootedApplies, RootedRounds},
      CollectiveAlgorithm{"point-to-point", "one rank to another",
                          PointToPointApplies, PointToPointRounds},
      CollectiveAlgorithm{"neighbour", "every rank to the one before",
                          NeighbourApplies, NeighbourRounds},
  };
  return kAlgorithms;
}

}  // namespace tessera
