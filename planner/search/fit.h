#pragma once
// Fitted plans: uniform plans that would be fast but for the memory that they
// lack, with as much computed again in backward as makes them fit. A sweep of
// uniform strategies has only all layers that run again, or none; between the
// two lies what walks reach in many steps, each of which has to pay. Stages of
// a pipeline are shared out by their work, with what runs again.

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "planner/plan/strategy.h"
#include "planner/search/found_plan.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// `plan` with operators that run again, of the kinds that cost the least time
// for each byte they save, in as many layers as each device that lacks memory
// needs. Kinds are the operators of a layer's class one by one, all of these,
// and all of any layer; each is priced once. Nothing where these do not make it
// fit, or where it is no canonical plan that fits as it is.
std::optional<FoundPlan> FitByRecomputing(const SearchSpace& space,
                                          const Objective& objective,
                                          Plan plan);

// Fitted plans, each better than those behind it and than `than`: first of
// `likely` strategies, without the recomputation that they have, then of those
// of `strategies` that have none and seem the fastest by their bounds, `tried`
// at most. Guesses what these take on so many threads, until `stop_guessing`,
// which may be empty, says so; stops early when `stop` does. All threads ask
// these and `objective`. Otherwise the same on any number of threads.
std::vector<FoundPlan> FittedPlans(
    const SearchSpace& space, const Objective& objective,
    const std::vector<Strategy>& likely,
    const std::vector<Strategy>& strategies, size_t tried, Score than,
    int threads, const std::function<bool()>& stop,
    const std::function<bool()>& stop_guessing = nullptr);

}  // namespace tessera
