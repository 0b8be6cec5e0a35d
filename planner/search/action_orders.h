#pragma once
// Orders of actions that are made for a plan's own stages, where the named
// schedules count all stages as equal.

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "planner/plan/plan.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/objective.h"
#include "planner/search/search_space.h"

namespace tessera {

// The first named schedule that says what `orders` do, or "table".
std::string_view ScheduleOf(const StageOrders& orders,
                            const PipelineShape& shape);

// Gives a plan whose stages do what `orders` says that schedule, and a table
// its actions.
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
