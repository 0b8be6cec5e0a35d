// Switches sequence parallelism in a block and those in scope: norms, dropout
// and residuals split by sequence over the tensor axes, or repeated. Symmetric:
// block and scope are uniform, and the blocks agree before and after.

#include "planner/plan/axis_roles.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const int block = DrawBlock(space, rng);
  const auto scope = static_cast<Scope>(rng.Below(kScopes));
  const auto blocks = BlocksIn(space, plan, block, scope);
  if (!blocks.has_value()) return std::nullopt;
  const auto own = RolesOf(space.index, plan, block);
  if (!own.has_value() || own->tensor == 0) return std::nullopt;
  Plan candidate = plan;
  for (int b : *blocks) {
    auto roles = RolesOf(space.index, plan, b);
    if (!roles.has_value()) return std::nullopt;
    if (roles->tensor == 0) continue;
    const GroupId group = GroupOfBlock(space, plan, b);
    const auto placed = [&](bool sequence) {
      roles->sequence = sequence;
      return PlaceBlock(space.index, b, plan.groups[group.index()], group,
                        *roles);
    };
    // A block without a node to show it agrees with either.
    if (!BlockIs(space.index, b, placed(own->sequence), plan)) {
      return std::nullopt;
    }
    SetBlock(space.index, b, placed(!own->sequence), candidate);
  }
  // The way back starts from what this block shows.
  const auto after = RolesOf(space.index, candidate, block);
  if (!after.has_value() || after->sequence == own->sequence) {
    return std::nullopt;
  }
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kSequence;
const Move kSequence = {
    "sequence", "sequence parallelism of norms and residuals", 2, Propose};

}  // namespace tessera
