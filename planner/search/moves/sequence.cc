// Switches, in a block and those in scope, sequence parallelism (norms, dropout
// and residuals split by sequence over the tensor axes, or repeated) or what
// the context axes split in attention (queries by sequence, or heads).
// Symmetric: block, scope and switch are uniform, and the blocks agree before
// and after.

#include <algorithm>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const int block = DrawBlock(space, rng);
  const auto scope = DrawScope(draft, kScopes, rng);
  auto blocks = BlocksIn(space, plan, block, scope);
  if (!blocks.has_value()) return std::nullopt;
  const std::optional<AxisRoles> own = draft.roles(block);
  if (!own.has_value() || (own->tensor | own->context) == 0) {
    return std::nullopt;
  }
  // A coin where the block has axes of both kinds, as it has on the way back.
  const bool in_attention =
      own->tensor == 0 || (own->context != 0 && rng.Below(2) == 1);
  bool AxisRoles::*const flag =
      in_attention ? &AxisRoles::heads : &AxisRoles::sequence;
  AxisSet AxisRoles::*const axes =
      in_attention ? &AxisRoles::context : &AxisRoles::tensor;
  const auto kinds = PlacedKindsOf(draft, *std::move(blocks));
  if (!kinds.has_value()) return std::nullopt;
  // A block by heads has no ring (context.cc): the way back would not know of
  // one.
  if (in_attention &&
      std::ranges::any_of(kinds->kinds, [](const PlacedKind& kind) {
        return kind.roles.ring;
      })) {
    return std::nullopt;
  }
  if (!Switch(*kinds, flag, (*own).*flag, axes, draft)) {
    return std::nullopt;
  }
  // The way back starts from what this block shows.
  const auto after = RolesOf(space.index, plan, block);
  if (!after.has_value() || (*after).*flag == (*own).*flag) {
    return std::nullopt;
  }
  return 0;
}

}  // namespace

extern const Move kSequence;
const Move kSequence = {
    "sequence",
    "sequence parallelism of norms and residuals, or attention by heads", 2,
    Edit};

}  // namespace tessera
