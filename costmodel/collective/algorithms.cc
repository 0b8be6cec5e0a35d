#include "costmodel/collective/algorithms.h"

#include <array>

namespace tessera {

std::span<const CollectiveAlgorithm> CollectiveAlgorithms() {
  using enum SendPattern;
  static constexpr std::array kAlgorithms = {
      CollectiveAlgorithm{"ring", "rings over all ranks", kPipeline, true,
                          RingApplies, RingRounds},
      CollectiveAlgorithm{"double-tree",
                          "chains in each host, two binary trees across hosts",
                          kPipeline, true, TreeApplies, DoubleTreeRounds},
      CollectiveAlgorithm{"nvls", "sums in the host's switch", kInSwitch, true,
                          NvlsApplies, NvlsRounds},
      CollectiveAlgorithm{"nvls-tree",
                          "sums in each host's switch, two binary trees across "
                          "hosts",
                          kInSwitch, true, NvlsTreeApplies, NvlsTreeRounds},
      CollectiveAlgorithm{"tree",
                          "chains in each host, one binary tree across hosts",
                          kPipeline, false, TreeApplies, SingleTreeRounds},
      CollectiveAlgorithm{
          "halving-doubling", "exchanges over halved or doubled distances",
          kPipeline, false, HalvingDoublingApplies, HalvingDoublingRounds},
      CollectiveAlgorithm{"hierarchical", "within each host, then across hosts",
                          kPipeline, false, HierarchicalApplies,
                          HierarchicalRounds},
      // NCCL's PXN, on by default: GPUs hand on what is for another rail to the
      // GPU of their host that is on it ("Doubling all2all Performance with
      // NVIDIA Collective Communication Library 2.12", NVIDIA, 2022). Here to
      // that of its index, among hosts of as many ranks.
      CollectiveAlgorithm{"hierarchical-all-to-all",
                          "exchanges within each host, then across hosts",
                          kExchange, true, HierarchicalExchangeApplies,
                          HierarchicalExchangeRounds},
      CollectiveAlgorithm{"direct", "every rank to every other at once",
                          kExchange, true, DirectApplies, DirectRounds},
      CollectiveAlgorithm{"rooted", "between one rank and all others",
                          kPipeline, true, RootedApplies, RootedRounds},
      CollectiveAlgorithm{"point-to-point", "one rank to another", kExchange,
                          true, PointToPointApplies, PointToPointRounds},
      CollectiveAlgorithm{"neighbour", "every rank to the one before",
                          kExchange, true, NeighbourApplies, NeighbourRounds},
  };
  return kAlgorithms;
}

}  // namespace tessera
