#include "runtime/step_work.h"

#include "runtime/step_order.h"

namespace tessera {

void PlanLaunches(TaskWork& work) {
  std::vector<ListedCall> listed;
  for (const TaskCall& call : work.calls) {
    ListedCall& one = listed.emplace_back();
    one.kernel = call.kernel;
    for (const auto* tensors : {&call.operands, &call.results}) {
      for (const LocalTensor& tensor : *tensors) {
        one.dtypes.push_back(tensor.dtype);
      }
    }
    one.shared.assign(call.reads.begin() + 1, call.reads.end());
  }
  work.launches = LaunchSizes(listed);
}

Timeline EmptyTimeline(const TaskGraph& tasks, std::span<const TaskWork> work,
                       int rank) {
  Timeline timeline;
  for (const TaskWork& each : work) {
    const Task& task = tasks.task(each.task);
    Span span;
    span.task = each.task;
    span.group = task.group;
    span.rank = rank;
    span.stream = task.stream;
    span.axes = task.axes;
    timeline.spans.push_back(span);
  }
  return timeline;
}

}  // namespace tessera
