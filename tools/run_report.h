#pragma once
// What `tessera run` shows at its end: the measured step beside the predicted
// one.

#include <optional>
#include <string>
#include <vector>

#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"
#include "runtime/trainer.h"
#include "tools/compare.h"
#include "tools/json.h"
#include "tools/loss_check.h"
#include "tools/step_report.h"

namespace tessera {

// Mean over the ranks of where a step's time goes.
//
// Measured: waiting for other ranks (WithoutWaiting) is idle, and so is what is
// left to the end of the slowest rank.
Breakdown MeasuredBreakdown(const TaskGraph& tasks,
                            const std::vector<Timeline>& timelines);
// Predicted, from a simulated timeline.
Breakdown PredictedBreakdown(const TaskGraph& tasks, const Timeline& timeline);

struct RunReport {
  const TrainingResult* result = nullptr;
  Breakdown measured;
  Throughput rates;      // measured, against the peak of the cluster's devices
  Evaluation predicted;  // with the mean over ranks as breakdown
  // By rank: of the device, of the host's memory, of the file.
  std::vector<MemoryUse> predicted_memory;
  std::vector<MemoryUse> predicted_host;
  std::vector<MemoryUse> predicted_file;
  std::vector<TaskComparison> comparisons;  // where they were asked for
  std::optional<LossCheck> check;           // the same
};
Json RunJson(const RunReport& report);
std::string RunText(const RunReport& report);

}  // namespace tessera
