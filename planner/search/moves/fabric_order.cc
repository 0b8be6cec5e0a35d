// Swaps two neighbouring axes of the mesh of one group or of all: what was on
// nearer devices goes to farther ones. Placements follow their axes. Its own
// way back, so symmetric.

#include <utility>

#include "planner/search/move.h"

namespace tessera {
namespace {

AxisSet Swapped(AxisSet set, uint32_t lower) {
  const AxisSet a = set >> lower & 1;
  const AxisSet b = set >> (lower + 1) & 1;
  set &= ~(AxisSet{3} << lower);
  return set | b << lower | a << (lower + 1);
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const GroupId chosen(rng.Below(static_cast<uint32_t>(plan.groups.size())));
  const bool all = rng.Below(2) == 1;
  const auto axes =
      static_cast<uint32_t>(plan.groups[chosen.index()].axes.size());
  if (axes < 2) return std::nullopt;
  const uint32_t lower = rng.Below(axes - 1);
  std::vector<bool> swapped(plan.groups.size(), all);
  swapped[chosen.index()] = true;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    if (swapped[g] && !SameMesh(plan.groups[g], plan.groups[chosen.index()])) {
      return std::nullopt;
    }
  }
  Plan candidate = plan;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    if (!swapped[g]) continue;
    std::swap(candidate.groups[g].axes[lower],
              candidate.groups[g].axes[lower + 1]);
  }
  for (OpPlacement& placement : candidate.ops) {
    if (!swapped[placement.group.index()]) continue;
    for (AxisSet& set : placement.axes) set = Swapped(set, lower);
    placement.streamed = Swapped(placement.streamed, lower);
    placement.rooted = Swapped(placement.rooted, lower);
  }
  for (size_t w = 0; w < candidate.weights.size(); ++w) {
    const NodeId home = space.index.weights[w].home.node;
    if (!swapped[plan.ops[home.index()].group.index()]) continue;
    AxisSet& rooted = candidate.weights[w].rooted;
    rooted = Swapped(rooted, lower);
  }
  draft.Replace(std::move(candidate));
  return 0;
}

}  // namespace

extern const Move kFabricOrder;
const Move kFabricOrder = {"fabric-order",
                           "two neighbouring mesh axes change places", 1, Edit};

}  // namespace tessera
