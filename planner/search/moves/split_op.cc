// Gives one axis of one node to another of its factors, or to none; in a folded
// walk of one that has no like in its stage. Symmetric: node, axis and target
// are uniform, and back is the same draw with the old target.

#include "planner/search/moves/retarget.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const NodeId node(
      rng.Below(static_cast<uint32_t>(space.index.forward_nodes)));
  const auto change = DrawRetarget(draft.plan(), space, node, rng);
  if (!change.has_value()) return std::nullopt;
  if (draft.folded()) {
    const auto like =
        NodesLike(space, draft.plan(), node, Scope::kClassInStage);
    if (!like.has_value() || like->size() > 1) return std::nullopt;
  }
  draft.Touch(node);
  Apply(*change, draft.edited().ops[node.index()]);
  return 0;
}

}  // namespace

extern const Move kSplitOp;
const Move kSplitOp = {"split-op", "one axis of one operator", 2, Edit};

}  // namespace tessera
