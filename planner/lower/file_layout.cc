#include "planner/lower/file_layout.h"

#include "planner/base/check.h"
#include "planner/base/divide.h"
#include "planner/base/free_list.h"

namespace tessera {
Bytes WholeFileBlocks(Bytes bytes) {
  return {RoundUp(bytes.value, kFileBlockBytes)};
}

FileLayout LayOutFile(const TaskGraph& tasks, std::span<const Bytes> bytes) {
  TESSERA_CHECK(bytes.size() == tasks.values.size()) << bytes.size();
  FileLayout layout;
  layout.offsets.assign(tasks.values.size(), -1);
  bool moves = false;
  for (size_t v = 0; v < tasks.values.size(); ++v) {
    const Value& value = tasks.values[v];
    if (value.tier != MemoryTier::kFile || value.alias_of.valid()) continue;
    moves = moves || !value.persistent;
    if (!value.persistent || bytes[v] == Bytes{}) continue;
    layout.offsets[v] = layout.persistent.value;
    layout.persistent += WholeFileBlocks(bytes[v]);
  }
  layout.length = layout.persistent;
  if (!moves) return layout;

  FreeList room(kFileBlockBytes);
  const auto frees = LastUses(tasks);
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    for (const auto* ids : {&task.reads, &task.writes}) {
      for (ValueId id : *ids) {
        const size_t root = tasks.Root(id).index();
        if (tasks.values[root].tier != MemoryTier::kFile ||
            bytes[root] == Bytes{} || layout.offsets[root] >= 0) {
          continue;
        }
        layout.offsets[root] =
            layout.persistent.value + room.Take(bytes[root].value);
      }
    }
    for (ValueId id : frees[t]) {
      const int64_t offset = layout.offsets[id.index()];
      if (offset < 0) continue;
      room.Give(offset - layout.persistent.value, bytes[id.index()].value);
    }
  }
  layout.length += {room.end()};
  return layout;
}

}  // namespace tessera
