#include "costmodel/task_view.h"

namespace tessera {

int64_t ElementsOf(const TaskView& view, const std::vector<ValueId>& ids) {
  int64_t total = 0;
  for (ValueId id : ids) {
    const Value& value = view.value(id);
    total += value.shape.empty() ? 1 : ElementsOf(value, *view.group);
  }
  return total;
}

Bytes BytesOf(const TaskView& view, const std::vector<ValueId>& ids) {
  Bytes total;
  for (ValueId id : ids) {
    const Value& value = view.value(id);
    total += value.shape.empty() ? Bytes{SizeOf(value.dtype)}
                                 : BytesOf(value, *view.group);
  }
  return total;
}

DType ComputeType(const TaskView& view) {
  for (const auto* ids : {&view.task->reads, &view.task->writes}) {
    for (ValueId id : *ids) {
      const DType dtype = view.value(id).dtype;
      if (IsFloat(dtype)) return dtype;
    }
  }
  return DType::kFloat32;
}

}  // namespace tessera
