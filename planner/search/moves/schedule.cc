// Takes another pipeline schedule, uniformly of those that run the plan's
// chunks: symmetric.

#include "planner/plan/stages.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/search/moves/scope.h"

namespace tessera {
namespace {

std::optional<Proposal> Propose(const Plan& plan, const SearchSpace& space,
                                Rng& rng) {
  // One stage runs all schedules alike up to the order of its microbatches.
  const PipelineShape shape = ShapeOf(*space.index.graph, plan);
  if (shape.stages < 2 || !plan.actions.empty()) return std::nullopt;
  const auto schedules = SchedulesFor(shape);
  Plan candidate = plan;
  candidate.schedule =
      schedules[rng.Below(static_cast<uint32_t>(schedules.size()))]->name;
  return Finish(space, plan, std::move(candidate), 0);
}

}  // namespace

extern const Move kSchedule;
const Move kSchedule = {"schedule", "another pipeline schedule", 1, Propose};

}  // namespace tessera
