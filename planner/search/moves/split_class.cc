// Gives one axis to another factor in a node and in all its like: the nodes in
// its place in equal blocks, of its stage or of the plan. All must agree on
// the axis before, as they do after. Symmetric: node, scope, axis and target
// are uniform, and back is the same draw with the old target.

#include "planner/search/moves/retarget.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const NodeId node(
      rng.Below(static_cast<uint32_t>(space.index.forward_nodes)));
  const Scope scope = rng.Below(2) == 0 ? Scope::kClassInStage : Scope::kClass;
  const auto change = DrawRetarget(plan, space, node, rng);
  if (!change.has_value()) return std::nullopt;
  const auto nodes = NodesLike(space, plan, node, scope);
  if (!nodes.has_value()) return std::nullopt;
  for (NodeId like : *nodes) {
    draft.Touch(like);
    OpPlacement& placement = draft.edited().ops[like.index()];
    if (FactorServedBy(placement, change->axis) != change->from) {
      return std::nullopt;
    }
    Apply(*change, placement);
  }
  return 0;
}

}  // namespace

extern const Move kSplitClass;
const Move kSplitClass = {
    "split-class", "one axis of an operator in all equal layers", 4, Edit};

}  // namespace tessera
