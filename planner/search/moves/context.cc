// What a split of the sequence does in attention: in a block and those in
// scope, ranks with parts of a sequence gather all keys and values or pass them
// round in a ring; or the plan has its sequences in the zigzag order of the
// ranks that split them, or in their own. Symmetric: which of the two, block
// and scope are uniform, the blocks agree before and after, the number of ranks
// is the plan's, and back is the same draw.

#include "planner/plan/axis_roles.h"
#include "planner/plan/sequence_order.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> ToggleZigzag(const Plan& plan,
                                     const SearchSpace& space) {
  Plan candidate = plan;
  candidate.zigzag = plan.zigzag == 0
                         ? static_cast<int>(SequenceDegree(space.index, plan))
                         : 0;
  if (candidate.zigzag == 1) return std::nullopt;
  return Finish(space, plan, std::move(candidate), 0);
}

std::optional<Proposal> ToggleRing(const Plan& plan, const SearchSpace& space,
                                   Rng& rng) {
  const int block = DrawBlock(space, rng);
  const auto scope = static_cast<Scope>(rng.Below(kScopes));
  const auto blocks = BlocksIn(space, plan, block, scope);
  if (!blocks.has_value()) return std::nullopt;
  const auto own = RolesOf(space.index, plan, block);
  if (!own.has_value() || own->context == 0 || own->heads) return std::nullopt;
  Plan candidate = plan;
  for (int b : *blocks) {
    auto roles = RolesOf(space.index, plan, b);
    if (!roles.has_value()) return std::nullopt;
    if (roles->context == 0) continue;
    const GroupId group = GroupOfBlock(space, plan, b);
    const auto placed = [&](bool ring) {
      roles->ring = ring;
      return PlaceBlock(space.index, b, plan.groups[group.index()], group,
                        *roles);
    };
    // A block without attention agrees with either.
    if (!BlockIs(space.index, b, placed(own->ring), plan)) return std::nullopt;
    SetBlock(space.index, b, placed(!own->ring), candidate);
  }
  // The way back starts from what this block shows.
  const auto after = RolesOf(space.index, candidate, block);
  if (!after.has_value() || after->ring == own->ring) return std::nullopt;
  return Finish(space, plan, std::move(candidate), 0);
}

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  return rng.Below(3) == 0 ? ToggleZigzag(plan, space)
                           : ToggleRing(plan, space, rng);
}

}  // namespace

extern const Move kContext;
const Move kContext = {
    "context", "a ring of keys and values, or the zigzag order of sequences", 2,
    Propose};

}  // namespace tessera
