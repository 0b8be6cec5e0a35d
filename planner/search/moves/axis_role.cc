// Turns an axis between data, context, tensor and (where there are experts)
// expert parallelism in a whole block, in its like, in a stage or in the plan,
// and derives all placements anew: the mesh factored otherwise, or tensor
// parallelism switched on or off.
//
// Every block in scope must have derived placements and the axis in one role.
// Block, scope, axis and new role are uniform, so back is as likely, but for
// two coins: with the first tensor axis comes a draw of sequence parallelism,
// which the way back does not make (log 2); and in the scope of the plan one of
// whether the microbatches or the samples of a replica stay (made both ways).

#include <algorithm>
#include <cmath>

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

enum class AxisRole : uint8_t { kData, kContext, kTensor, kExpert };

// A block without experts shows expert axes as data axes, so the fourth role
// is for others only.
uint32_t NumberOfRoles(const SearchSpace& space) {
  return space.index.has_experts ? 4 : 3;
}

AxisSet& SetOf(AxisRoles& roles, AxisRole role) {
  switch (role) {
    case AxisRole::kData:
      return roles.data;
    case AxisRole::kContext:
      return roles.context;
    case AxisRole::kTensor:
      return roles.tensor;
    case AxisRole::kExpert:
      break;
  }
  return roles.expert;
}

AxisRole RoleIn(const AxisRoles& roles, AxisSet axis) {
  return roles.data & axis      ? AxisRole::kData
         : roles.context & axis ? AxisRole::kContext
         : roles.expert & axis  ? AxisRole::kExpert
                                : AxisRole::kTensor;
}

bool SplitsSamples(AxisRole role) {
  return role == AxisRole::kData || role == AxisRole::kExpert;
}

struct Turning {
  AxisSet axis = 0;
  AxisRole from = AxisRole::kData;
  AxisRole to = AxisRole::kData;

  Turning Back() const { return {axis, to, from}; }
};

// Turns the axis in `roles`. The sequence flag goes to `sequence` where it is
// given.
void Turn(AxisRoles& roles, const Turning& turning,
          std::optional<bool> sequence) {
  SetOf(roles, turning.from) &= ~turning.axis;
  SetOf(roles, turning.to) |= turning.axis;
  if (sequence.has_value()) roles.sequence = *sequence;
  roles.folded &= roles.tensor;
  if (roles.tensor == 0) roles.sequence = false;
  if (roles.context == 0) roles.heads = roles.ring = false;
}

bool IsFirstTensorAxis(const AxisRoles& roles, const Turning& turning) {
  return turning.to == AxisRole::kTensor && roles.tensor == 0;
}
bool IsLastTensorAxis(const AxisRoles& roles, const Turning& turning) {
  return turning.from == AxisRole::kTensor && roles.tensor == turning.axis;
}

// By kind.
using Placements = std::vector<std::vector<OpPlacement>>;

// Of each kind its placements with the axis turned, or nothing where that does
// not apply.
std::optional<Placements> Turned(const SearchSpace& space, const Plan& plan,
                                 const PlacedKinds& kinds,
                                 const Turning& turning,
                                 std::optional<bool> sequence) {
  for (PlacedKind kind : kinds.kinds) {
    if ((SetOf(kind.roles, turning.from) & turning.axis) == 0) {
      return std::nullopt;
    }
  }
  Placements turned;
  for (PlacedKind kind : kinds.kinds) {
    Turn(kind.roles, turning, sequence);
    turned.push_back(PlacementsOf(space, plan, kind.block, kind.roles));
  }
  return turned;
}

// The placements that each kind has.
Placements PlacementsIn(const SearchSpace& space, const Plan& plan,
                        const PlacedKinds& kinds) {
  Placements placements;
  for (const PlacedKind& kind : kinds.kinds) {
    auto& of_block = placements.emplace_back();
    for (NodeId node :
         space.index.nodes_of_block[static_cast<size_t>(kind.block)]) {
      of_block.push_back(plan.ops[node.index()]);
    }
  }
  return placements;
}

bool SameAxes(const Placements& a, const Placements& b) {
  return std::ranges::equal(a, b, [](const auto& of_a, const auto& of_b) {
    return std::ranges::equal(
        of_a, of_b, [](const OpPlacement& x, const OpPlacement& y) {
          return x.axes == y.axes && x.streamed == y.streamed;
        });
  });
}

// The log of the ratio of a turn that the draft has, or nothing where the same
// draw does not lead back: roles that a block cannot show (an axis too large
// for it) and sequence flags that only some blocks had are lost. The kinds are
// as before, with placements `here` then and `there` now; `sequence_draw` is
// the coin of sequence parallelism. It belongs to the plan with the axis in
// tensor; what `block` shows there is its side.
std::optional<double> LogRatio(const Draft& draft, const PlacedKinds& kinds,
                               int block, const Turning& turning,
                               bool sequence_draw, const Placements& here,
                               const Placements& there) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  PlacedKinds kinds_after = kinds;
  for (PlacedKind& kind : kinds_after.kinds) {
    const auto shown = RolesOf(space.index, plan, kind.block);
    if (!shown.has_value()) return std::nullopt;
    kind.roles = *shown;
  }
  const AxisRoles& roles = kinds.Of(block).roles;
  const AxisRoles& roles_after = kinds_after.Of(block).roles;
  AxisRoles expected = roles;
  Turn(expected, turning, std::nullopt);
  if (roles_after.data != expected.data ||
      roles_after.context != expected.context ||
      roles_after.expert != expected.expert ||
      roles_after.tensor != expected.tensor ||
      roles_after.folded != expected.folded) {
    return std::nullopt;
  }
  const auto forth = [&](bool sequence) {
    return *Turned(space, plan, kinds, turning, sequence);
  };
  const auto back = [&](std::optional<bool> sequence) {
    return Turned(space, plan, kinds_after, turning.Back(), sequence);
  };
  const bool last = IsLastTensorAxis(roles, turning);
  const auto returned = last ? back(roles.sequence) : back(std::nullopt);
  if (!returned.has_value() || !SameAxes(*returned, here)) return std::nullopt;
  if (IsFirstTensorAxis(roles, turning)) {
    if (roles_after.sequence != sequence_draw &&
        !SameAxes(forth(roles_after.sequence), there)) {
      return std::nullopt;
    }
    return SameAxes(forth(!sequence_draw), there) ? 0 : std::log(2.0);
  }
  if (last) return SameAxes(*back(!roles.sequence), here) ? 0 : -std::log(2.0);
  return 0;
}

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const int block = DrawBlock(space, rng);
  const auto scope = DrawScope(draft, kScopes, rng);
  const GroupId group_id = GroupOfBlock(space, plan, block);
  const DeviceGroup& group = plan.groups[group_id.index()];
  if (group.axes.empty()) return std::nullopt;
  const uint32_t number = rng.Below(static_cast<uint32_t>(group.axes.size()));
  const uint32_t number_of_roles = NumberOfRoles(space);
  const uint32_t shift = 1 + rng.Below(number_of_roles - 1);
  const bool sequence_draw = rng.Below(2) == 1;
  const bool keep_samples = rng.Below(2) == 1;

  auto blocks = BlocksIn(space, plan, block, scope);
  if (!blocks.has_value()) return std::nullopt;
  const auto kinds = PlacedKindsOf(draft, *std::move(blocks));
  if (!kinds.has_value()) return std::nullopt;
  const AxisRoles& roles = kinds->Of(block).roles;
  Turning turning = {.axis = AxisSet{1} << number};
  turning.from = RoleIn(roles, turning.axis);
  turning.to = static_cast<AxisRole>(
      (static_cast<uint32_t>(turning.from) + shift) % number_of_roles);

  const bool first = IsFirstTensorAxis(roles, turning);
  const auto there =
      Turned(space, plan, *kinds, turning,
             first ? std::optional(sequence_draw) : std::nullopt);
  if (!there.has_value()) return std::nullopt;
  const Placements here = PlacementsIn(space, plan, *kinds);
  for (size_t i = 0; i < kinds->blocks.size(); ++i) {
    SetAxes(kinds->blocks[i], (*there)[kinds->of[i]], draft);
  }
  const auto log_ratio =
      LogRatio(draft, *kinds, block, turning, sequence_draw, here, *there);
  if (!log_ratio.has_value()) return std::nullopt;

  if (scope == Scope::kPlan && keep_samples) {
    const int size = group.axes[number].size;
    if (SplitsSamples(turning.from) && !SplitsSamples(turning.to)) {
      draft.edited().microbatches *= size;
    } else if (SplitsSamples(turning.to) && !SplitsSamples(turning.from)) {
      if (plan.microbatches % size != 0) return std::nullopt;
      draft.edited().microbatches /= size;
    }
  }
  return log_ratio;
}

}  // namespace

extern const Move kAxisRole;
const Move kAxisRole = {"axis-role",
                        "an axis between data, context, tensor and expert "
                        "parallelism",
                        4, Edit};

}  // namespace tessera
