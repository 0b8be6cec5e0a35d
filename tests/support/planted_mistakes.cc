#include "tests/support/planted_mistakes.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "planner/base/check.h"
#include "planner/base/element_count.h"

namespace tessera {
namespace {

// The first task that passes `test`, or null.
template <typename Test>
Task* FindTask(TaskGraph& tasks, Test test) {
  const auto it = std::find_if(tasks.tasks.begin(), tasks.tasks.end(), test);
  return it == tasks.tasks.end() ? nullptr : &*it;
}

// Makes a task do nothing. What it was the first to write stays as it was in
// the beginning.
void Remove(TaskGraph& tasks, Task& task) {
  const std::vector<ValueId> written = task.writes;
  task.kind = TaskKind::kSlice;
  task.reads.clear();
  task.writes.clear();
  task.peer = ValueId();
  for (ValueId id : written) {
    const ValueId root = tasks.Root(id);
    const auto has_root = [&](const std::vector<ValueId>& ids) {
      return std::any_of(ids.begin(), ids.end(),
                         [&](ValueId v) { return tasks.Root(v) == root; });
    };
    const auto first = std::find_if(
        tasks.tasks.begin(), tasks.tasks.end(),
        [&](Task& t) { return has_root(t.reads) || has_root(t.writes); });
    if (first == tasks.tasks.end() || has_root(first->reads)) {
      tasks.values[root.index()].persistent = true;
    }
  }
}

bool IsComm(const Task& task, CommKind kind) {
  return task.kind == TaskKind::kComm && task.comm == kind;
}

bool IsActivation(const Graph& graph, const Value& value) {
  return value.tensor.valid() &&
         graph.tensor(value.tensor).kind == TensorKind::kActivation;
}

// Whether a router chooses by it: of one expert a token, with all of its
// weight, the choice has no gradient.
bool IsOfRouter(const Graph& graph, TensorId weight) {
  return std::any_of(
      graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
        return node.op->name == "linear_fp32" && node.operands[1] == weight;
      });
}

// Matrices have gradients that are not zero; those of some biases are.
bool IsMatrix(const Graph& graph, const Value& value) {
  return value.tensor.valid() &&
         graph.tensor(value.tensor).kind == TensorKind::kWeight &&
         graph.tensor(value.tensor).weight_decay &&
         !IsOfRouter(graph, value.tensor);
}

bool ReadsMatrix(const Graph& graph, const TaskGraph& tasks, const Task& task) {
  return std::any_of(task.reads.begin(), task.reads.end(), [&](ValueId id) {
    return IsMatrix(graph, tasks.value(id));
  });
}

bool ReadsActivation(const Graph& graph, const TaskGraph& tasks,
                     const Task& task) {
  return std::any_of(task.reads.begin(), task.reads.end(), [&](ValueId id) {
    return IsActivation(graph, tasks.value(id));
  });
}

bool ReadsWhat(const TaskGraph& tasks, const Task& task,
               std::string_view what) {
  return std::any_of(task.reads.begin(), task.reads.end(),
                     [&](ValueId id) { return tasks.value(id).what == what; });
}

std::string_view OpOf(const Graph& graph, const Task& task) {
  return task.kind == TaskKind::kCompute && task.node.valid()
             ? graph.node(task.node).op->name
             : std::string_view();
}

// The same buffer, but two ranks believe that they hold each other's shard of
// it; nothing where no two shards have one shape and other places.
std::optional<ValueId> WithSwappedShards(TaskGraph& tasks, ValueId id) {
  Value value = tasks.value(id);
  DeviceGroup group = tasks.group(value.group);
  const int n = static_cast<int>(group.devices.size());
  const auto sizes = [](const std::vector<Range>& block) {
    std::vector<int64_t> sizes;
    for (const Range& range : block) sizes.push_back(range.size());
    return sizes;
  };
  for (int a = 0; a < n; ++a) {
    for (int b = a + 1; b < n; ++b) {
      const auto block_a = BlockAt(value.layout, group, value.shape, a);
      const auto block_b = BlockAt(value.layout, group, value.shape, b);
      const Range run_a = FlatRunAt(value.layout, group, value.shape, a);
      const Range run_b = FlatRunAt(value.layout, group, value.shape, b);
      if (sizes(block_a) != sizes(block_b) || run_a.size() != run_b.size() ||
          (block_a == block_b && run_a == run_b)) {
        continue;
      }
      std::swap(group.devices[static_cast<size_t>(a)],
                group.devices[static_cast<size_t>(b)]);
      tasks.groups.push_back(group);
      value.group = GroupId(static_cast<int64_t>(tasks.groups.size()) - 1);
      value.alias_of = tasks.Root(id);
      value.persistent = false;
      tasks.values.push_back(value);
      return ValueId(static_cast<int64_t>(tasks.values.size()) - 1);
    }
  }
  return {};
}

// Swaps the shards of the first value that tasks for which `test` holds write
// (or read, where they write none).
template <typename Test>
bool SwapShards(TaskGraph& tasks, bool of_reads, Test test) {
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    if (!test(tasks.tasks[t])) continue;
    auto& ids = of_reads ? tasks.tasks[t].reads : tasks.tasks[t].writes;
    const auto swapped = WithSwappedShards(tasks, ids[0]);
    if (!swapped) continue;
    (of_reads ? tasks.tasks[t].reads : tasks.tasks[t].writes)[0] = *swapped;
    return true;
  }
  return false;
}

template <typename Test>
bool RemoveTask(TaskGraph& tasks, Test test) {
  Task* const task = FindTask(tasks, test);
  if (task == nullptr) return false;
  Remove(tasks, *task);
  return true;
}

// Removes a transfer, on both of its sides.
template <typename Test>
bool RemoveTransfer(TaskGraph& tasks, Test test) {
  Task* const send = FindTask(tasks, [&](const Task& task) {
    return task.kind == TaskKind::kSend && test(tasks.value(task.reads[0]));
  });
  if (send == nullptr) return false;
  const ValueId to = send->peer;
  Task* const receive = FindTask(tasks, [&](const Task& task) {
    return task.kind == TaskKind::kRecv && task.writes[0] == to;
  });
  TESSERA_CHECK(receive != nullptr) << "a send without its receive";
  Remove(tasks, *send);
  Remove(tasks, *receive);
  return true;
}

// ---- Collectives

bool LostForwardAllReduce(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kAllReduce) && task.pass == Pass::kForward &&
           task.microbatch >= 0 && ReadsActivation(graph, tasks, task);
  });
}

bool LostGather(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kAllGather) && task.pass == Pass::kForward &&
           task.microbatch >= 0 && ReadsActivation(graph, tasks, task);
  });
}

bool LostRedistribution(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return (IsComm(task, CommKind::kAllToAll) ||
            IsComm(task, CommKind::kRedistribute)) &&
           task.pass == Pass::kForward && ReadsActivation(graph, tasks, task);
  });
}

// Convolutions take what they lack of an image for padding.
bool LostHalo(const Graph& graph, TaskGraph& tasks) {
  for (const Task& task : tasks.tasks) {
    if (!IsComm(task, CommKind::kRedistribute)) continue;
    Value& value = tasks.values[task.writes[0].index()];
    const bool of_convolution =
        std::ranges::all_of(tasks.tasks, [&](const Task& t) {
          return std::ranges::count(t.reads, task.writes[0]) == 0 ||
                 OpOf(graph, t) == "conv2d";
        });
    if (!value.layout.has_halo() || !of_convolution) continue;
    value.layout.halos = {};
    return true;
  }
  return false;
}

bool LostGradientAllReduce(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kAllReduce) && task.pass == Pass::kBackward &&
           ReadsMatrix(graph, tasks, task);
  });
}

bool LostGradientReduceScatter(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kReduceScatter) &&
           task.pass == Pass::kBackward && ReadsMatrix(graph, tasks, task);
  });
}

bool LostReturnOfShards(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kAllGather) && task.optimizer &&
           ReadsMatrix(graph, tasks, task);
  });
}

bool LostStateOfTheLoss(const Graph&, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kAllGather) &&
           ReadsWhat(tasks, task, "state");
  });
}

bool LostStateOfABatchNorm(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    if (!IsComm(task, CommKind::kAllGather) ||
        !ReadsWhat(tasks, task, "state")) {
      return false;
    }
    return std::any_of(
        tasks.tasks.begin(), tasks.tasks.end(), [&](const Task& t) {
          const std::string_view op = OpOf(graph, t);
          return (op == "batch_norm_dx" || op == "tracked_batch_norm_dx") &&
                 t.writes[0] == task.reads[0];
        });
  });
}

bool LostNormAllReduce(const Graph&, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kAllReduce) &&
           ReadsWhat(tasks, task, "square sum");
  });
}

bool LostLossAllReduce(const Graph&, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsComm(task, CommKind::kAllReduce) && ReadsWhat(tasks, task, "loss");
  });
}

bool AllReduceOverTooFewAxes(const Graph& graph, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    return IsComm(t, CommKind::kAllReduce) && (t.axes & (t.axes - 1)) != 0 &&
           (ReadsMatrix(graph, tasks, t) || ReadsActivation(graph, tasks, t));
  });
  if (task == nullptr) return false;
  task->axes &= task->axes - 1;
  return true;
}

// ---- Shards

bool SwappedTokens(const Graph& graph, TaskGraph& tasks) {
  return SwapShards(tasks, false, [&](const Task& task) {
    return task.kind == TaskKind::kLoad &&
           graph.tensor(tasks.value(task.writes[0]).tensor).name == "tokens";
  });
}

// Of whole tensors: all of any shard is there.
// Not of attention to both sides, where a swap was met that changes no loss.
bool SwappedSlices(const Graph& graph, TaskGraph& tasks) {
  if (std::ranges::any_of(graph.nodes, [](const Node& node) {
        return node.op->name == "attention_bidirectional";
      })) {
    return false;
  }
  return SwapShards(tasks, false, [&](const Task& task) {
    return task.kind == TaskKind::kSlice && task.pass == Pass::kForward &&
           task.microbatch >= 0 && ReadsActivation(graph, tasks, task) &&
           tasks.value(task.writes[0]).layout.partial == 0 &&
           tasks.value(task.reads[0]).layout.tile ==
               tasks.value(task.writes[0]).layout.tile;
  });
}

bool SwappedZeroShards(const Graph& graph, TaskGraph& tasks) {
  return SwapShards(tasks, false, [&](const Task& task) {
    return task.kind == TaskKind::kSlice && task.optimizer &&
           ReadsMatrix(graph, tasks, task);
  });
}

bool SwappedReceivers(const Graph& graph, TaskGraph& tasks) {
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    Task& task = tasks.tasks[t];
    if (task.kind != TaskKind::kRecv || task.pass != Pass::kForward ||
        !IsActivation(graph, tasks.value(task.writes[0]))) {
      continue;
    }
    const ValueId received = task.writes[0];
    const auto swapped = WithSwappedShards(tasks, received);
    if (!swapped) continue;
    for (Task& other : tasks.tasks) {
      if (other.kind == TaskKind::kSend && other.peer == received) {
        other.peer = *swapped;
      }
    }
    tasks.tasks[t].writes[0] = *swapped;
    return true;
  }
  return false;
}

// ---- Sums

// The bias of a key is no place: the softmax does not see it.
bool BiasOnEveryRank(const Graph& graph, TaskGraph& tasks) {
  bool planted = false;
  for (Task& task : tasks.tasks) {
    if (OpOf(graph, task) != "linear" || task.masks.empty() ||
        graph.node(task.node).name.ends_with(".k")) {
      continue;
    }
    task.masks.clear();
    planted = true;
  }
  return planted;
}

// Each rank divides by the mean number of labels, as if its own were that.
bool MeanOfMeans(const Graph& graph, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    if (!IsComm(t, CommKind::kAllReduce)) return false;
    const TensorId tensor = tasks.value(t.reads[0]).tensor;
    return std::any_of(
        graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
          return node.op->name == "count_labels" && node.results[0] == tensor;
        });
  });
  if (task == nullptr) return false;
  const auto ranks =
      static_cast<size_t>(tasks.group(task->group).Size(task->axes));
  task->kind = TaskKind::kCompute;
  task->kernel = "sum";
  task->reads.assign(ranks, task->reads[0]);
  tasks.values[task->writes[0].index()].alias_of = ValueId();
  return true;
}

bool TiedNormCountedTwice(const Graph& graph, TaskGraph& tasks) {
  for (Task& task : tasks.tasks) {
    if (task.kernel != "square_sum" || task.masks.empty()) continue;
    for (size_t i = 0; i < task.reads.size(); ++i) {
      const TensorId weight = tasks.value(task.reads[i]).tensor;
      const auto terms = std::count_if(
          graph.gradients.begin(), graph.gradients.end(),
          [&](const GradientTerm& term) { return term.weight == weight; });
      if (terms < 2) continue;
      task.reads.push_back(task.reads[i]);
      task.masks.push_back(task.masks[i]);
      return true;
    }
  }
  return false;
}

bool NormOfEveryReplica(const Graph& graph, TaskGraph& tasks) {
  for (Task& task : tasks.tasks) {
    if (task.kernel != "square_sum") continue;
    for (size_t i = 0; i < task.masks.size(); ++i) {
      const Value& gradient = tasks.value(task.reads[i]);
      // Away from a root there is no gradient to count.
      if (task.masks[i] == 0 || gradient.layout.rooted != 0 ||
          !IsMatrix(graph, gradient)) {
        continue;
      }
      task.masks[i] = 0;
      return true;
    }
  }
  return false;
}

bool UnclippedUpdate(const Graph&, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    return t.kernel == "adamw" && t.writes.size() / 3 + 1 == t.reads.size();
  });
  if (task == nullptr) return false;
  task->reads.pop_back();
  return true;
}

// Adafactor's sums of one kind of a matrix stay those of each rank.
bool LostSums(const Graph& graph, TaskGraph& tasks, std::string_view what) {
  for (Task& task : tasks.tasks) {
    if (!IsComm(task, CommKind::kAllReduce)) continue;
    for (size_t i = 0; i < task.reads.size(); ++i) {
      const Value& value = tasks.value(task.reads[i]);
      if (value.what != what || !IsMatrix(graph, value)) continue;
      task.reads.erase(task.reads.begin() + static_cast<int64_t>(i));
      task.writes.erase(task.writes.begin() + static_cast<int64_t>(i));
      if (task.reads.empty()) task.kind = TaskKind::kSlice;
      return true;
    }
  }
  return false;
}

bool LostColumnSums(const Graph& graph, TaskGraph& tasks) {
  return LostSums(graph, tasks, "column sums");
}

bool LostSizeOfAWeight(const Graph& graph, TaskGraph& tasks) {
  return LostSums(graph, tasks, "parameter squares");
}

// ---- Microbatches

bool IsGradientOfMatrix(const Graph& graph, const TaskGraph& tasks,
                        const Task& task) {
  return OpOf(graph, task) == "linear_dw" &&
         tasks.value(task.writes[0]).what == "gradient";
}

bool LostMicrobatch(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return task.accumulate && IsGradientOfMatrix(graph, tasks, task);
  });
}

bool OverwrittenGradient(const Graph& graph, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    return t.accumulate && IsGradientOfMatrix(graph, tasks, t);
  });
  if (task == nullptr) return false;
  task->accumulate = false;
  return true;
}

bool OverwrittenShardOfGradient(const Graph& graph, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    return t.accumulate && t.kernel == "sum" &&
           tasks.value(t.writes[0]).what == "gradient shard" &&
           IsMatrix(graph, tasks.value(t.writes[0]));
  });
  if (task == nullptr) return false;
  task->accumulate = false;
  return true;
}

bool GradientOfTheStepBefore(const Graph& graph, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    return !t.accumulate && IsGradientOfMatrix(graph, tasks, t) &&
           tasks.value(t.writes[0]).persistent;
  });
  if (task == nullptr) return false;
  task->accumulate = true;
  return true;
}

// Labels of the first two microbatches, in both passes.
bool SwappedMicrobatches(const Graph& graph, TaskGraph& tasks) {
  bool planted = false;
  for (Task& task : tasks.tasks) {
    if (task.kind != TaskKind::kLoad || task.microbatch < 0 ||
        task.microbatch > 1 || tasks.microbatches < 2) {
      continue;
    }
    Value& value = tasks.values[task.writes[0].index()];
    if (graph.tensor(value.tensor).name != "labels") continue;
    value.sample_offset = value.shape[0] * (1 - task.microbatch);
    planted = true;
  }
  return planted;
}

bool ActivationOfAnotherMicrobatch(const Graph& graph, TaskGraph& tasks) {
  for (Task& task : tasks.tasks) {
    if (OpOf(graph, task) != "linear_dw" || task.microbatch != 1) continue;
    const Task* const before = FindTask(tasks, [&](const Task& t) {
      return t.node == task.node && t.microbatch == 0 &&
             t.kind == TaskKind::kCompute;
    });
    // In a table of actions microbatch 0 may come later.
    if (before == nullptr || before > &task ||
        !IsActivation(graph, tasks.value(before->reads[1]))) {
      continue;
    }
    task.reads[1] = before->reads[1];
    return true;
  }
  return false;
}

// ---- Dropout

bool LocalDropoutCounterOfMicrobatch(const Graph& graph, TaskGraph& tasks) {
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    if (OpOf(graph, tasks.tasks[t]) != "dropout" ||
        tasks.tasks[t].microbatch < 1) {
      continue;
    }
    Value value = tasks.value(tasks.tasks[t].reads[0]);
    value.alias_of = tasks.Root(tasks.tasks[t].reads[0]);
    value.persistent = false;
    value.sample_offset = 0;
    tasks.values.push_back(value);
    tasks.tasks[t].reads[0] =
        ValueId(static_cast<int64_t>(tasks.values.size()) - 1);
    return true;
  }
  return false;
}

// Of a few elements, a step's of a recurrent network, two shards may well drop
// the same.
bool LocalDropoutCounterOfShard(const Graph& graph, TaskGraph& tasks) {
  constexpr int64_t kEnough = 96;
  return SwapShards(tasks, true, [&](const Task& task) {
    if (OpOf(graph, task) != "dropout" || task.pass != Pass::kForward) {
      return false;
    }
    return ElementCount(tasks.value(task.reads[0]).shape) >= kEnough;
  });
}

// ---- Tiles

// The same buffer, taken for the other of a linear's first two tiles; nothing
// where these are of unlike sizes.
std::optional<ValueId> WithOtherTile(TaskGraph& tasks, ValueId id) {
  Value value = tasks.value(id);
  const DeviceGroup& group = tasks.group(value.group);
  Layout& layout = value.layout;
  if (layout.tile.count == 1 || layout.tile.index > 1) return {};
  for (int i = 0; i < static_cast<int>(group.devices.size()); ++i) {
    const int64_t size = ElementsAt(layout, group, value.shape, i);
    Layout other = layout;
    other.tile.index = 1 - layout.tile.index;
    if (ElementsAt(other, group, value.shape, i) != size) return {};
  }
  layout.tile.index = 1 - layout.tile.index;
  value.alias_of = tasks.Root(id);
  value.persistent = false;
  tasks.values.push_back(value);
  return ValueId(static_cast<int64_t>(tasks.values.size()) - 1);
}

bool TileInTheWrongColumns(const Graph&, TaskGraph& tasks) {
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    if (tasks.tasks[t].kind != TaskKind::kSlice ||
        tasks.value(tasks.tasks[t].writes[0]).layout.tile.count > 1) {
      continue;
    }
    const auto other = WithOtherTile(tasks, tasks.tasks[t].reads[0]);
    if (!other) continue;
    tasks.tasks[t].reads[0] = *other;
    return true;
  }
  return false;
}

bool IsTileOf(const Graph& graph, const TaskGraph& tasks, const Task& task,
              std::string_view op, size_t operand) {
  return OpOf(graph, task) == op &&
         tasks.value(task.reads[operand]).layout.tile.count > 1;
}

// Of a later tile: the sum over the tiles before is lost.
bool OverwrittenSumOverTiles(const Graph& graph, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    return t.accumulate && IsTileOf(graph, tasks, t, "linear_dx", 1);
  });
  if (task == nullptr) return false;
  task->accumulate = false;
  return true;
}

bool TileOfTheGradientTwice(const Graph& graph, TaskGraph& tasks) {
  for (Task& task : tasks.tasks) {
    if (!IsTileOf(graph, tasks, task, "linear_dw", 0)) continue;
    const Tile tile = tasks.value(task.reads[0]).layout.tile;
    const Task* const before = FindTask(tasks, [&](const Task& t) {
      return t.node == task.node && t.microbatch == task.microbatch &&
             IsTileOf(graph, tasks, t, "linear_dw", 0);
    });
    if (tile.index != 1 || !WithOtherTile(tasks, before->reads[0])) continue;
    task.reads[0] = before->reads[0];
    return true;
  }
  return false;
}

// ---- Rings

// Another value of the same buffer, in another layout; nothing where ranks'
// blocks differ in size.
std::optional<ValueId> WithLayout(TaskGraph& tasks, ValueId id,
                                  const Layout& layout) {
  Value value = tasks.value(id);
  const DeviceGroup& group = tasks.group(value.group);
  for (int i = 1; i < static_cast<int>(group.devices.size()); ++i) {
    if (ElementsAt(layout, group, value.shape, i) !=
        ElementsAt(layout, group, value.shape, 0)) {
      return {};
    }
  }
  value.layout = layout;
  value.alias_of = tasks.Root(id);
  value.persistent = false;
  tasks.values.push_back(value);
  return ValueId(static_cast<int64_t>(tasks.values.size()) - 1);
}

// The first shift that passes `test` leaves every rank what it has.
template <typename Test>
bool LoseShift(TaskGraph& tasks, Test test) {
  for (Task& task : tasks.tasks) {
    if (!IsComm(task, CommKind::kShift) || !test(task)) continue;
    std::vector<ValueId> writes;
    for (size_t i = 0; i < task.reads.size(); ++i) {
      const auto same =
          WithLayout(tasks, task.writes[i], tasks.value(task.reads[i]).layout);
      if (!same) return false;
      writes.push_back(*same);
    }
    task.kind = TaskKind::kSlice;
    task.writes = writes;
    return true;
  }
  return false;
}

bool LostShift(const Graph&, TaskGraph& tasks) {
  return LoseShift(
      tasks, [](const Task& task) { return task.pass == Pass::kForward; });
}

bool GradientsAtTheWrongRank(const Graph&, TaskGraph& tasks) {
  return LoseShift(tasks, [&](const Task& task) {
    return tasks.value(task.writes[0]).layout.turn == 0;
  });
}

bool OverwrittenAttention(const Graph& graph, TaskGraph& tasks) {
  Task* const task = FindTask(tasks, [&](const Task& t) {
    return OpOf(graph, t) == "attention" && t.accumulate;
  });
  if (task == nullptr) return false;
  task->accumulate = false;
  return true;
}

// Of the block before a rank's own, which its queries see in any window.
bool LostTermOfAGradient(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    if (task.kernel != "sum" || !task.accumulate || task.node.valid()) {
      return false;
    }
    const Value& sum = tasks.value(task.writes[0]);
    return sum.layout.ring != 0 &&
           sum.layout.turn + 1 ==
               tasks.group(sum.group).Size(sum.layout.ring) &&
           std::any_of(graph.nodes.begin(), graph.nodes.end(),
                       [&](const Node& node) {
                         return node.op->name == "attention_dqkv" &&
                                node.results[2] == sum.tensor;
                       });
  });
}

// The labels of the rank behind, as in an order that only they are in.
bool LabelsInAnotherOrder(const Graph& graph, TaskGraph& tasks) {
  bool planted = false;
  for (const Task& task : tasks.tasks) {
    if (task.kind != TaskKind::kLoad || tasks.zigzag == 0) continue;
    Value& value = tasks.values[task.writes[0].index()];
    if (graph.tensor(value.tensor).name != "labels" ||
        tasks.group(value.group).Size(value.layout.dims[1]) < 2) {
      continue;
    }
    Layout turned = value.layout;
    turned.ring = turned.dims[1];
    turned.turn = 1;
    const bool of_the_loss =
        std::all_of(tasks.tasks.begin(), tasks.tasks.end(), [&](const Task& t) {
          return OpOf(graph, t).starts_with("cross_entropy") ||
                 std::find(t.reads.begin(), t.reads.end(), task.writes[0]) ==
                     t.reads.end();
        });
    const int64_t ranks = tasks.group(value.group).Size(turned.ring);
    if (!of_the_loss || value.shape[1] % ranks != 0) continue;
    value.layout = turned;
    planted = true;
  }
  return planted;
}

// ---- Tied weights

bool LostTiedGradient(const Graph&, TaskGraph& tasks) {
  return RemoveTransfer(
      tasks, [](const Value& value) { return value.what == "gradient"; });
}

bool LostTiedWeight(const Graph&, TaskGraph& tasks) {
  return RemoveTransfer(
      tasks, [](const Value& value) { return value.what == "parameter"; });
}

// ---- Memory tiers

bool IsCopy(const TaskGraph& tasks, const Task& task, MemoryTier from,
            MemoryTier to) {
  return task.kind == TaskKind::kCopy &&
         tasks.value(task.reads[0]).tier == from &&
         tasks.value(task.writes[0]).tier == to;
}

bool LostGradientForTheHost(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsCopy(tasks, task, MemoryTier::kDevice, MemoryTier::kHost) &&
           !task.optimizer && ReadsMatrix(graph, tasks, task);
  });
}

// What the host has just computed, not a parameter that is copied in for a step
// on the device: where that reads it first, the copy of the step before will
// do.
bool StaleParameter(const Graph& graph, TaskGraph& tasks) {
  const auto is_computed = [&](ValueId id) {
    return FindTask(tasks, [&](const Task& task) {
             return task.kind == TaskKind::kCompute && task.optimizer &&
                    std::ranges::any_of(task.writes, [&](ValueId written) {
                      return tasks.Root(written) == tasks.Root(id);
                    });
           }) != nullptr;
  };
  return RemoveTask(tasks, [&](const Task& task) {
    return IsCopy(tasks, task, MemoryTier::kHost, MemoryTier::kDevice) &&
           task.optimizer && ReadsMatrix(graph, tasks, task) &&
           tasks.value(task.writes[0]).what == "parameter" &&
           is_computed(task.reads[0]);
  });
}

bool StateNotWrittenBack(const Graph& graph, TaskGraph& tasks) {
  return RemoveTask(tasks, [&](const Task& task) {
    return IsCopy(tasks, task, MemoryTier::kHost, MemoryTier::kFile) &&
           task.optimizer && ReadsMatrix(graph, tasks, task);
  });
}

bool ActivationOfAnotherMicrobatchCopiedIn(const Graph& graph,
                                           TaskGraph& tasks) {
  for (Task& task : tasks.tasks) {
    if (!IsCopy(tasks, task, MemoryTier::kHost, MemoryTier::kDevice) ||
        task.microbatch != 1 ||
        !IsActivation(graph, tasks.value(task.reads[0]))) {
      continue;
    }
    const Task* const before = FindTask(tasks, [&](const Task& t) {
      return t.kind == TaskKind::kCopy && t.microbatch == 0 &&
             t.stream == task.stream && t.group == task.group &&
             tasks.value(t.writes[0]).tensor ==
                 tasks.value(task.writes[0]).tensor &&
             t.reads.size() == task.reads.size();
    });
    if (before == nullptr || before > &task) continue;
    task.reads = before->reads;
    return true;
  }
  return false;
}

constexpr std::array kMistakes = {
    PlantedMistake{"a lost forward all-reduce", LostForwardAllReduce},
    PlantedMistake{"a lost all-gather", LostGather},
    PlantedMistake{"a lost redistribution", LostRedistribution},
    PlantedMistake{"a convolution without its halo", LostHalo},
    PlantedMistake{"a lost gradient all-reduce", LostGradientAllReduce},
    PlantedMistake{"a lost gradient reduce-scatter", LostGradientReduceScatter},
    PlantedMistake{"updated shards that are not returned", LostReturnOfShards},
    PlantedMistake{"a loss without the other shards' state",
                   LostStateOfTheLoss},
    PlantedMistake{"a batch norm's gradient without the other shards' sums",
                   LostStateOfABatchNorm},
    PlantedMistake{"a norm of one rank's gradients", LostNormAllReduce},
    PlantedMistake{"a loss of one rank's samples", LostLossAllReduce},
    PlantedMistake{"an all-reduce over too few axes", AllReduceOverTooFewAxes},
    PlantedMistake{"swapped shards of the data", SwappedTokens},
    PlantedMistake{"swapped slices", SwappedSlices},
    PlantedMistake{"swapped ZeRO shards", SwappedZeroShards},
    PlantedMistake{"swapped receivers", SwappedReceivers},
    PlantedMistake{"a bias on every rank", BiasOnEveryRank},
    PlantedMistake{"a mean of means", MeanOfMeans},
    PlantedMistake{"a tied norm counted twice", TiedNormCountedTwice},
    PlantedMistake{"a norm of every replica", NormOfEveryReplica},
    PlantedMistake{"an update that is not clipped", UnclippedUpdate},
    PlantedMistake{"columns of one rank's elements", LostColumnSums},
    PlantedMistake{"a weight's size of one rank's elements", LostSizeOfAWeight},
    PlantedMistake{"a lost microbatch", LostMicrobatch},
    PlantedMistake{"an overwritten gradient", OverwrittenGradient},
    PlantedMistake{"an overwritten shard of a gradient",
                   OverwrittenShardOfGradient},
    PlantedMistake{"a gradient of the step before", GradientOfTheStepBefore},
    PlantedMistake{"a wrong microbatch order", SwappedMicrobatches},
    PlantedMistake{"an activation of another microbatch",
                   ActivationOfAnotherMicrobatch},
    PlantedMistake{"a dropout counter local to the microbatch",
                   LocalDropoutCounterOfMicrobatch},
    PlantedMistake{"a dropout counter local to the shard",
                   LocalDropoutCounterOfShard},
    PlantedMistake{"a tile in the wrong columns", TileInTheWrongColumns},
    PlantedMistake{"an overwritten sum over tiles", OverwrittenSumOverTiles},
    PlantedMistake{"a tile's gradient made twice", TileOfTheGradientTwice},
    PlantedMistake{"a block that is not passed on", LostShift},
    PlantedMistake{"gradients of keys at the wrong rank",
                   GradientsAtTheWrongRank},
    PlantedMistake{"attention to the last block only", OverwrittenAttention},
    PlantedMistake{"a lost term of a value's gradient", LostTermOfAGradient},
    PlantedMistake{"labels in another order", LabelsInAnotherOrder},
    PlantedMistake{"a lost gradient of a tied weight", LostTiedGradient},
    PlantedMistake{"a tied weight that is not returned", LostTiedWeight},
    PlantedMistake{"a gradient that the host does not get",
                   LostGradientForTheHost},
    PlantedMistake{"a stale parameter after the host's step", StaleParameter},
    PlantedMistake{"optimizer state that is not written back",
                   StateNotWrittenBack},
    PlantedMistake{"an activation of another microbatch copied in",
                   ActivationOfAnotherMicrobatchCopiedIn},
};

}  // namespace

std::span<const PlantedMistake> PlantedMistakes() {
  return kMistakes;
}

}  // namespace tessera
