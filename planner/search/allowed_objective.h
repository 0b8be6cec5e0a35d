#pragma once
// AllowedObjective: an objective in which uniform plans that constraints rule
// out are none. Thread-safe as the objective is; both outlive it.

#include <optional>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

class AllowedObjective : public Objective {
 public:
  AllowedObjective(const SearchSpace& space, const Objective& objective)
      : space_(space), objective_(objective) {}
  Evaluation Evaluate(const Plan& plan) const override {
    return objective_.Evaluate(plan);
  }
  std::optional<Score> EvaluateUniform(
      const GraphIndex& index, const Cluster& cluster,
      const Strategy& strategy) const override {
    if (!space_.constraints.empty()) {
      const auto plan = PlanFromStrategy(index, cluster, strategy);
      if (!plan || !Allowed(space_, *plan)) return std::nullopt;
    }
    return objective_.EvaluateUniform(index, cluster, strategy);
  }
  Score BoundUniform(const GraphIndex& index, const Strategy& strategy,
                     Bound bound) const override {
    return objective_.BoundUniform(index, strategy, bound);
  }
  bool EstimatesUniform() const override {
    return objective_.EstimatesUniform();
  }
  std::optional<Score> EstimateUniform(const GraphIndex& index,
                                       const Strategy& strategy,
                                       Bound bound) const override {
    return objective_.EstimateUniform(index, strategy, bound);
  }
  std::vector<LayerCost> LayerCosts(const Strategy& strategy,
                                    DeviceId first) const override {
    return objective_.LayerCosts(strategy, first);
  }

 private:
  const SearchSpace& space_;
  const Objective& objective_;
};

}  // namespace tessera
