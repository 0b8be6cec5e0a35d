#include <algorithm>
#include <array>

#include "planner/base/table.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

// planner/schedule/<name>.cc
extern const PipelineSchedule kGpipe;
extern const PipelineSchedule kOneForwardOneBackward;
extern const PipelineSchedule kInterleaved;
extern const PipelineSchedule kZeroBubbleH1;
extern const PipelineSchedule kZeroBubbleH2;
extern const PipelineSchedule kTable;  // action_table.cc

std::span<const PipelineSchedule> Schedules() {
  static const std::array table = {kGpipe,        kOneForwardOneBackward,
                                   kInterleaved,  kZeroBubbleH1,
                                   kZeroBubbleH2, kTable};
  return table;
}

Result<const PipelineSchedule*> FindSchedule(std::string_view name) {
  return Find("schedule", Schedules(), name);
}

std::string ToString(const Action& action, int chunks) {
  std::string text(1, "FBIW"[static_cast<size_t>(action.kind)]);
  text += std::to_string(action.microbatch);
  if (chunks > 1) text += "." + std::to_string(action.chunk);
  return text;
}

Result<void> Accepts(const PipelineSchedule& schedule,
                     const PipelineShape& shape) {
  if (shape.chunks < schedule.least_chunks) {
    return InvalidInput(std::string(schedule.name) + " needs at least " +
                        std::to_string(schedule.least_chunks) +
                        " chunks a stage (vp), not " +
                        std::to_string(shape.chunks));
  }
  if (shape.chunks > schedule.most_chunks) {
    return InvalidInput(
        std::string(schedule.name) + " runs one chunk a stage, not " +
        std::to_string(shape.chunks) + " (vp); interleaved runs several");
  }
  return {};
}

std::vector<const PipelineSchedule*> SchedulesFor(const PipelineShape& shape) {
  std::vector<const PipelineSchedule*> rows;
  for (const PipelineSchedule& row : Schedules()) {
    if (row.order != nullptr && Accepts(row, shape)) rows.push_back(&row);
  }
  return rows;
}

StageOrders OrdersOf(const PipelineSchedule& schedule,
                     const PipelineShape& shape) {
  StageOrders orders;
  for (int s = 0; s < shape.stages; ++s) {
    orders.push_back(schedule.order(s, shape));
  }
  return orders;
}

std::vector<StageAction> GlobalOrder(const StageOrders& orders,
                                     const PipelineShape& shape) {
  const auto n = static_cast<size_t>(shape.stages);
  const size_t positions = n * static_cast<size_t>(shape.chunks);
  // By position and microbatch.
  struct Done {
    bool forward = false;
    bool backward = false;  // gradients of activations
  };
  std::vector<std::vector<Done>> done(
      positions, std::vector<Done>(static_cast<size_t>(shape.microbatches)));
  std::vector<size_t> next(n, 0);
  std::vector<StageAction> result;
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t s = 0; s < n; ++s) {
      // As many as are ready, so that a stage's actions stay together.
      for (; next[s] < orders[s].size(); ++next[s]) {
        const Action& action = orders[s][next[s]];
        const auto m = static_cast<size_t>(action.microbatch);
        const size_t p = static_cast<size_t>(action.chunk) * n + s;
        Done& own = done[p][m];
        if (action.kind == ActionKind::kForward) {
          if (p > 0 && !done[p - 1][m].forward) break;
          own.forward = true;
        } else if (action.kind == ActionKind::kBackwardWeight) {
          if (!own.backward) break;
        } else {
          const bool ready =
              own.forward && (p + 1 == positions || done[p + 1][m].backward);
          if (!ready) break;
          own.backward = true;
        }
        result.push_back({static_cast<int>(s), action});
        progress = true;
      }
    }
  }
  return result;
}

}  // namespace tessera
