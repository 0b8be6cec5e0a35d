#pragma once
// Executor: runs one step of a task graph. The simulator runs it with a clock,
// the runtime with kernels and collectives.

#include "planner/base/result.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"

namespace tessera {

class Executor {
 public:
  virtual ~Executor() = default;
  // Runs one training step. Not thread-safe.
  virtual Result<Timeline> Run(const TaskGraph& tasks) = 0;
};

}  // namespace tessera
