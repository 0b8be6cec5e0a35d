#pragma once
// Mixed plans: of layers that have many parameters for their work (embeddings,
// a recommender's tables, the head of a large vocabulary) the parameters are
// split over all devices or those of a node, of the others the samples. People
// do so by hand (Krizhevsky 2014, one weird trick; Naumov et al. 2019, DLRM);
// uniform strategies split all layers alike, and from these a walk has to
// change many operators and weights before that pays.

#include <functional>
#include <span>
#include <vector>

#include "planner/search/found_plan.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// What is found by mixing data parallelism, or one of `bases` on the same mesh,
// with tensor parallelism, the best first: for each way to split parameters the
// best plan, and where that can be improved by other ways for some units, that.
// Units, which are layers of equal shape and those that share a weight, are
// split alike. None where all layers have about as many parameters for their
// work. Stops early when `stop` says so.
std::vector<FoundPlan> MixedPlans(const SearchSpace& space,
                                  const Objective& objective,
                                  std::span<const Plan> bases,
                                  const std::function<bool()>& stop);

}  // namespace tessera
