#include "planner/search/ragged.h"

#include <optional>
#include <utility>

#include "planner/plan/axis_roles.h"
#include "planner/plan/layers_again.h"
#include "planner/plan/strategy_groups.h"
#include "planner/search/uniform_strategies.h"

namespace tessera {
namespace {

constexpr int kZeroStages[] = {0, 1, 3};
constexpr RecomputeLevel kLevels[] = {RecomputeLevel::kNone,
                                      RecomputeLevel::kFull};

}  // namespace

Plan DataParallelPlan(const SearchSpace& space) {
  const GraphIndex& index = space.index;
  Plan plan;
  plan.graph_fingerprint = index.fingerprint;
  plan.cluster_name = space.cluster->name;
  DeviceGroup& group = plan.groups.emplace_back();
  group.name = "all";
  for (size_t d = 0; d < space.cluster->devices.size(); ++d) {
    group.devices.push_back(DeviceId(static_cast<int64_t>(d)));
  }
  for (int size : PrimeFactors(std::ssize(group.devices))) {
    group.axes.push_back({"dp" + std::to_string(group.axes.size()), size});
  }
  plan.ops.resize(index.forward_nodes);
  plan.weights.resize(index.weights.size());
  AxisRoles roles;
  roles.data = group.all_axes();
  for (size_t b = 0; b < index.nodes_of_block.size(); ++b) {
    const auto block = static_cast<int>(b);
    SetBlock(index, block, PlaceBlock(index, block, group, GroupId(0), roles),
             plan);
  }
  return plan;
}

std::vector<FoundPlan> RaggedPlans(const SearchSpace& space,
                                   const Objective& objective,
                                   const std::function<bool()>& stop) {
  const int64_t batch = space.index.graph->global_batch;
  const auto devices = std::ssize(space.cluster->devices);
  if (batch % devices == 0 || devices > batch) return {};
  const Plan plain = DataParallelPlan(space);
  std::vector<FoundPlan> found;
  for (const int zero : kZeroStages) {
    std::optional<FoundPlan> best;
    for (const RecomputeLevel level : kLevels) {
      for (const int microbatches : Divisors(
               batch, std::min<int64_t>(batch / devices, kMostMicrobatches))) {
        if ((best && best->evaluation.feasible()) || stop()) break;
        Plan plan = plain;
        plan.microbatches = microbatches;
        ShareSamples(*space.cluster, space.index.graph->dtype,
                     batch / microbatches, plan.groups[0]);
        SetLayersAgain(space.index, {.level = level}, plan);
        for (size_t w = 0; w < plan.weights.size(); ++w) {
          plan.weights[w].zero_stage =
              HighestZeroStage(space.index, plan, w, zero);
        }
        if (!MakeCanonical(space, plan) || !Allowed(space, plan)) continue;
        Evaluation evaluation = objective.Evaluate(plan);
        if (best && !Better(evaluation, best->evaluation)) continue;
        best = {std::move(plan), std::move(evaluation), {}};
      }
    }
    if (best) found.push_back(*std::move(best));
  }
  return found;
}

}  // namespace tessera
