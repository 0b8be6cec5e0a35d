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

#include <cmath>

#include "planner/plan/axis_roles.h"
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

bool SplitsSamples(AxisRole role) {
  return role == AxisRole::kData || role == AxisRole::kExpert;
}

// `roles` with `axis` in `to`; false where it is not in `from`. The sequence
// flag goes to `sequence` where it is given.
bool Turn(AxisRoles& roles, AxisSet axis, AxisRole from, AxisRole to,
          std::optional<bool> sequence) {
  if ((SetOf(roles, from) & axis) == 0) return false;
  SetOf(roles, from) &= ~axis;
  SetOf(roles, to) |= axis;
  if (sequence.has_value()) roles.sequence = *sequence;
  roles.folded &= roles.tensor;
  if (roles.tensor == 0) roles.sequence = false;
  if (roles.context == 0) roles.heads = roles.ring = false;
  return true;
}

// The plan with `axis` turned in all `blocks`, or nothing where it does not
// apply.
std::optional<Plan> Turned(const SearchSpace& space, const Plan& plan,
                           const std::vector<int>& blocks, AxisSet axis,
                           AxisRole from, AxisRole to,
                           std::optional<bool> sequence) {
  Plan turned = plan;
  for (int block : blocks) {
    auto roles = RolesOf(space.index, plan, block);
    if (!roles.has_value() || !Turn(*roles, axis, from, to, sequence)) {
      return std::nullopt;
    }
    const GroupId group = GroupOfBlock(space, plan, block);
    SetBlock(space.index, block,
             PlaceBlock(space.index, block, plan.groups[group.index()], group,
                        *roles),
             turned);
  }
  return turned;
}

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const int block = DrawBlock(space, rng);
  const auto scope = static_cast<Scope>(rng.Below(kScopes));
  const GroupId group_id = GroupOfBlock(space, plan, block);
  const DeviceGroup& group = plan.groups[group_id.index()];
  if (group.axes.empty()) return std::nullopt;
  const uint32_t number = rng.Below(static_cast<uint32_t>(group.axes.size()));
  const AxisSet axis = AxisSet{1} << number;
  const uint32_t number_of_roles = NumberOfRoles(space);
  const uint32_t shift = 1 + rng.Below(number_of_roles - 1);
  const bool sequence_draw = rng.Below(2) == 1;
  const bool keep_samples = rng.Below(2) == 1;

  const auto roles = RolesOf(space.index, plan, block);
  if (!roles.has_value()) return std::nullopt;
  const AxisRole from = roles->data & axis      ? AxisRole::kData
                        : roles->context & axis ? AxisRole::kContext
                        : roles->expert & axis  ? AxisRole::kExpert
                                                : AxisRole::kTensor;
  const auto to = static_cast<AxisRole>((static_cast<uint32_t>(from) + shift) %
                                        number_of_roles);
  const auto blocks = BlocksIn(space, plan, block, scope);
  if (!blocks.has_value()) return std::nullopt;

  // The coin of sequence parallelism belongs to the plan with the axis in
  // tensor; what this block shows there is its side.
  const bool first_tensor_axis = to == AxisRole::kTensor && roles->tensor == 0;
  const bool last_tensor_axis =
      from == AxisRole::kTensor && roles->tensor == axis;
  const auto forth = [&](std::optional<bool> sequence) {
    return Turned(space, plan, *blocks, axis, from, to, sequence);
  };
  auto candidate =
      first_tensor_axis ? forth(sequence_draw) : forth(std::nullopt);
  if (!candidate.has_value()) return std::nullopt;
  const auto back = [&](std::optional<bool> sequence) {
    return Turned(space, *candidate, *blocks, axis, to, from, sequence);
  };
  // The same draw must lead back: roles that a block cannot show (an axis too
  // large for it) and sequence flags that only some blocks had are lost.
  const auto roles_after = RolesOf(space.index, *candidate, block);
  AxisRoles expected = *roles;
  Turn(expected, axis, from, to, std::nullopt);
  if (!roles_after.has_value() || roles_after->data != expected.data ||
      roles_after->context != expected.context ||
      roles_after->expert != expected.expert ||
      roles_after->tensor != expected.tensor ||
      roles_after->folded != expected.folded) {
    return std::nullopt;
  }
  const auto returned =
      last_tensor_axis ? back(roles->sequence) : back(std::nullopt);
  if (!returned.has_value() || returned->ops != plan.ops) return std::nullopt;
  double log_ratio = 0;
  if (first_tensor_axis) {
    const auto shown = forth(roles_after->sequence);
    if (!shown.has_value() || shown->ops != candidate->ops) {
      return std::nullopt;
    }
    if (forth(!sequence_draw)->ops != candidate->ops) log_ratio = std::log(2.0);
  } else if (last_tensor_axis) {
    const auto other = back(!roles->sequence);
    if (other->ops != plan.ops) log_ratio = -std::log(2.0);
  }

  if (scope == Scope::kPlan && keep_samples) {
    const int size = group.axes[number].size;
    if (SplitsSamples(from) && !SplitsSamples(to)) {
      candidate->microbatches *= size;
    } else if (SplitsSamples(to) && !SplitsSamples(from)) {
      if (candidate->microbatches % size != 0) return std::nullopt;
      candidate->microbatches /= size;
    }
  }
  return Finish(space, plan, std::move(*candidate), log_ratio);
}

}  // namespace

extern const Move kAxisRole;
const Move kAxisRole = {"axis-role",
                        "an axis between data, context, tensor and expert "
                        "parallelism",
                        4, Propose};

}  // namespace tessera
