#pragma once
// Brute force, to compare the search with on small graphs.

#include <cstdint>
#include <functional>
#include <optional>

#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// Visits every canonical plan (search_space.h) with the groups and stages of
// `start`, once each: all placements of axes on factors, numbers of
// microbatches, schedules (where there is more than one stage) and ZeRO stages.
// Nothing is recomputed. `visit` returns false to end early. Returns the number
// of plans visited.
int64_t ForEachPlan(const SearchSpace& space, const Plan& start,
                    const std::function<bool(const Plan&)>& visit);

struct ExhaustiveResult {
  Plan best;
  Evaluation evaluation;
  int64_t plans = 0;
};

// The best of them, or nothing where there are more than `limit` or none.
std::optional<ExhaustiveResult> Exhaustive(const SearchSpace& space,
                                           const Plan& start,
                                           const Objective& objective,
                                           int64_t limit);

}  // namespace tessera
