#include "costmodel/evaluate/all_reduce.h"

#include <span>

namespace tessera {

TaskCost PriceAllReduce(const Pricer& pricer, Task task, const Value& value,
                        const DeviceGroup& group) {
  task.kind = TaskKind::kComm;
  task.comm = CommKind::kAllReduce;
  task.axes = 1;
  task.reads = {ValueId(0)};
  task.writes = {ValueId(0)};
  TaskView view;
  view.task = &task;
  view.values = std::span(&value, 1);
  view.group = &group;
  view.group_class = pricer.ClassOf(group);
  return pricer.Price(view);
}

}  // namespace tessera
