#pragma once
// TaskView: a task in its surroundings, a TaskGraph's or a BlockProgram's local
// ones, and the sizes of its values on the ranks of its group.

#include <span>
#include <vector>

#include "planner/base/units.h"
#include "planner/ir/dtype.h"
#include "planner/lower/task_graph.h"
#include "planner/plan/layout.h"

namespace tessera {

struct TaskView {
  const Task* task = nullptr;
  std::span<const Value> values;  // that the task's ids index
  const DeviceGroup* group = nullptr;
  int group_class = -1;  // Pricer::ClassOf(*group)
  int zigzag = 0;        // Plan::zigzag
  // Of a send: the value that it becomes, and where.
  const Value* peer = nullptr;
  const DeviceGroup* peer_group = nullptr;
  int pair_class = -1;  // Pricer::ClassOf(*group, peer_group)

  const Value& value(ValueId id) const { return values[id.index()]; }
};

// Of the rank of a group that has most of a value.
inline int64_t LargestExtent(const Value& value, const DeviceGroup& group,
                             size_t dim) {
  return LargestExtent(value.layout, group, value.shape, dim);
}
inline int64_t ElementsOf(const Value& value, const DeviceGroup& group) {
  return LargestElements(value.layout, group, value.shape);
}
inline Bytes BytesOf(const Value& value, const DeviceGroup& group) {
  return {ElementsOf(value, group) * SizeOf(value.dtype)};
}

// Of one rank, all values of a list. A value of another group (a scalar of the
// world's) is small and counted whole.
int64_t ElementsOf(const TaskView& view, const std::vector<ValueId>& ids);
Bytes BytesOf(const TaskView& view, const std::vector<ValueId>& ids);

// The type that a kernel computes in: of its first float tensor.
DType ComputeType(const TaskView& view);

}  // namespace tessera
