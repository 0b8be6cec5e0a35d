#pragma once
// A few training steps of a task graph on threads of this process, without
// files: what tests compare.

#include <map>
#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/lower/lower.h"
#include "planner/plan/evaluation.h"

namespace tessera {

struct Trained {
  std::vector<double> losses;  // by step
  // The weights after the last step, whole, by name.
  std::map<std::string, std::vector<double>> weights;
  std::vector<MemoryUse> peaks;  // by rank
};

struct TrainInMemoryOptions {
  TrainingOptions training = {.learning_rate = 0.01};
  int64_t steps = 5;
  uint64_t seed = 7;
};

// Tokens are a function of (step, sample, position); a fifth of the labels does
// not count. Errors: those of the ranks; ranks that have the loss, or elements
// of a weight, in common and disagree about a bit of them.
Result<Trained> TrainInMemory(const Graph& graph, const TaskGraph& tasks,
                              const TrainInMemoryOptions& options);

// The first difference of `actual` from `expected`, or "": losses by more than
// 1e-9, a weight by more than 1e-9 of its norm. A weight whose gradient is
// mathematically zero (a key's bias: the softmax does not see it) has a norm
// that is rounding alone: 1e-12 is its bound.
std::string Difference(const Trained& actual, const Trained& expected);
// The same, with every bit.
std::string DifferenceInBits(const Trained& actual, const Trained& expected);

}  // namespace tessera
