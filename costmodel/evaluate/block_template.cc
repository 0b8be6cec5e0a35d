#include "costmodel/evaluate/block_template.h"

#include <algorithm>
#include <set>

namespace tessera {
namespace {

// A node that touches a tensor, and as what.
struct Access {
  NodeId node;
  int64_t role = 0;  // 2k for operand k, 2k + 1 for result k
};

std::vector<std::vector<Access>> AccessesOf(const Graph& graph) {
  std::vector<std::vector<Access>> accesses(graph.tensors.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    const NodeId id(static_cast<int64_t>(i));
    for (size_t k = 0; k < node.operands.size(); ++k) {
      accesses[node.operands[k].index()].push_back(
          {id, 2 * static_cast<int64_t>(k)});
    }
    for (size_t k = 0; k < node.results.size(); ++k) {
      accesses[node.results[k].index()].push_back(
          {id, 2 * static_cast<int64_t>(k) + 1});
    }
  }
  return accesses;
}

bool IsSum(const Node& node) {
  return node.pass == Pass::kBackward && node.op->name == "sum";
}

// Inputs have no layout of their own: each program loads what it wants.
bool IsInput(const Graph& graph, TensorId id) {
  return graph.tensor(id).kind == TensorKind::kInput;
}

TemplatePort PortIn(const std::map<TensorId, int>& numbers, const Port& port) {
  TemplatePort out = {port.kind, -1, port.index};
  if (port.tensor.valid()) out.tensor = numbers.at(port.tensor);
  return out;
}

StreamKey StreamOf(const Task& task) {
  return {task.stream, task.stream == StreamRole::kComm ? task.axes : 0};
}

}  // namespace

std::vector<BlockShape> ShapesOf(const Graph& graph) {
  const auto accesses = AccessesOf(graph);
  const std::vector<int> classes = BlockClasses(graph);
  std::vector<BlockShape> shapes(graph.blocks.size());
  std::vector<int64_t> number(graph.nodes.size());  // within its block
  std::vector<std::vector<NodeId>> nodes(graph.blocks.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    auto& list = nodes[static_cast<size_t>(node.block)];
    number[i] = static_cast<int64_t>(list.size());
    list.push_back(NodeId(static_cast<int64_t>(i)));
  }
  std::vector<int> weight_index(graph.tensors.size(), -1);
  int weights = 0;
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    if (graph.tensors[t].kind == TensorKind::kWeight) {
      weight_index[t] = weights++;
    }
  }

  std::map<IntKey, int> wirings;
  for (size_t b = 0; b < shapes.size(); ++b) {
    BlockShape& shape = shapes[b];
    const int own = static_cast<int>(b);
    std::set<TensorId> seen;
    std::set<int> others;
    const auto touch = [&](TensorId id) {
      if (!seen.insert(id).second) return;
      shape.tensors.push_back(id);
      if (weight_index[id.index()] >= 0) {
        shape.weights.push_back(
            static_cast<size_t>(weight_index[id.index()]));
      }
    };
    // A sum's layout follows that of the tensor whose gradient it is.
    const auto followed = [&](const Node& node) {
      return graph.tensor(node.results[0]).gradient_of;
    };
    for (NodeId id : nodes[b]) {
      const Node& node = graph.node(id);
      if (node.pass == Pass::kForward) shape.forward.push_back(id);
      for (TensorId operand : node.operands) touch(operand);
      for (TensorId result : node.results) touch(result);
      if (IsSum(node)) touch(followed(node));
    }
    std::vector<TensorId> related = shape.tensors;
    for (TensorId id : shape.tensors) {
      if (IsInput(graph, id)) continue;
      for (const Access& access : accesses[id.index()]) {
        const Node& node = graph.node(access.node);
        if (IsSum(node)) related.push_back(followed(node));
      }
    }
    for (TensorId id : related) {
      if (IsInput(graph, id)) continue;
      for (const Access& access : accesses[id.index()]) {
        others.insert(graph.node(access.node).block);
      }
    }
    others.erase(own);
    shape.depends = {own};
    shape.depends.insert(shape.depends.end(), others.begin(), others.end());

    for (TensorId id : shape.tensors) {
      for (const Access& access : accesses[id.index()]) {
        const Node& node = graph.node(access.node);
        const bool makes = access.role % 2 == 1;
        if (!makes || !IsSum(node)) continue;
        // Gradients flow from later blocks to earlier ones.
        if (node.block < own) return {};
        const bool leaves = std::any_of(
            accesses[id.index()].begin(), accesses[id.index()].end(),
            [&](const Access& a) { return graph.node(a.node).block != own; });
        if (node.block == own && leaves) shape.sums.push_back(id);
      }
    }

    IntKey key;
    for (int block : shape.depends) {
      key.push_back(block - own);
      key.push_back(classes[static_cast<size_t>(block)]);
    }
    for (TensorId id : related) {
      key.push_back(-1);
      if (IsInput(graph, id)) continue;
      for (const Access& access : accesses[id.index()]) {
        const int block = graph.node(access.node).block;
        const auto at = std::find(shape.depends.begin(), shape.depends.end(),
                                  block);
        key.push_back(at - shape.depends.begin());
        key.push_back(number[access.node.index()]);
        key.push_back(access.role);
      }
    }
    shape.wiring =
        wirings.try_emplace(key, static_cast<int>(wirings.size()))
            .first->second;
  }
  return shapes;
}

const BlockProgram& Programs::Of(int block, ProgramKind kind) {
  const auto key = std::pair(block, kind);
  auto it = programs_.find(key);
  if (it == programs_.end()) {
    it = programs_.emplace(key, LowerBlock(context_, block, kind)).first;
  }
  return it->second;
}

BlockTemplate MakeTemplate(const Pricer& pricer, Programs& programs, int block,
                           const BlockShape& shape) {
  const LoweringContext& context = programs.context();
  const auto& groups = context.plan().groups;
  const GroupId own = context.group_of_block(block);
  const DeviceGroup& group = groups[own.index()];
  const int group_class = pricer.ClassOf(group);
  std::map<TensorId, int> numbers;
  for (size_t i = 0; i < shape.tensors.size(); ++i) {
    numbers.emplace(shape.tensors[i], static_cast<int>(i));
  }
  // The block in the peer's group that has the other end.
  const auto peer_of = [&](GroupId peer, ProgramKind kind, const Port& port,
                           bool receives, const Value** value) {
    for (size_t i = 0; i < shape.depends.size(); ++i) {
      if (context.group_of_block(shape.depends[i]) != peer) continue;
      const BlockProgram& other = programs.Of(shape.depends[i], kind);
      for (const Transfer& t : receives ? other.receives : other.sends) {
        if (t.port != port || t.peer != own) continue;
        const Task& task = other.tasks[t.task];
        *value = &other.values[(receives ? task.writes : task.reads)[0]
                                   .index()];
        return static_cast<int>(i);
      }
    }
    TESSERA_CHECK(false) << "a transfer without its other end";
    return -1;
  };

  BlockTemplate out;
  for (int k = 0; k < kProgramKinds; ++k) {
    const auto kind = static_cast<ProgramKind>(k);
    const BlockProgram& program = programs.Of(block, kind);
    TemplateProgram& priced = out.programs[static_cast<size_t>(k)];
    std::vector<int> buffer(program.values.size(), -1);
    for (size_t v = 0; v < program.values.size(); ++v) {
      const Value& value = program.values[v];
      if (value.alias_of.valid()) continue;
      const bool scalar = value.shape.empty();
      buffer[v] = static_cast<int>(priced.buffers.size());
      priced.buffers.push_back(
          {{(scalar ? 1 : LargestElements(value.layout, group, value.shape)) *
            SizeOf(value.dtype)},
           value.category,
           value.persistent});
    }
    for (size_t v = 0; v < program.values.size(); ++v) {
      size_t root = v;
      while (program.values[root].alias_of.valid()) {
        root = program.values[root].alias_of.index();
      }
      buffer[v] = buffer[root];
    }
    for (const BoundValue& import : program.imports) {
      priced.imports.push_back(
          {PortIn(numbers, import.port), buffer[import.value.index()]});
      if (import.port.tensor == context.graph().loss) {
        out.loss_tensor = numbers.at(import.port.tensor);
      }
    }
    for (const BoundValue& exported : program.exports) {
      priced.exports.push_back(
          {PortIn(numbers, exported.port), buffer[exported.value.index()]});
    }
    std::vector<const Value*> peer_values(program.tasks.size(), nullptr);
    std::vector<GroupId> peer_groups(program.tasks.size());
    for (const Transfer& send : program.sends) {
      priced.sends.push_back(
          {send.task, PortIn(numbers, send.port),
           peer_of(send.peer, kind, send.port, true, &peer_values[send.task])});
      peer_groups[send.task] = send.peer;
    }
    for (const Transfer& receive : program.receives) {
      const Value* sent = nullptr;
      priced.receives.push_back(
          {receive.task, PortIn(numbers, receive.port),
           peer_of(receive.peer, kind, receive.port, false, &sent)});
    }
    for (size_t t = 0; t < program.tasks.size(); ++t) {
      const Task& task = program.tasks[t];
      TaskView view;
      view.task = &task;
      view.values = program.values;
      view.group = &group;
      view.group_class = group_class;
      if (task.kind == TaskKind::kSend) {
        view.peer = peer_values[t];
        view.peer_group = &groups[peer_groups[t].index()];
        view.pair_class = pricer.ClassOf(group, view.peer_group);
      }
      TemplateTask& made = priced.tasks.emplace_back();
      made.cost = pricer.Price(view);
      made.stream = StreamOf(task);
      for (ValueId id : task.reads) made.reads.push_back(buffer[id.index()]);
      for (ValueId id : task.writes) made.writes.push_back(buffer[id.index()]);
    }
  }

  if (out.loss_tensor >= 0) {
    const BlockProgram& forward = programs.Of(block, ProgramKind::kForward);
    for (const BoundValue& import : forward.imports) {
      if (import.port.tensor != context.graph().loss) continue;
      const Value& loss = forward.values[import.value.index()];
      Task task;
      task.kind = TaskKind::kComm;
      task.comm = CommKind::kAllReduce;
      task.stream = context.concurrent_streams() ? StreamRole::kComm
                                                 : StreamRole::kCompute;
      task.axes = loss.layout.partial;
      if (group.Size(task.axes) == 1) continue;
      task.reads = {import.value};
      task.writes = {import.value};
      TaskView view;
      view.task = &task;
      view.values = forward.values;
      view.group = &group;
      view.group_class = group_class;
      out.reduces_loss = true;
      out.loss_reduce.cost = pricer.Price(view);
      out.loss_reduce.stream = StreamOf(task);
    }
  }
  for (TensorId id : shape.sums) out.sums.push_back(context.produced(id));
  return out;
}

}  // namespace tessera
