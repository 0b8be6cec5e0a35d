// Takes another pipeline schedule, uniformly of those that run the plan's
// chunks: symmetric.

#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/move.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const Plan& plan = draft.plan();
  // One stage runs all schedules alike up to the order of its microbatches.
  const Draft::Pipeline& pipeline = draft.pipeline();
  if (pipeline.stages < 2 || !plan.actions.empty()) return std::nullopt;
  const auto schedules =
      SchedulesFor({pipeline.stages, pipeline.chunks, plan.microbatches});
  draft.edited().schedule =
      schedules[rng.Below(static_cast<uint32_t>(schedules.size()))]->name;
  return 0;
}

}  // namespace

extern const Move kSchedule;
const Move kSchedule = {"schedule", "another pipeline schedule", 1, Edit};

}  // namespace tessera
