#include "planner/lower/task_graph.h"

namespace tessera {

ValueId TaskGraph::Root(ValueId id) const {
  while (value(id).alias_of.valid()) id = value(id).alias_of;
  return id;
}

TaskGraph LossOnly(const TaskGraph& graph) {
  std::vector<bool> wanted(graph.values.size(), false);
  wanted[graph.loss.index()] = true;
  std::vector<bool> kept(graph.tasks.size(), false);
  for (size_t t = graph.tasks.size(); t-- > 0;) {
    const Task& task = graph.tasks[t];
    // The optimizer's results are for the next step; the sum of the loss over
    // ranks stands beside it.
    if (task.kind == TaskKind::kSend) {
      kept[t] = wanted[task.peer.index()];
    } else {
      for (ValueId id : task.writes) {
        kept[t] = kept[t] ||
                  (wanted[id.index()] && (!task.optimizer || id == graph.loss));
      }
    }
    if (!kept[t]) continue;
    for (ValueId id : task.reads) wanted[id.index()] = true;
  }
  TaskGraph out;
  out.groups = graph.groups;
  out.world = graph.world;
  out.values = graph.values;
  out.loss = graph.loss;
  out.microbatches = graph.microbatches;
  out.zigzag = graph.zigzag;
  std::vector<TaskId> renamed(graph.tasks.size());
  for (size_t t = 0; t < graph.tasks.size(); ++t) {
    if (!kept[t]) continue;
    Task task = graph.tasks[t];
    std::vector<TaskId> deps;
    for (TaskId dep : task.deps) {
      if (kept[dep.index()]) deps.push_back(renamed[dep.index()]);
    }
    task.deps = std::move(deps);
    // What is kept of one microbatch is kept of all.
    if (task.like.valid()) task.like = renamed[task.like.index()];
    renamed[t] = TaskId(static_cast<int64_t>(out.tasks.size()));
    out.tasks.push_back(std::move(task));
  }
  return out;
}

std::vector<std::vector<ValueId>> LastUses(const TaskGraph& graph) {
  std::vector<TaskId> last(graph.values.size());
  for (size_t t = 0; t < graph.tasks.size(); ++t) {
    for (const auto* list : {&graph.tasks[t].reads, &graph.tasks[t].writes}) {
      for (ValueId id : *list) last[graph.Root(id).index()] = TaskId(t);
    }
  }
  std::vector<std::vector<ValueId>> frees(graph.tasks.size());
  for (size_t v = 0; v < last.size(); ++v) {
    if (last[v].valid() && !graph.values[v].persistent) {
      frees[last[v].index()].push_back(ValueId(v));
    }
  }
  return frees;
}

bool OnHost(const Task& task, std::span<const Value> values) {
  return task.kind == TaskKind::kCompute && !task.writes.empty() &&
         values[task.writes[0].index()].tier == MemoryTier::kHost;
}

Bytes LargestBytes(const TaskGraph& graph, ValueId id) {
  const Value& value = graph.value(id);
  return {LargestElements(value.layout, graph.group(value.group), value.shape) *
          value.ElementBytes()};
}

bool IsRecomputed(const Graph& graph, const Task& task) {
  return task.kind == TaskKind::kCompute && task.node.valid() &&
         task.pass == Pass::kBackward &&
         graph.node(task.node).pass == Pass::kForward;
}

std::string NameOf(const TaskGraph& tasks, const Graph& graph, TaskId id) {
  const Task& task = tasks.task(id);
  const auto value_name = [&](ValueId v) {
    const Value& value = tasks.value(v);
    std::string name(value.what);
    if (value.tensor.valid()) name += " " + graph.tensor(value.tensor).name;
    return name;
  };
  const auto list_name = [&](const std::vector<ValueId>& list) {
    if (list.empty()) return std::string();
    std::string name = " " + value_name(list[0]);
    if (list.size() > 1) {
      name += " and " + std::to_string(list.size() - 1) + " more";
    }
    return name;
  };
  std::string name;
  switch (task.kind) {
    case TaskKind::kLoad:
      name = "load" + list_name(task.writes);
      break;
    case TaskKind::kCompute:
      name = task.node.valid()
                 ? graph.node(task.node).name
                 : std::string(task.kernel) + list_name(task.writes);
      if (task.kernel.ends_with(".state")) name += ".state";
      if (IsRecomputed(graph, task)) name += " again";
      for (const auto* list : {&task.reads, &task.writes}) {
        if (list->empty() || !task.node.valid()) continue;
        const Tile& tile = tasks.value(list->back()).layout.tile;
        if (tile.count == 1) continue;
        name += " tile " + std::to_string(tile.index + 1) + "/" +
                std::to_string(tile.count);
        break;
      }
      break;
    case TaskKind::kSlice:
      name = "slice" + list_name(task.reads);
      break;
    case TaskKind::kCopy:
      name = "copy to " +
             std::string(NameOf(tasks.value(task.writes[0]).tier)) +
             list_name(task.reads);
      break;
    case TaskKind::kComm:
      name = std::string(NameOf(task.comm)) + list_name(task.reads);
      break;
    case TaskKind::kSend:
      name = "send" + list_name(task.reads);
      break;
    case TaskKind::kRecv:
      name = "receive" + list_name(task.writes);
      break;
  }
  if (task.microbatch >= 0) name += " mb" + std::to_string(task.microbatch);
  return name;
}

}  // namespace tessera
