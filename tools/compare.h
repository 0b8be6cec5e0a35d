#pragma once
// `tessera run --compare`: the predicted and the measured step, task by task,
// and what --learn takes from it.

#include <string>
#include <vector>

#include "costmodel/price.h"
#include "costmodel/profile/profile_db.h"
#include "planner/lower/task_graph.h"
#include "planner/lower/timeline.h"
#include "tools/json.h"

namespace tessera {

// The measured timelines of all ranks for one step, each task as long as the
// cost model means it: a rank that waits in a collective for a slower one, or
// in a receive for its data, spends there but the shortest time that any rank
// (for receives: any microbatch) spent in the same task, at its end.
std::vector<Timeline> WithoutWaiting(const TaskGraph& tasks,
                                     std::vector<Timeline> timelines);
// All tasks of a step that are one row of a profile: the same kernel at the
// same local extents, the same exchange of as many bytes.
struct TaskComparison {
  ProfileKey key;
  std::string example;  // the name of the first such task
  CostSource source = CostSource::kMeasured;
  int tasks = 0;         // in a step of the busiest group
  Duration predicted;    // of one
  Measurement measured;  // of one; samples are tasks times ranks

  // Predicted less measured, of all its tasks.
  double ErrorSeconds() const {
    return (predicted.seconds() - measured.median_s) * tasks;
  }
};

// `measured` are the timelines of all ranks for one step; waiting is left out,
// and so are receives: the send carries their time. Largest error first.
std::vector<TaskComparison> CompareTasks(const Pricer& pricer,
                                         const TaskGraph& tasks,
                                         const Graph& graph,
                                         const std::vector<Timeline>& measured);

// The rows under which `pricer`'s cost model would give each task the time that
// was measured. What no profile can tell it, such as a copy to a file, is left
// out. `origin` is that of the result.
ProfileDb Learn(const Pricer& pricer, const TaskGraph& tasks,
                const std::vector<TaskComparison>& comparisons,
                ProfileOrigin origin);

// The `most` largest errors, for people.
std::string CompareText(const std::vector<TaskComparison>& comparisons,
                        size_t most = 15);
Json CompareJson(const std::vector<TaskComparison>& comparisons);

}  // namespace tessera
