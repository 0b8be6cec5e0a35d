#pragma once
// Orders of actions that are made for a plan's own stages, where the named
// schedules count all stages as equal.

#include <functional>
#include <optional>
#include <vector>

#include "planner/plan/plan.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// The schedule and table of a plan whose stages do what `orders` says: the
// first named schedule that says the same, or a table.
void SetOrders(const StageOrders& orders, const PipelineShape& shape,
               Plan& plan);

// The best that list scheduling (planner/schedule/list_schedule.h) makes of a
// plan's stages by the work of their operators, under several limits of
// microbatches in flight, with whole and with split backwards. Nothing where
// that is no better than the plan, or it has no pipeline, several chunks of a
// stage or several groups in one. Asks `stop` between plans.
std::optional<Plan> BetterOrders(const SearchSpace& space,
                                 const Objective& objective, const Plan& plan,
                                 const std::function<bool()>& stop);

}  // namespace tessera
