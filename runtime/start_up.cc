#include "runtime/start_up.h"

#include "runtime/executor.h"

namespace tessera {

Result<void> StartUp::Advance(Bytes bytes) {
  if (stop != nullptr && stop->load()) {
    return Error{ErrorCode::kInterrupted, "interrupted before the first step",
                 ""};
  }
  done += bytes;
  if (progress) progress(done, total);
  return {};
}

Bytes PersistentBytes(const RankExecutor& executor) {
  Bytes total;
  const TaskGraph& tasks = executor.tasks();
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (!value.persistent || !executor.Holds(ValueId(v))) continue;
    total +=
        Bytes{executor.placement(ValueId(v)).elements() * SizeOf(value.dtype)};
  }
  return total;
}

}  // namespace tessera
