#include "planner/search/moves/retarget.h"

#include <vector>

namespace tessera {

int FactorServedBy(const OpPlacement& placement, AxisSet axis) {
  for (int f = 0; f < kMaxFactors; ++f) {
    if (placement.axes[static_cast<size_t>(f)] & axis) return f;
  }
  return -1;
}

std::optional<Retarget> DrawRetarget(const Plan& plan, const SearchSpace& space,
                                     NodeId node, Rng& rng) {
  const OpPlacement& placement = plan.ops[node.index()];
  const DeviceGroup& group = plan.groups[placement.group.index()];
  if (group.axes.empty()) return std::nullopt;
  Retarget change;
  change.axis =
      AxisSet{1} << rng.Below(static_cast<uint32_t>(group.axes.size()));
  change.from = FactorServedBy(placement, change.axis);
  std::vector<int> targets;
  if (change.from != -1) targets.push_back(-1);
  const std::vector<Factor>& factors =
      space.index.graph->node(node).rule.factors;
  for (int f = 0; f < static_cast<int>(factors.size()); ++f) {
    if (factors[static_cast<size_t>(f)].splittable && f != change.from) {
      targets.push_back(f);
    }
  }
  if (targets.empty()) return std::nullopt;
  change.to = targets[rng.Below(static_cast<uint32_t>(targets.size()))];
  return change;
}

void Apply(const Retarget& change, OpPlacement& placement) {
  if (change.from >= 0) {
    placement.axes[static_cast<size_t>(change.from)] &= ~change.axis;
  }
  if (change.to >= 0) {
    placement.axes[static_cast<size_t>(change.to)] |= change.axis;
  }
}

}  // namespace tessera
