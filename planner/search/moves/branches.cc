// Puts the parallel branches of a stage's blocks on the halves of its group
// along one axis, or back on the whole. Symmetric: group and axis are uniform
// over those of the plan with the branches on the whole, and a stage of three
// groups draws by its first. A plan with branches is simulated, operator by
// operator and microbatch by microbatch, instead of folded: where these are
// many, few draws are of use, forth as rarely as back.

#include "planner/plan/branches.h"

#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

// Operators of all microbatches up to which each draw is: some 10 ms.
constexpr double kCheap = 20'000;

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const SearchSpace& space = draft.space();
  const Plan& plan = draft.plan();
  const Draft::Pipeline& pipeline = draft.pipeline();
  const auto& groups =
      pipeline.groups[rng.Below(static_cast<uint32_t>(pipeline.stages))];
  const GroupId whole = groups[0];
  const auto axes =
      static_cast<uint32_t>(plan.groups[whole.index()].axes.size());
  if (axes == 0) return std::nullopt;
  const double operators =
      static_cast<double>(space.index.graph->nodes.size()) * plan.microbatches;
  if (operators * rng.Uniform01() > kCheap) return std::nullopt;
  const int axis = static_cast<int>(rng.Below(axes));
  auto candidate = groups.size() == 1
                       ? SplitBranches(space.index, plan, whole, axis)
                       : MergeBranches(space.index, plan, whole, axis);
  if (!candidate.has_value()) return std::nullopt;
  draft.Replace(*std::move(candidate));
  return 0;
}

}  // namespace

extern const Move kBranches;
const Move kBranches = {
    "branches", "parallel branches of layers on halves of a group", 2, Edit};

}  // namespace tessera
