// Puts the parallel branches of a stage's blocks on the halves of its group
// along one axis, or back on the whole. Symmetric: group and axis are uniform
// over those of the plan with the branches on the whole, and a stage of three
// groups draws by its first.

#include "planner/plan/branches.h"

#include "planner/plan/stages.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  const Stages stages = StagesOf(*space.index.graph, plan);
  const auto& groups =
      stages.groups[rng.Below(static_cast<uint32_t>(stages.count()))];
  const GroupId whole = groups[0];
  const auto axes =
      static_cast<uint32_t>(plan.groups[whole.index()].axes.size());
  if (axes == 0) return std::nullopt;
  const int axis = static_cast<int>(rng.Below(axes));
  auto candidate = groups.size() == 1
                       ? SplitBranches(space.index, plan, whole, axis)
                       : MergeBranches(space.index, plan, whole, axis);
  if (!candidate.has_value()) return std::nullopt;
  return Finish(space, plan, *std::move(candidate), 0);
}

}  // namespace

extern const Move kBranches;
const Move kBranches = {
    "branches", "parallel branches of layers on halves of a group", 2, Propose};

}  // namespace tessera
