// Multiplies or divides the number of chunks of each stage in a uniform
// pipeline, and takes a schedule that runs them. Factor and direction are
// uniform, the schedule is so among those that run the new number: as many as
// there are on each side make the ratio.

#include <cmath>

#include "planner/search/move.h"
#include "planner/search/moves/uniform.h"

namespace tessera {
namespace {

std::optional<double> Edit(Draft& draft, Rng& rng) {
  const Plan& plan = draft.plan();
  const int factor = 2 + static_cast<int>(rng.Below(2));
  const bool more = rng.Below(2) == 1;
  if (plan.groups.size() < 2 || !plan.actions.empty()) return std::nullopt;
  std::optional<Strategy> strategy = draft.strategy();
  if (!strategy.has_value()) return std::nullopt;
  if (!more && strategy->vp % factor != 0) return std::nullopt;
  const Draft::Pipeline& pipeline = draft.pipeline();
  const size_t ways_back =
      SchedulesFor({pipeline.stages, pipeline.chunks, plan.microbatches})
          .size();
  strategy->vp = more ? strategy->vp * factor : strategy->vp / factor;
  const auto schedules =
      SchedulesFor({strategy->pp, strategy->vp, plan.microbatches});
  const size_t ways = schedules.size();
  strategy->schedule = schedules[rng.Below(static_cast<uint32_t>(ways))]->name;
  if (!ReplaceByStrategy(*strategy, draft)) return std::nullopt;
  return std::log(static_cast<double>(ways)) -
         std::log(static_cast<double>(ways_back));
}

}  // namespace

extern const Move kChunks;
const Move kChunks = {
    "chunks", "chunks of a stage, for an interleaved schedule", 1, Edit};

}  // namespace tessera
