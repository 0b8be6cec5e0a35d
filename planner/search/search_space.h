#pragma once
// SearchSpace: the plans of one graph on one cluster, and what the moves ask of
// them again and again. Immutable, so thread-safe; graph and cluster outlive
// it.

#include <vector>

#include "planner/ir/cluster.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/search/constraints.h"

namespace tessera {

struct SearchSpace {
  SearchSpace(const Graph& graph, const Cluster& cluster);
  int devices() const { return static_cast<int>(cluster->devices.size()); }

  GraphIndex index;
  const Cluster* cluster;
  std::vector<int> batch_primes;   // distinct prime factors, global batch
  std::vector<int> device_primes;  // the same of the number of devices
  int least_devices_of_node = 1;   // of the hosts with devices
  bool unlike_speeds = false;      // of devices: HasUnlikeSpeeds
  bool may_reorder = false;        // sequences: no ReorderProblem
  Constraints constraints;         // set before the search, or none

  // By block: the weights at home there, and the edges of the index that begin
  // or end there.
  std::vector<std::vector<size_t>> weights_of_block;
  std::vector<std::vector<GraphIndex::BlockEdge>> edges_of_block;
  // By GraphIndex::block_class the blocks with nodes, ascending.
  std::vector<std::vector<int>> blocks_of_class;
  // By block: the first one that PlaceBlock cannot tell from it on groups of
  // one mesh. Equal blocks may have unlike neighbours.
  std::vector<int> placed_like;
  // Weights are of one kind in the same place of equal blocks.
  std::vector<size_t> kind_of_weight;
  std::vector<std::vector<size_t>> weights_of_kind;
  std::vector<int> weight_of_tensor;  // -1: no weight
};

// Whether the space's constraints leave a valid plan.
bool Allowed(const SearchSpace& space, const Plan& plan);

// The search walks over canonical plans: valid ones in which a weight with a
// ZeRO stage is cut over the axes of ZeroAxes, or over those of them within a
// node where that is less (planner/plan/axis_roles.h), so that a stage and a
// bit say all of a weight's storage. Makes `plan` canonical; false where it is
// invalid.
bool MakeCanonical(const SearchSpace& space, Plan& plan);

// By weight of a canonical plan, whether it is cut within nodes only.
std::vector<bool> CutWithinNode(const SearchSpace& space, const Plan& plan);
// Cuts the weights so, those without a stage not at all. False where one that
// is to be cut within nodes has no axes across them.
bool SetCuts(const SearchSpace& space, const std::vector<bool>& within_node,
             Plan& plan);

// Whether two plans are one state of the search: equal but for the names of
// groups, axes and cluster.
bool SameUpToNames(const Plan& a, const Plan& b);

}  // namespace tessera
