#include "planner/search/constrained_starts.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <utility>

#include "planner/plan/axis_roles.h"
#include "planner/search/chain_starts.h"
#include "planner/search/constraints.h"
#include "planner/search/draft.h"
#include "planner/search/ragged.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

// Uniform plans that give operators what is fixed.
constexpr size_t kMostGiving = 300;

// Steps towards the constraints from a plan that breaks some.
constexpr int kRepairSteps = 20'000;

}  // namespace

std::vector<Plan> GivingPlans(const SearchSpace& space,
                              const std::vector<Strategy>& strategies,
                              const std::function<bool()>& stop) {
  std::vector<Plan> giving;
  if (space.constraints.FixedNodes().empty()) return giving;
  std::set<std::string> seen;
  for (const Strategy& strategy : strategies) {
    if (giving.size() == kMostGiving || stop()) break;
    Strategy key = strategy;
    key.mbs = 1;
    key.schedule = Strategy().schedule;
    if (!seen.insert(ToString(key)).second) continue;
    auto plan = PlanFromStrategy(space.index, *space.cluster, strategy);
    if (plan) giving.push_back(*std::move(plan));
  }
  // Operators may have degrees that others have no room for: plans that are not
  // valid as a whole, with tensor parallelism along ever more axes.
  Plan split = DataParallelPlan(space);
  if (split.groups.size() != 1) return giving;
  const DeviceGroup group = split.groups[0];
  AxisRoles roles;
  roles.data = group.all_axes();
  for (size_t a = group.axes.size(); a-- > 0;) {
    roles.tensor |= AxisSet{1} << a;
    roles.data &= ~roles.tensor;
    for (int b = 0; b < std::ssize(space.index.nodes_of_block); ++b) {
      SetBlock(space.index, b,
               PlaceBlock(space.index, b, group, GroupId(0), roles), split);
    }
    giving.push_back(split);
  }
  return giving;
}

std::optional<Plan> WithFixed(const SearchSpace& space, Plan plan,
                              std::span<const Plan> uniform,
                              const std::function<bool()>& stop) {
  const Constraints any_samples = space.constraints.WithAnyMicrobatch();
  const auto violations = [&](const Plan& of) {
    return any_samples.Violations(space.index, *space.cluster, of);
  };
  int broken = violations(plan);
  // What a key may be of: how operators are split, whether their layer runs
  // again, how their weights are stored.
  enum class Part { kSplit, kAgain, kStored };
  const Graph& graph = *space.index.graph;
  const auto give = [&](const Plan& giver, NodeId node, Part part, Plan& to) {
    OpPlacement& op = to.ops[node.index()];
    switch (part) {
      case Part::kSplit: {
        const bool recompute = op.recompute;
        op = giver.ops[node.index()];
        op.recompute = recompute;
        return;
      }
      case Part::kAgain:
        for (NodeId of_layer :
             space.index
                 .nodes_of_block[static_cast<size_t>(graph.node(node).block)]) {
          to.ops[of_layer.index()].recompute =
              giver.ops[of_layer.index()].recompute;
        }
        return;
      case Part::kStored:
        for (TensorId operand : graph.node(node).operands) {
          const int weight = space.weight_of_tensor[operand.index()];
          if (weight < 0) continue;
          to.weights[static_cast<size_t>(weight)] =
              giver.weights[static_cast<size_t>(weight)];
        }
    }
  };
  for (const auto& nodes : space.constraints.FixedNodes()) {
    for (const Part part : {Part::kSplit, Part::kAgain, Part::kStored}) {
      for (const Plan& giver : uniform) {
        if (broken == 0 || stop()) break;
        if (!std::ranges::equal(plan.groups, giver.groups, SameMesh)) continue;
        Plan spliced = plan;
        for (NodeId node : nodes) give(giver, node, part, spliced);
        if (!MakeCanonical(space, spliced)) continue;
        const int then = violations(spliced);
        if (then >= broken) continue;
        broken = then;
        plan = std::move(spliced);
      }
    }
  }
  if (broken > 0) return std::nullopt;
  if (Allowed(space, plan)) return plan;
  for (const int m :
       Divisors(space.index.graph->global_batch, kMostMicrobatches)) {
    Plan cut = plan;
    cut.microbatches = m;
    if (MakeCanonical(space, cut) && Allowed(space, cut)) return cut;
    if (stop()) break;
  }
  return std::nullopt;
}

std::optional<Plan> Repaired(const SearchSpace& space, Plan plan, Rng& rng,
                             const std::function<bool()>& stop) {
  SearchSpace free = space;
  free.constraints = {};
  const auto violations = [&](const Plan& of) {
    return space.constraints.Violations(space.index, *space.cluster, of);
  };
  const std::vector<Move> moves = MovesFrom(space, {});
  Draft draft(free, std::move(plan));
  int broken = violations(draft.plan());
  for (int i = 0; i < kRepairSteps && broken > 0 && !stop(); ++i) {
    if (!DrawMove(moves, rng).Propose(draft, rng)) continue;
    const int then = violations(draft.plan());
    if (then > broken) {
      draft.Undo();
      continue;
    }
    broken = then;
    draft.Keep();
  }
  if (broken > 0) return std::nullopt;
  return draft.plan();
}

}  // namespace tessera
