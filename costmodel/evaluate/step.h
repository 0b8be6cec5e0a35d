#pragma once
// The time and the memory of a step of folded stages: the schedule's actions in
// one order that all stages can follow, each applied to the times of its
// stage's streams.
//
// A pipeline of many microbatches repeats itself between its warm-up and its
// cool-down. Its times are a max-plus linear system: once every time that a
// period writes grows by a rate of its own from one period to the next, that
// goes on until some term of a maximum overtakes another. How many periods that
// takes is known from one of them, and so many are skipped; the times are those
// that walking them would give (step.cc has the proof).

#include <span>
#include <vector>

#include "costmodel/evaluate/stage.h"
#include "planner/base/ids.h"
#include "planner/base/units.h"
#include "planner/plan/evaluation.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

struct StepStage {
  const Stage* stage = nullptr;
  std::vector<int> blocks;  // of the graph, in order
  std::vector<int> chunks;  // of these
};

// The part of an order in which each period does what the one before did, with
// later microbatches. No action of it is the last of its stage, kind and chunk,
// so that each runs the fold of every other microbatch.
struct SteadyPhase {
  size_t begin = 0;      // its first action
  size_t length = 0;     // actions of a period
  size_t periods = 0;    // 0: there is none
  int microbatches = 0;  // by which a period is ahead of the one before
  // The first period with a microbatch that comes up behind the phase;
  // `periods` where none does.
  size_t kept = 0;

  size_t end() const { return begin + length * periods; }
};

// The longest of some that are looked at around the order's middle.
SteadyPhase FindSteadyPhase(std::span<const StageAction> order);

struct StepTiming {
  Duration time;
  size_t skipped = 0;  // periods of the steady phase that were not walked
};

// `group_of_block` says which stage has a block. `steady`: a steady phase of
// the order, or none to walk all of it. `world_reduce` is the time of the
// all-reduce of the sum of squares, negative where there is none.
StepTiming StepTime(std::span<const StepStage> stages,
                    std::span<const BlockShape> shapes,
                    std::span<const GroupId> group_of_block,
                    std::span<const StageAction> order,
                    const SteadyPhase& steady, int microbatches,
                    Duration world_reduce);

// The most bytes of a stage's devices over the step: its actions one after
// another, of which `steady` is a steady phase or none.
MemoryUse StagePeak(const Stage& stage, std::span<const Action> actions,
                    const SteadyPhase& steady, int microbatches);

}  // namespace tessera
