#include "planner/search/search_space.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "planner/plan/axis_roles.h"
#include "planner/plan/sequence_order.h"
#include "planner/plan/strategy.h"
#include "planner/plan/validate.h"
#include "planner/plan/work_shares.h"

namespace tessera {
namespace {

std::vector<int> DistinctPrimes(int64_t n) {
  std::vector<int> primes = PrimeFactors(n);
  primes.erase(std::unique(primes.begin(), primes.end()), primes.end());
  return primes;
}

// Of weights' zero axes those within a node. Looks at the devices of each group
// once: a group may have thousands.
class CutsWithinNode {
 public:
  CutsWithinNode(const SearchSpace& space, const Plan& plan)
      : space_(space), plan_(plan), of_group_(plan.groups.size()) {}

  AxisSet Of(size_t weight) {
    const NodeId home = space_.index.weights[weight].home.node;
    const size_t group = plan_.ops[home.index()].group.index();
    std::optional<AxisSet>& within = of_group_[group];
    if (!within) within = AxesWithinNode(*space_.cluster, plan_.groups[group]);
    return InnermostWithin(*within, plan_.weights[weight].zero_axes);
  }

 private:
  const SearchSpace& space_;
  const Plan& plan_;
  std::vector<std::optional<AxisSet>> of_group_;
};

// All that PlaceBlock reads of a block besides its class: what others make of
// its results, and what its operands are to others.
std::vector<int> PlacingOf(const GraphIndex& index, size_t block) {
  const Graph& graph = *index.graph;
  std::vector<int> text = {index.block_class[block]};
  for (NodeId id : index.nodes_of_block[block]) {
    for (const auto* factors : {&index.sample_factor, &index.sequence_factor,
                                &index.expert_factor, &index.dispatch_factor}) {
      text.push_back((*factors)[id.index()]);
    }
    for (TensorId operand : graph.node(id).operands) {
      text.push_back(index.vocabulary[operand.index()] ? 1 : 0);
    }
    for (TensorId result : graph.node(id).results) {
      for (bool carried : index.carried[result.index()]) {
        text.push_back(carried ? 1 : 0);
      }
    }
  }
  return text;
}

}  // namespace

SearchSpace::SearchSpace(const Graph& graph, const Cluster& cluster_in)
    : index(graph),
      cluster(&cluster_in),
      batch_primes(DistinctPrimes(graph.global_batch)),
      device_primes(
          DistinctPrimes(static_cast<int64_t>(cluster_in.devices.size()))) {
  unlike_speeds = HasUnlikeSpeeds(cluster_in, graph.dtype);
  may_reorder = ReorderProblem(index).empty();
  std::map<int, int> devices_of_node;
  for (const Device& device : cluster_in.devices) {
    ++devices_of_node[device.node];
  }
  least_devices_of_node = static_cast<int>(cluster_in.devices.size());
  for (const auto& [node, devices] : devices_of_node) {
    least_devices_of_node = std::min(least_devices_of_node, devices);
  }

  const size_t blocks = index.nodes_of_block.size();
  weights_of_block.resize(blocks);
  edges_of_block.resize(blocks);
  blocks_of_class.resize(blocks);
  placed_like.resize(blocks, 0);
  const auto block_of = [&](NodeId node) {
    return static_cast<size_t>(graph.node(node).block);
  };
  std::map<std::vector<int>, int> first_placed;
  for (size_t b = 0; b < blocks; ++b) {
    if (index.nodes_of_block[b].empty()) continue;
    const auto block = static_cast<int>(b);
    blocks_of_class[static_cast<size_t>(index.block_class[b])].push_back(block);
    placed_like[b] =
        first_placed.emplace(PlacingOf(index, b), block).first->second;
  }
  for (const GraphIndex::BlockEdge& edge : index.block_edges) {
    edges_of_block[block_of(edge.producer)].push_back(edge);
    edges_of_block[block_of(edge.consumer)].push_back(edge);
  }
  weight_of_tensor.resize(graph.tensors.size(), -1);
  // By block class, position and operand.
  std::map<std::array<size_t, 3>, size_t> kinds;
  for (size_t w = 0; w < index.weights.size(); ++w) {
    const GraphIndex::WeightUse& weight = index.weights[w];
    weight_of_tensor[weight.tensor.index()] = static_cast<int>(w);
    const NodeId home = weight.home.node;
    const size_t block = block_of(home);
    weights_of_block[block].push_back(w);
    const auto kind =
        kinds
            .emplace(
                std::array{static_cast<size_t>(index.block_class[block]),
                           index.position[home.index()], weight.home.operand},
                weights_of_kind.size())
            .first->second;
    if (kind == weights_of_kind.size()) weights_of_kind.emplace_back();
    kind_of_weight.push_back(kind);
    weights_of_kind[kind].push_back(w);
  }
}

bool Allowed(const SearchSpace& space, const Plan& plan) {
  return space.constraints.empty() ||
         space.constraints.Violations(space.index, *space.cluster, plan) == 0;
}

bool MakeCanonical(const SearchSpace& space, Plan& plan) {
  // ZeroAxes looks meshes up, so these are checked first, then the whole.
  const std::vector<WeightPlacement> wanted = plan.weights;
  for (WeightPlacement& weight : plan.weights) weight.zero_axes = 0;
  if (!IsValid(space.index, *space.cluster, plan)) return false;
  SetZeroAxes(space.index, plan);
  if (space.cluster->num_nodes() == 1) return true;
  CutsWithinNode cuts(space, plan);
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    AxisSet& axes = plan.weights[w].zero_axes;
    if (wanted[w].zero_axes == 0 || wanted[w].zero_axes == axes) continue;
    const AxisSet within = cuts.Of(w);
    if (wanted[w].zero_axes == within) axes = within;
  }
  return true;
}

std::vector<bool> CutWithinNode(const SearchSpace& space, const Plan& plan) {
  std::vector<bool> within(plan.weights.size(), false);
  if (space.cluster->num_nodes() == 1) return within;
  const std::vector<AxisSet> whole = AllZeroAxes(space.index, plan);
  for (size_t w = 0; w < within.size(); ++w) {
    within[w] = plan.weights[w].zero_axes != whole[w];
  }
  return within;
}

bool SetCuts(const SearchSpace& space, const std::vector<bool>& within_node,
             Plan& plan) {
  SetZeroAxes(space.index, plan);
  CutsWithinNode cuts(space, plan);
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (!within_node[w] || plan.weights[w].zero_stage == 0) continue;
    const AxisSet within = cuts.Of(w);
    if (within == 0 || within == plan.weights[w].zero_axes) return false;
    plan.weights[w].zero_axes = within;
  }
  return true;
}

bool SameUpToNames(const Plan& a, const Plan& b) {
  const auto same_group = [](const DeviceGroup& x, const DeviceGroup& y) {
    return x.devices == y.devices && SameMesh(x, y);
  };
  return a.graph_fingerprint == b.graph_fingerprint &&
         a.schedule == b.schedule && a.microbatches == b.microbatches &&
         a.ops == b.ops && a.weights == b.weights && a.actions == b.actions &&
         a.bucket_bytes == b.bucket_bytes && a.prefetch == b.prefetch &&
         a.zigzag == b.zigzag &&
         std::equal(a.groups.begin(), a.groups.end(), b.groups.begin(),
                    b.groups.end(), same_group);
}

}  // namespace tessera
