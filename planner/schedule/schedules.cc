#include <algorithm>
#include <array>

#include "planner/base/table.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

// planner/schedule/<name>.cc
extern const PipelineSchedule kGpipe;
extern const PipelineSchedule kOneForwardOneBackward;

std::span<const PipelineSchedule> Schedules() {
  static const std::array table = {kGpipe, kOneForwardOneBackward};
  return table;
}

Result<const PipelineSchedule*> FindSchedule(std::string_view name) {
  return Find("schedule", Schedules(), name);
}

std::vector<StageAction> GlobalOrder(const PipelineSchedule& schedule,
                                     int stages, int microbatches) {
  const auto n = static_cast<size_t>(stages);
  std::vector<std::vector<Action>> orders;
  size_t total = 0;
  for (int s = 0; s < stages; ++s) {
    orders.push_back(schedule.order(s, stages, microbatches));
    total += orders.back().size();
  }
  std::vector<size_t> next(n, 0);
  std::vector<std::vector<bool>> forward_done(
      n, std::vector<bool>(static_cast<size_t>(microbatches)));
  std::vector<std::vector<bool>> backward_done = forward_done;
  std::vector<StageAction> result;
  for (bool progress = true; progress && result.size() < total;) {
    progress = false;
    for (size_t s = 0; s < n; ++s) {
      // As many as are ready, so that a stage's actions stay together.
      for (; next[s] < orders[s].size(); ++next[s]) {
        const Action action = orders[s][next[s]];
        const auto m = static_cast<size_t>(action.microbatch);
        const bool ready =
            action.pass == Pass::kForward
                ? s == 0 || forward_done[s - 1][m]
                : forward_done[s][m] && (s + 1 == n || backward_done[s + 1][m]);
        if (!ready) break;
        (action.pass == Pass::kForward ? forward_done : backward_done)[s][m] =
            true;
        result.push_back({static_cast<int>(s), action});
        progress = true;
      }
    }
  }
  return result.size() == total ? result : std::vector<StageAction>();
}

}  // namespace tessera
