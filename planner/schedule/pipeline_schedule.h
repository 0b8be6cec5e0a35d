#pragma once
// Pipeline schedules: the order in which a stage works on its microbatches.
// A schedule is a row; the lowering and the evaluator both follow `order`.

#include <span>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/ir/graph.h"

namespace tessera {

struct Action {
  Pass pass = Pass::kForward;
  int microbatch = 0;
  bool operator==(const Action&) const = default;
};

struct PipelineSchedule {
  std::string_view name;
  std::string_view summary;
  // What `stage` of `stages` does, in order. Each (pass, microbatch) once.
  std::vector<Action> (*order)(int stage, int stages, int microbatches);
  // The most microbatches whose activations a stage keeps at one time.
  int (*in_flight)(int stage, int stages, int microbatches);
  // The bubble as a multiple of one microbatch's forward plus backward time,
  // for equal stages and free communication.
  double (*bubble)(int stages, int microbatches);
};

std::span<const PipelineSchedule> Schedules();
Result<const PipelineSchedule*> FindSchedule(std::string_view name);

// One action of one stage.
struct StageAction {
  int stage = 0;
  Action action;
  bool operator==(const StageAction&) const = default;
};

// The actions of all stages in one order that every stage can follow: each
// forward behind that of the stage before, each backward behind that of the
// stage after. Empty if the schedule deadlocks.
std::vector<StageAction> GlobalOrder(const PipelineSchedule& schedule,
                                     int stages, int microbatches);

}  // namespace tessera
