#pragma once
// FoundPlan: a plan that the search has met, and its score.

#include <optional>

#include "planner/base/units.h"
#include "planner/plan/plan.h"
#include "planner/search/objective.h"

namespace tessera {

inline Score ScoreWith(const Evaluation& evaluation,
                       std::optional<Duration> shared) {
  Score score = ScoreOf(evaluation);
  score.step_time = shared.value_or(score.step_time);
  return score;
}

struct FoundPlan {
  Plan plan;
  Evaluation evaluation;
  // The step time with what is lost on shared links, where it is known.
  std::optional<Duration> shared = {};

  // With that.
  Score score() const { return ScoreWith(evaluation, shared); }
};

// Sets what is known of a plan that fits on shared links, unless it is set.
void PriceShared(const Objective& objective, FoundPlan& found);

}  // namespace tessera
