// What a split of the sequence does in attention: in a block and those in
// scope, ranks with parts of a sequence gather all keys and values or pass them
// round in a ring; or the plan has its sequences in the zigzag order of the
// ranks that split them, or in their own. Symmetric: which of the two, block
// and scope are uniform, the blocks agree before and after, the number of ranks
// is the plan's, and back is the same draw.

#include "planner/plan/sequence_order.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<double> ToggleZigzag(Draft& draft) {
  const Plan& plan = draft.plan();
  const GraphIndex& index = draft.space().index;
  if (!index.has_attention) return std::nullopt;
  const int zigzag =
      plan.zigzag == 0 ? static_cast<int>(SequenceDegree(index, plan)) : 0;
  if (zigzag == 1) return std::nullopt;
  draft.edited().zigzag = zigzag;
  return 0;
}

std::optional<double> ToggleRing(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const int block = DrawBlock(space, rng);
  const auto scope = DrawScope(draft, kScopes, rng);
  auto blocks = BlocksIn(space, plan, block, scope);
  if (!blocks.has_value()) return std::nullopt;
  const auto kinds = PlacedKindsOf(draft, *std::move(blocks));
  if (!kinds.has_value()) return std::nullopt;
  const AxisRoles& own = kinds->Of(block).roles;
  if (own.context == 0 || own.heads ||
      !Switch(*kinds, &AxisRoles::ring, own.ring, &AxisRoles::context, draft)) {
    return std::nullopt;
  }
  // The way back starts from what this block shows.
  const auto after = RolesOf(space.index, plan, block);
  if (!after.has_value() || after->ring == own.ring) return std::nullopt;
  return 0;
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  return rng.Below(3) == 0 ? ToggleZigzag(draft) : ToggleRing(draft, rng);
}

}  // namespace

extern const Move kContext;
const Move kContext = {
    "context", "a ring of keys and values, or the zigzag order of sequences", 2,
    Edit};

}  // namespace tessera
