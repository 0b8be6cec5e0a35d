#pragma once
// Schedules that are given as a table of actions: what is wrong with one, and
// the text file of `--strategy schedule=FILE`.
//
// The file has a line for each stage, the first stage first: its actions in
// order, separated by blanks. An action is a letter and a microbatch: F
// forward, B backward, or the backward in two parts, I the gradients of
// activations and W those of weights. With several chunks of a stage the chunk
// follows behind a point: F0.1. What follows a # is a comment; empty lines are
// skipped.
//
//   # 1F1B over two stages and two microbatches
//   F0 F1 B0 B1
//   F0 B0 F1 B1

#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

// Reads "F0", "W3.1".
Result<Action> ParseAction(std::string_view text);

struct OrderProblem {
  int stage = 0;
  int action = -1;  // index into the stage's order; -1: the stage as a whole
  std::string message;
  bool operator==(const OrderProblem&) const = default;
};

// Why stages cannot work in these orders, at most one problem a stage: chunks
// or microbatches beyond the shape; a chunk's forward or backward of a
// microbatch that is missing, occurs twice, or comes before what it needs on
// its own stage; a backward both whole and in parts. Where each stage is fine
// by itself, the first action of each stage that waits forever.
std::vector<OrderProblem> CheckOrders(const StageOrders& orders,
                                      const PipelineShape& shape);

// Stages, chunks and microbatches that a table speaks of.
PipelineShape ShapeOf(const StageOrders& orders);

// Reads the text of a file and checks it. Errors name line and action; those of
// a path that cannot be read are ReadFile's (planner/base/file.h).
Result<StageOrders> ParseActionTable(std::string_view text);
Result<StageOrders> ReadActionTable(const std::string& path);

}  // namespace tessera
