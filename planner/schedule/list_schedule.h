#pragma once
// Orders of actions by list scheduling: every stage does next what is ready,
// gradients of activations first, then forwards as far as memory allows, and
// gradients of weights where it would wait otherwise (after Qi et al. 2024,
// "Zero Bubble Pipeline Parallelism", section 3.1, and Graham 1966). With
// unequal stages that is often better than an order that counts all as equal.

#include <vector>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

struct ListScheduleOptions {
  PipelineShape shape;
  // By position of the pipeline (chunk * stages + stage), in any unit.
  std::vector<PassTimes> times;
  // By stage, how many pairs of chunk and microbatch it may keep between their
  // forward and the end of their backward; at least one for each chunk.
  std::vector<int> most_in_flight;
  // Backwards in two parts; otherwise whole.
  bool splits = true;
};

// What each stage does, in order: valid by CheckOrders. A function of the
// options. Takes time in proportion to stages times actions.
StageOrders ListSchedule(const ListScheduleOptions& options);

}  // namespace tessera
