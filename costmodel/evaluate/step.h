#pragma once
// The time of a step of folded stages: the schedule's actions in one order that
// all stages can follow, each applied to the times of its stage's streams.

#include <span>
#include <vector>

#include "costmodel/evaluate/stage.h"
#include "planner/base/ids.h"
#include "planner/base/units.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

struct StepStage {
  const Stage* stage = nullptr;
  std::vector<int> blocks;  // of the graph, in order
  std::vector<int> chunks;  // of these
};

// `group_of_block` says which stage has a block. `world_reduce` is the time of
// the all-reduce of the sum of squares, negative where there is none.
Duration StepTime(std::span<const StepStage> stages,
                  std::span<const BlockShape> shapes,
                  std::span<const GroupId> group_of_block,
                  std::span<const StageAction> order, int microbatches,
                  Duration world_reduce);

}  // namespace tessera
