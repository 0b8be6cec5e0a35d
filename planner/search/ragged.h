#pragma once
// Data parallelism over devices that do not divide the batch: some have a
// sample more than others of each microbatch, and unlike ones shares by their
// speed. No uniform strategy says so.

#include <functional>
#include <vector>

#include "planner/search/found_plan.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// All devices, and the batch cut by all their axes; one microbatch. Valid where
// these are no more than its samples.
Plan DataParallelPlan(const SearchSpace& space);

// The best of each ZeRO stage, priced; with as few microbatches as fit, and
// layers that run again where nothing else fits. Empty where the devices divide
// the batch, or are more than its samples. Ends where `stop` says so.
std::vector<FoundPlan> RaggedPlans(const SearchSpace& space,
                                   const Objective& objective,
                                   const std::function<bool()>& stop);

}  // namespace tessera
