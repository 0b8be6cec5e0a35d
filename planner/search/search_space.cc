#include "planner/search/search_space.h"

#include <algorithm>
#include <map>
#include <optional>

#include "planner/plan/axis_roles.h"
#include "planner/plan/validate.h"

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

}  // namespace

SearchSpace::SearchSpace(const Graph& graph, const Cluster& cluster_in)
    : index(graph),
      cluster(&cluster_in),
      batch_primes(DistinctPrimes(graph.global_batch)),
      device_primes(
          DistinctPrimes(static_cast<int64_t>(cluster_in.devices.size()))) {
  std::map<int, int> devices_of_node;
  for (const Device& device : cluster_in.devices) {
    ++devices_of_node[device.node];
  }
  least_devices_of_node = static_cast<int>(cluster_in.devices.size());
  for (const auto& [node, devices] : devices_of_node) {
    least_devices_of_node = std::min(least_devices_of_node, devices);
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
    return x.devices == y.devices &&
           std::equal(x.axes.begin(), x.axes.end(), y.axes.begin(),
                      y.axes.end(), [](const MeshAxis& p, const MeshAxis& q) {
                        return p.size == q.size;
                      });
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
