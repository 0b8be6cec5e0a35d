#pragma once
// PlanJobs: what a rank does of a step as jobs on streams (runtime/streams.h):
// what each waits for, and when buffers come and go.

#include <span>
#include <vector>

#include "planner/lower/task_graph.h"
#include "runtime/step_buffers.h"
#include "runtime/step_work.h"
#include "runtime/streams.h"

namespace tessera {

struct StepJobs {
  std::vector<StreamJob> jobs;  // by work
  int streams = 0;
  HeldBytes budget;             // what they need one by one
  std::vector<int> use_counts;  // by root: of the work that uses it
};

// `work` is in issue order, and `streams` has the stream of each. Says in it
// what uses and what allocates which buffers: one lives from the first work
// that uses it until all that does has ended; the loss stays. A file's places
// are those of `buffers`, whose tiers are open: what comes to one waits for
// those that had any of it before.
StepJobs PlanJobs(const TaskGraph& tasks, const StepBuffers& buffers,
                  std::span<const int> streams, std::vector<TaskWork>& work);

}  // namespace tessera
