#include "tests/support/exhaustive.h"

#include "planner/plan/stages.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

// All placements of a node: an odometer over its axes, each on one of the
// factors that can be split, or on none.
std::vector<OpPlacement> PlacementsOf(const Node& node, OpPlacement start,
                                      size_t axes) {
  start.axes = {};
  std::vector<OpPlacement> placements = {start};
  for (size_t a = 0; a < axes; ++a) {
    const size_t count = placements.size();
    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
      if (!node.rule.factors[f].splittable) continue;
      for (size_t i = 0; i < count; ++i) {
        OpPlacement placement = placements[i];
        placement.axes[f] |= AxisSet{1} << a;
        placements.push_back(placement);
      }
    }
  }
  return placements;
}

class Enumerator {
 public:
  Enumerator(const SearchSpace& space, const Plan& start,
             const std::function<bool(const Plan&)>& visit)
      : space_(space), plan_(start), visit_(visit) {
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const OpPlacement& op = plan_.ops[i];
      placements_.push_back(
          PlacementsOf(space.index.graph->nodes[i], op,
                       plan_.groups[op.group.index()].axes.size()));
    }
  }

  int64_t Run() {
    const int64_t batch = space_.index.graph->global_batch;
    plan_.actions.clear();
    for (const PipelineSchedule* schedule :
         SchedulesFor(ShapeOf(*space_.index.graph, plan_))) {
      if (plan_.groups.size() > 1) plan_.schedule = schedule->name;
      for (int64_t m = 1; m <= batch; ++m) {
        if (batch % m != 0) continue;
        plan_.microbatches = static_cast<int>(m);
        if (!PlaceNode(0)) return count_;
      }
      if (plan_.groups.size() <= 1) break;
    }
    return count_;
  }

 private:
  bool PlaceNode(size_t node) {
    if (node == placements_.size()) return StoreWeight(0);
    for (const OpPlacement& placement : placements_[node]) {
      plan_.ops[node] = placement;
      if (!PlaceNode(node + 1)) return false;
    }
    return true;
  }

  bool StoreWeight(size_t weight) {
    if (weight == plan_.weights.size()) {
      Plan plan = plan_;
      if (!MakeCanonical(space_, plan)) return true;
      ++count_;
      return visit_(plan);
    }
    for (int stage : {0, 1, 2, 3}) {
      plan_.weights[weight] = {stage, 0};
      if (!StoreWeight(weight + 1)) return false;
    }
    return true;
  }

  const SearchSpace& space_;
  Plan plan_;
  const std::function<bool(const Plan&)>& visit_;
  std::vector<std::vector<OpPlacement>> placements_;
  int64_t count_ = 0;
};

}  // namespace

int64_t ForEachPlan(const SearchSpace& space, const Plan& start,
                    const std::function<bool(const Plan&)>& visit) {
  return Enumerator(space, start, visit).Run();
}

std::optional<ExhaustiveResult> Exhaustive(const SearchSpace& space,
                                           const Plan& start,
                                           const Objective& objective,
                                           int64_t limit) {
  std::optional<ExhaustiveResult> result;
  const int64_t count = ForEachPlan(space, start, [&](const Plan& plan) {
    Evaluation evaluation = objective.Evaluate(plan);
    if (!result.has_value() || Better(evaluation, result->evaluation)) {
      result = ExhaustiveResult{plan, std::move(evaluation), 0};
    }
    return --limit >= 0;
  });
  if (limit < 0 || !result.has_value()) return std::nullopt;
  result->plans = count;
  return result;
}

}  // namespace tessera
