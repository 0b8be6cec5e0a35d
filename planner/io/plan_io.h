#pragma once
// Plan files (proto/plan.proto). Thread-safe: functions without state.

#include <cstdint>
#include <string>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/plan/plan.h"

namespace tessera {

// Devices of a plan's groups are numbered below this, which is beyond any job.
inline constexpr int kMostPlannedDevices = 1 << 20;

// The plan for `graph` in the file at `path` (.txtpb, .json or .pb). A plan for
// another model is an error. Whether it is valid for a cluster, Validate says.
// `where` of an error is "path: placements[3].splits[1]", or
// "path:line:column" where the file cannot be parsed.
Result<Plan> ReadPlan(const std::string& path, const Graph& graph);

// A plan of the model, made for perhaps another global batch, sequence length
// or dtype. It may not be valid for this one.
struct PlanOfAnySize {
  Plan plan;
  int64_t global_batch = 0;  // of a step; where the file says none, the graph's
};
Result<PlanOfAnySize> ReadPlanOfAnySize(const std::string& path,
                                        const Graph& graph);

// What a plan file records of the search that found the plan.
struct PlanPrediction {
  Duration step_time;
  bool measured = false;
  std::string baseline;  // the best that fits, or empty
  Duration baseline_step_time;
  double error_band = 0;   // a fraction; 0: not known
  bool confirmed = false;  // simulated with shared links
};

// Writes `plan` by WriteFileAtomically; the same plan gives the same bytes.
// `prediction` may be null. REQUIRES: `plan` is valid for `graph` on some
// cluster.
Result<void> WritePlan(const std::string& path, const Graph& graph,
                       const Plan& plan,
                       const PlanPrediction* prediction = nullptr);

// The plan as WritePlan writes it to a .json file: one JSON object.
Result<std::string> PlanJson(const Graph& graph, const Plan& plan);

}  // namespace tessera
