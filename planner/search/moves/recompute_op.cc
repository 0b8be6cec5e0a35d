// Changes whether a node runs again in backward, alone or with its like: the
// nodes in its place in equal blocks, of its stage or of the plan. All must
// agree before, as they do after. Symmetric: node and scope are uniform.

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const NodeId node(
      rng.Below(static_cast<uint32_t>(space.index.forward_nodes)));
  const auto scope = DrawScope(draft, 3, rng);  // up to kClass
  if (!CanRecompute(*space.index.graph, node)) return std::nullopt;
  const bool before = plan.ops[node.index()].recompute;
  const auto nodes = NodesLike(space, plan, node, scope);
  if (!nodes.has_value()) return std::nullopt;
  for (NodeId like : *nodes) {
    if (plan.ops[like.index()].recompute != before) return std::nullopt;
    draft.Touch(like);
    draft.edited().ops[like.index()].recompute = !before;
  }
  return 0;
}

}  // namespace

extern const Move kRecomputeOp;
const Move kRecomputeOp = {
    "recompute-op", "whether an operator runs again in backward", 1, Edit};

}  // namespace tessera
