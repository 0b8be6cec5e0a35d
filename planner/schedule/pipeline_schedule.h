#pragma once
// Pipeline schedules: the order in which a stage works on its microbatches.
// A schedule is a row; the lowering and the evaluator both follow `order`.
//
// A stage may have several chunks of the model (virtual stages): chunk c of
// stage s comes at position c * stages + s of the pipeline.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"

namespace tessera {

// What is done with a microbatch. A backward may be split: the gradients of
// activations first, for which the position before waits, the gradients of
// weights at some later time.
enum class ActionKind : uint8_t {
  kForward,
  kBackward,        // both of the next
  kBackwardInput,   // gradients of activations
  kBackwardWeight,  // gradients of weights
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  int chunk = 0;
  int microbatch = 0;
  bool operator==(const Action&) const = default;
};

// "F0", "B2", "I1", "W1"; with several chunks "F0.1" for chunk 1.
std::string ToString(const Action& action, int chunks);

struct PipelineShape {
  int stages = 1;
  int chunks = 1;  // of each stage
  int microbatches = 1;
  auto operator<=>(const PipelineShape&) const = default;
};

// How long the parts of a microbatch's work take on a stage, all chunks
// together.
struct PassTimes {
  double forward = 0;
  double backward_input = 0;
  double backward_weight = 0;
};

struct PipelineSchedule {
  std::string_view name;
  std::string_view summary;
  // What stage `stage` does, in order: each chunk's forward of each microbatch
  // once, and its backward once, whole or in both parts. Null where the plan
  // says (Plan::actions). REQUIRES (all of these): Accepts.
  std::vector<Action> (*order)(int stage, const PipelineShape& shape) = nullptr;
  // The most (chunk, microbatch) pairs whose activations a stage keeps at one
  // time: from the forward to the end of the backward, weights' included.
  int (*in_flight)(int stage, const PipelineShape& shape) = nullptr;
  // How many (chunk, microbatch) pairs a stage has run forward when its first
  // backward starts, and how many gradients of weights it still has to do when
  // its last gradients of activations are done, where backwards are split.
  int (*ahead)(int stage, const PipelineShape& shape) = nullptr;
  int (*put_off)(int stage, const PipelineShape& shape) = nullptr;
  // The step's time less a stage's work, for equal stages and chunks and free
  // communication.
  double (*bubble)(const PipelineShape& shape,
                   const PassTimes& times) = nullptr;
  // How many chunks a stage may have.
  int least_chunks = 1;
  int most_chunks = 1;
};

// Whether a row runs pipelines of a shape; the error says what it needs.
Result<void> Accepts(const PipelineSchedule& schedule,
                     const PipelineShape& shape);

std::span<const PipelineSchedule> Schedules();
Result<const PipelineSchedule*> FindSchedule(std::string_view name);

// The rows with an order that run a shape, in the order of the table.
std::vector<const PipelineSchedule*> SchedulesFor(const PipelineShape& shape);

// What each stage does, in order.
using StageOrders = std::vector<std::vector<Action>>;

// Of a row that has an order. REQUIRES: Accepts.
StageOrders OrdersOf(const PipelineSchedule& schedule,
                     const PipelineShape& shape);

// One action of one stage.
struct StageAction {
  int stage = 0;
  Action action;
  bool operator==(const StageAction&) const = default;
};

// The actions of all stages in one order that every stage can follow: each
// forward behind that of the position before, each backward behind that of the
// position after, gradients of weights behind those of activations. Ends early
// where the orders deadlock: then it lacks actions.
std::vector<StageAction> GlobalOrder(const StageOrders& orders,
                                     const PipelineShape& shape);

}  // namespace tessera
