// Gives one axis of one node to another of its factors, or to none.
// Symmetric: node, axis and target are uniform, and back is the same draw with
// the old target.

#include "planner/search/moves/retarget.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const NodeId node(
      rng.Below(static_cast<uint32_t>(space.index.forward_nodes)));
  const auto change = DrawRetarget(plan, space, node, rng);
  if (!change.has_value()) return std::nullopt;
  Plan candidate = plan;
  Apply(*change, candidate.ops[node.index()]);
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kSplitOp;
const Move kSplitOp = {"split-op", "one axis of one operator", 2, Propose};

}  // namespace tessera
