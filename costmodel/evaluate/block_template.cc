#include "costmodel/evaluate/block_template.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "planner/lower/staging.h"

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

// A sum's layout follows that of the tensor whose gradient it is.
TensorId FollowedBy(const Graph& graph, const Node& sum) {
  return graph.tensor(sum.results[0]).gradient_of;
}

// Makes the shapes of a graph's blocks, one after another.
class ShapeMaker {
 public:
  ShapeMaker(const Graph& graph, int prefetch)
      : graph_(graph),
        blocks_(static_cast<int>(graph.blocks.size())),
        // Even where nothing is gathered ahead, neighbours say where a pass
        // begins.
        reach_(std::clamp(prefetch, 1, std::max(1, blocks_))),
        accesses_(AccessesOf(graph)),
        classes_(BlockClasses(graph)),
        number_(graph.nodes.size()),
        nodes_(graph.blocks.size()),
        weight_index_(graph.tensors.size(), -1) {
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      auto& list = nodes_[static_cast<size_t>(graph.nodes[i].block)];
      number_[i] = static_cast<int64_t>(list.size());
      list.push_back(NodeId(static_cast<int64_t>(i)));
    }
    int weights = 0;
    for (size_t t = 0; t < graph.tensors.size(); ++t) {
      if (graph.tensors[t].kind == TensorKind::kWeight) {
        weight_index_[t] = weights++;
      }
    }
  }

  // Nothing where a block's layouts follow from those of a later one.
  std::optional<BlockShape> Make(int block) {
    BlockShape shape;
    const std::vector<int> near = Near(block);
    FindTensors(block, near, shape);
    FindShared(block, shape);
    const std::vector<TensorId> related = RelatedTo(shape);
    FindDepends(block, near, related, shape);
    if (!FindSums(block, shape)) return std::nullopt;
    shape.wiring = WiringOf(block, related, shape);
    for (size_t i = 0; i < shape.tensors.size(); ++i) {
      shape.numbers.emplace_back(shape.tensors[i], static_cast<int>(i));
    }
    std::ranges::sort(shape.numbers);
    return shape;
  }

 private:
  bool IsWeight(TensorId id) const { return weight_index_[id.index()] >= 0; }
  const std::vector<Access>& AccessesTo(TensorId id) const {
    return accesses_[id.index()];
  }
  int BlockOf(const Access& access) const {
    return graph_.node(access.node).block;
  }

  // The other blocks within reach.
  std::vector<int> Near(int block) const {
    std::vector<int> near;
    const int end = std::min(blocks_, block + reach_ + 1);
    for (int other = std::max(0, block - reach_); other < end; ++other) {
      if (other != block) near.push_back(other);
    }
    return near;
  }

  void FindTensors(int block, const std::vector<int>& near, BlockShape& shape) {
    std::set<TensorId> seen;
    const auto touch = [&](TensorId id) {
      if (!seen.insert(id).second) return false;
      shape.tensors.push_back(id);
      return true;
    };
    const auto touch_own = [&](TensorId id) {
      if (!touch(id) || !IsWeight(id)) return;
      shape.weights.push_back(static_cast<size_t>(weight_index_[id.index()]));
    };
    for (NodeId id : nodes_[static_cast<size_t>(block)]) {
      const Node& node = graph_.node(id);
      if (node.pass == Pass::kForward) shape.forward.push_back(id);
      for (TensorId operand : node.operands) touch_own(operand);
      for (TensorId result : node.results) touch_own(result);
      if (IsSum(node)) touch_own(FollowedBy(graph_, node));
    }
    for (int neighbour : near) {
      for (NodeId id : nodes_[static_cast<size_t>(neighbour)]) {
        for (TensorId operand : graph_.node(id).operands) {
          if (IsWeight(operand)) touch(operand);
        }
      }
    }
  }

  // Sets `shared` and `inner`.
  void FindShared(int block, BlockShape& shape) const {
    const auto is_own = [&](const Access& access) {
      return BlockOf(access) == block;
    };
    for (TensorId id : shape.tensors) {
      if (IsInput(graph_, id)) continue;
      const auto& of = AccessesTo(id);
      if (IsWeight(id) ? std::ranges::any_of(of, is_own)
                       : !std::ranges::all_of(of, is_own)) {
        shape.shared.push_back(id);
      } else if (graph_.tensor(id).kind == TensorKind::kActivation) {
        shape.inner.push_back(id);
      }
    }
  }

  // The block's tensors, then what gradient sums over them follow.
  std::vector<TensorId> RelatedTo(const BlockShape& shape) const {
    std::vector<TensorId> related = shape.tensors;
    for (TensorId id : shape.tensors) {
      if (IsInput(graph_, id)) continue;
      for (const Access& access : AccessesTo(id)) {
        const Node& node = graph_.node(access.node);
        if (IsSum(node)) related.push_back(FollowedBy(graph_, node));
      }
    }
    return related;
  }

  void FindDepends(int block, const std::vector<int>& near,
                   const std::vector<TensorId>& related,
                   BlockShape& shape) const {
    std::set<int> far;
    for (TensorId id : std::set<TensorId>(related.begin(), related.end())) {
      if (IsInput(graph_, id)) continue;
      for (const Access& access : AccessesTo(id)) far.insert(BlockOf(access));
    }
    far.erase(block);
    for (int other : near) far.erase(other);
    shape.depends = {block};
    shape.depends.insert(shape.depends.end(), near.begin(), near.end());
    shape.depends.insert(shape.depends.end(), far.begin(), far.end());
  }

  // Gradients flow from later blocks to earlier ones: false where one of a sum
  // does not.
  bool FindSums(int block, BlockShape& shape) const {
    for (TensorId id : shape.tensors) {
      for (const Access& access : AccessesTo(id)) {
        const Node& node = graph_.node(access.node);
        const bool makes = access.role % 2 == 1;
        if (!makes || !IsSum(node)) continue;
        if (node.block < block) return false;
        const bool leaves = std::ranges::any_of(
            AccessesTo(id),
            [&](const Access& other) { return BlockOf(other) != block; });
        if (node.block == block && leaves) shape.sums.push_back(id);
      }
    }
    return true;
  }

  int WiringOf(int block, const std::vector<TensorId>& related,
               const BlockShape& shape) {
    IntKey wiring;
    for (int other : shape.depends) {
      wiring.insert(wiring.end(),
                    {other - block, classes_[static_cast<size_t>(other)]});
    }
    // A tensor's accesses are told once, and are none of another tensor: sums
    // of as many gradients as it has readers all follow it.
    std::map<TensorId, int64_t> told;
    for (TensorId id : related) {
      wiring.push_back(-1);
      if (IsInput(graph_, id) || AccessesTo(id).empty()) continue;
      const auto [first, is_new] = told.try_emplace(id, std::ssize(told));
      if (!is_new) {
        wiring.insert(wiring.end(), {-2, first->second});
        continue;
      }
      for (const Access& access : AccessesTo(id)) {
        wiring.insert(wiring.end(),
                      {shape.IndexOf(BlockOf(access)),
                       number_[access.node.index()], access.role});
      }
    }
    const auto next = static_cast<int>(wirings_.size());
    return wirings_.try_emplace(std::move(wiring), next).first->second;
  }

  const Graph& graph_;
  const int blocks_;
  const int reach_;                                  // of neighbours
  const std::vector<std::vector<Access>> accesses_;  // by tensor
  const std::vector<int> classes_;                   // by block
  std::vector<int64_t> number_;                      // of nodes in their blocks
  std::vector<std::vector<NodeId>> nodes_;           // by block
  std::vector<int> weight_index_;  // by tensor; -1: another kind
  std::map<IntKey, int> wirings_;
};

}  // namespace

std::vector<BlockShape> ShapesOf(const Graph& graph, int prefetch) {
  ShapeMaker maker(graph, prefetch);
  std::vector<BlockShape> shapes;
  for (int b = 0; b < std::ssize(graph.blocks); ++b) {
    std::optional<BlockShape> shape = maker.Make(b);
    if (!shape) return {};
    shapes.push_back(std::move(*shape));
  }
  return shapes;
}

int BlockShape::IndexOf(int block) const {
  const auto at = std::ranges::find(depends, block);
  TESSERA_CHECK(at != depends.end()) << "block " << block << " is not around";
  return static_cast<int>(at - depends.begin());
}

int BlockShape::NumberOf(TensorId tensor) const {
  const auto at = std::ranges::lower_bound(numbers, tensor, {},
                                           &std::pair<TensorId, int>::first);
  TESSERA_CHECK(at != numbers.end() && at->first == tensor)
      << "tensor " << tensor << " is not around";
  return at->second;
}

const BlockProgram& Programs::Of(int block, ProgramKind kind) {
  std::unique_ptr<const BlockProgram>& program =
      programs_[static_cast<size_t>(block)][static_cast<size_t>(kind)];
  if (program == nullptr) {
    program =
        std::make_unique<const BlockProgram>(LowerBlock(context_, block, kind));
  }
  return *program;
}

namespace {

class TemplateMaker {
 public:
  TemplateMaker(const Pricer& pricer, Programs& programs, int block,
                const BlockShape& shape, std::optional<int> position)
      : pricer_(pricer),
        programs_(programs),
        context_(programs.context()),
        block_(block),
        shape_(shape),
        own_(context_.group_of_block(block)),
        group_(context_.plan().groups[own_.index()]),
        group_class_(pricer.ClassOf(group_)),
        position_(position) {}

  TemplateProgram Make(ProgramKind kind) {
    out_.streams = {{StreamRole::kCompute, 0}};
    const BlockProgram& program = programs_.Of(block_, kind);
    MakeProgram(program, kind);
    if (kind == ProgramKind::kForward) MakeLoss(program);
    out_.least_bucket = program.least_bucket;
    out_.most_bucket = program.most_bucket;
    return std::move(out_);
  }

 private:
  int StreamNumber(const Task& task) {
    const StreamKey key = {task.stream,
                           task.stream == StreamRole::kComm ? task.axes : 0};
    auto& streams = out_.streams;
    const auto it = std::find(streams.begin(), streams.end(), key);
    if (it != streams.end()) return static_cast<int>(it - streams.begin());
    streams.push_back(key);
    return static_cast<int>(streams.size() - 1);
  }

  TemplatePort PortIn(const Port& port) const {
    TemplatePort out = {port.kind, -1, port.index, port.tile};
    if (port.tensor.valid()) out.tensor = shape_.NumberOf(port.tensor);
    return out;
  }

  // Where the other end of a transfer is among the blocks that this one depends
  // on, and the value there.
  struct PeerEnd {
    int number = 0;  // into BlockShape::depends
    Value value;
  };
  PeerEnd PeerOf(const Transfer& transfer, ProgramKind kind, bool sends) {
    if (transfer.port.kind == Port::kTensor) return TensorPeer(transfer, sends);
    for (size_t i = 0; i < shape_.depends.size(); ++i) {
      const int block = shape_.depends[i];
      if (context_.group_of_block(block) != transfer.peer) continue;
      // A tied weight's other ends are in blocks that read it.
      const BlockProgram& other = programs_.Of(block, kind);
      for (const Transfer& t : sends ? other.receives : other.sends) {
        if (t.port != transfer.port || t.peer != own_) continue;
        const Task& end = other.tasks[t.task];
        return {static_cast<int>(i),
                other.values[(sends ? end.writes : end.reads)[0].index()]};
      }
    }
    TESSERA_CHECK(false) << "a transfer without its other end";
    return {};
  }

  // The same of a tensor between blocks, whose other end needs no program: it
  // is received as the reader's group has it, and sent as its producer's does,
  // summed.
  PeerEnd TensorPeer(const Transfer& transfer, bool sends) {
    const TensorId id = transfer.port.tensor;
    const auto& home = context_.presences(id)[0];
    const auto* there = sends ? context_.presence(id, transfer.peer) : &home;
    TESSERA_CHECK(there != nullptr) << "a transfer without its other end";
    // What is made once a step is received where it is sent.
    const int block =
        context_.once_per_step(id) ? home.first_block : there->first_block;
    PeerEnd end;
    end.number = shape_.IndexOf(block);
    const Tensor& tensor = context_.graph().tensor(id);
    end.value.tensor = id;
    end.value.group = transfer.peer;
    end.value.shape = tensor.shape;
    end.value.sample_dim = tensor.sample_dim;
    if (tensor.sample_dim >= 0 && !context_.once_per_step(id)) {
      end.value.shape[static_cast<size_t>(tensor.sample_dim)] /=
          context_.plan().microbatches;
    }
    end.value.dtype = tensor.dtype;
    end.value.layout = there->layout;
    end.value.layout.partial = 0;
    return end;
  }

  void MakeProgram(const BlockProgram& program, ProgramKind kind) {
    TemplateProgram& priced = out_;
    std::vector<const Value*> peers(program.tasks.size(), nullptr);
    std::vector<std::unique_ptr<const Value>> ends;
    const auto pair = [&](const Transfer& transfer, bool sends) {
      PeerEnd end = PeerOf(transfer, kind, sends);
      ends.push_back(std::make_unique<const Value>(std::move(end.value)));
      peers[transfer.task] = ends.back().get();
      return TemplateTransfer{static_cast<int>(transfer.task),
                              PortIn(transfer.port), end.number};
    };
    for (const Transfer& send : program.sends) {
      priced.sends.push_back(pair(send, true));
    }
    for (const Transfer& receive : program.receives) {
      priced.receives.push_back(pair(receive, false));
    }
    priced.tasks.resize(program.tasks.size());
    for (size_t t = 0; t < program.tasks.size(); ++t) {
      const Task& task = program.tasks[t];
      priced.tasks[t].cost = pricer_.Price(ViewOf(program, task, peers[t]));
      priced.tasks[t].stream = StreamNumber(task);
      priced.tasks[t].after_compute = task.after_compute;
    }
    Connect(program, peers, priced);
  }

  // Of the block's group and another.
  int PairClass(GroupId peer) const {
    const auto [at, is_new] = pair_classes_.try_emplace(peer, -1);
    if (is_new) {
      at->second =
          pricer_.ClassOf(group_, &context_.plan().groups[peer.index()]);
    }
    return at->second;
  }

  // `peer` is the value on the other side of a transfer, else null.
  TaskView ViewOf(const BlockProgram& program, const Task& task,
                  const Value* peer) const {
    TaskView view;
    view.task = &task;
    view.values = program.values;
    view.group = &group_;
    view.group_class = group_class_;
    view.zigzag = context_.plan().zigzag;
    if (peer != nullptr) {
      view.peer = peer;
      view.peer_group = &context_.plan().groups[peer->group.index()];
      view.pair_class = PairClass(peer->group);
    }
    return view;
  }

  // Dependencies within the program, its bound buffers, its own memory.
  // `peers` has the value on the other side of each transfer.
  void Connect(const BlockProgram& program,
               const std::vector<const Value*>& peers,
               TemplateProgram& priced) {
    struct Local {
      int root = 0;
      int64_t bytes = -1;  // of a root; not yet known
      int bound = -1;      // into TemplateProgram::buffers
      bool imported = false;
      bool square_sum = false;
      int writer = -1;
      int first_touch = -1;
      int last_touch = -1;
      std::vector<int> readers;  // since the writer
    };
    priced.outside.reserve(program.imports.size());
    priced.taken.reserve(program.values.size());
    priced.given.reserve(program.values.size());
    priced.buffers.reserve(program.imports.size() + program.exports.size());
    priced.imports.reserve(program.imports.size());
    priced.exports.reserve(program.exports.size());
    std::vector<Local> locals(program.values.size());
    for (size_t v = 0; v < locals.size(); ++v) {
      size_t root = v;
      while (program.values[root].alias_of.valid()) {
        root = program.values[root].alias_of.index();
      }
      locals[v].root = static_cast<int>(root);
    }
    const auto local = [&](ValueId id) -> Local& {
      return locals[static_cast<size_t>(locals[id.index()].root)];
    };
    const auto bytes = [&](size_t v) -> Bytes {
      Local& l = locals[v];
      if (l.bytes < 0) {
        const Value& value = program.values[v];
        const int64_t elements =
            value.shape.empty() ? 1
            : position_
                ? ElementsAt(value.layout, group_, value.shape, *position_)
                : LargestElements(value.layout, group_, value.shape);
        l.bytes = elements * value.ElementBytes();
      }
      return {l.bytes};
    };
    const auto bind = [&](ValueId id) {
      Local& l = local(id);
      if (l.bound < 0) {
        const Value& value = program.values[static_cast<size_t>(l.root)];
        l.bound = static_cast<int>(priced.buffers.size());
        TemplateBuffer& made = priced.buffers.emplace_back();
        made.bytes = bytes(static_cast<size_t>(l.root));
        made.category = value.category;
        made.persistent = value.persistent;
      }
      return l.bound;
    };
    for (const BoundValue& import : program.imports) {
      priced.imports.push_back({PortIn(import.port), bind(import.value)});
      local(import.value).imported = true;
      local(import.value).square_sum = import.port.kind == Port::kSquareSum;
      if (import.port.tensor == context_.graph().loss) {
        out_.loss_tensor = priced.imports.back().port.tensor;
      }
    }
    for (const BoundValue& exported : program.exports) {
      priced.exports.push_back({PortIn(exported.port), bind(exported.value)});
    }

    for (size_t i = 0; i < program.tasks.size(); ++i) {
      const Task& task = program.tasks[i];
      TemplateTask& made = priced.tasks[i];
      const int t = static_cast<int>(i);
      made.first_dep = static_cast<int>(priced.deps.size());
      const auto depend = [&](int on) {
        if (priced.tasks[static_cast<size_t>(on)].stream == made.stream) {
          return;
        }
        const auto begin = priced.deps.begin() + made.first_dep;
        if (std::find(begin, priced.deps.end(), on) == priced.deps.end()) {
          priced.deps.push_back(on);
        }
      };
      const auto touch = [&](ValueId id, bool writes) {
        Local& l = local(id);
        if (l.writer >= 0) depend(l.writer);
        // The sum of squares is all groups': others write it too.
        if (l.imported && (l.writer < 0 || l.square_sum)) {
          priced.outside.push_back({t, l.bound, writes});
        }
        if (writes) {
          for (int reader : l.readers) depend(reader);
        }
        if (l.first_touch < 0) {
          l.first_touch = t;
          if (!l.imported) {
            const Value& value = program.values[static_cast<size_t>(l.root)];
            priced.taken.push_back(
                {t, value.category, bytes(static_cast<size_t>(l.root)).value});
          }
        }
        l.last_touch = t;
        if (l.bound >= 0) {
          TemplateBuffer& b = priced.buffers[static_cast<size_t>(l.bound)];
          if (made.stream == 0) {
            b.on_compute = true;
          } else if (b.persistent) {
            b.off_compute.push_back(t);
          }
        }
      };
      for (ValueId id : task.reads) touch(id, false);
      for (ValueId id : task.writes) touch(id, true);
      for (ValueId id : task.reads) local(id).readers.push_back(t);
      for (ValueId id : task.writes) {
        local(id).readers.clear();
        local(id).writer = t;
      }
      made.last_dep = static_cast<int>(priced.deps.size());
      const Bytes staging =
          pricer_.Staging(ViewOf(program, task, peers[i]), position_);
      if (staging.value > 0) {
        priced.taken.push_back(
            {t, MemoryCategory::kCommunication, staging.value});
        priced.given.push_back(
            {t, MemoryCategory::kCommunication, staging.value});
      }
      const Bytes scratch =
          ScratchBytes(task, program.values, group_, position_);
      if (scratch.value > 0) {
        priced.taken.push_back({t, MemoryCategory::kWorkspace, scratch.value});
        priced.given.push_back({t, MemoryCategory::kWorkspace, scratch.value});
      }
    }
    for (size_t v = 0; v < locals.size(); ++v) {
      Local& l = locals[v];
      if (static_cast<size_t>(l.root) != v) continue;
      if (l.bound < 0) {
        if (l.last_touch >= 0) {
          priced.given.push_back(
              {l.last_touch, program.values[v].category, bytes(v).value});
        }
        continue;
      }
      TemplateBuffer& b = priced.buffers[static_cast<size_t>(l.bound)];
      b.last_writer = l.writer;
      b.last_touch = l.last_touch;
      if (b.persistent) b.readers = std::move(l.readers);
    }
    std::stable_sort(priced.given.begin(), priced.given.end(),
                     [](const TemplateBytes& a, const TemplateBytes& b) {
                       return a.task < b.task;
                     });
  }

  // As Lower reduces the loss of the last microbatch.
  void MakeLoss(const BlockProgram& forward) {
    if (out_.loss_tensor < 0) return;
    for (const BoundValue& import : forward.imports) {
      if (import.port.tensor != context_.graph().loss) continue;
      Task task;
      task.kind = TaskKind::kComm;
      task.comm = CommKind::kAllReduce;
      task.optimizer = true;
      task.stream = context_.concurrent_streams() ? StreamRole::kComm
                                                  : StreamRole::kCompute;
      task.axes = forward.values[import.value.index()].layout.partial;
      if (group_.Size(task.axes) == 1) continue;
      task.reads = {import.value};
      task.writes = {import.value};
      TaskView view;
      view.task = &task;
      view.values = forward.values;
      view.group = &group_;
      view.group_class = group_class_;
      out_.reduces_loss = true;
      out_.loss_reduce = pricer_.Price(view);
      out_.loss_stream = StreamNumber(task);
    }
  }

  const Pricer& pricer_;
  Programs& programs_;
  const LoweringContext& context_;
  const int block_;
  const BlockShape& shape_;
  const GroupId own_;
  const DeviceGroup& group_;
  const int group_class_;
  const std::optional<int> position_;            // whose bytes count
  mutable std::map<GroupId, int> pair_classes_;  // PairClass
  TemplateProgram out_;
};

}  // namespace

std::vector<ProgramKind> KindsOf(bool splits, int microbatches) {
  std::vector<ProgramKind> kinds = {ProgramKind::kBegin, ProgramKind::kForward};
  if (splits) kinds.push_back(ProgramKind::kBackwardInput);
  if (microbatches > 1) {
    kinds.push_back(splits ? ProgramKind::kBackwardWeight
                           : ProgramKind::kBackward);
  }
  kinds.insert(kinds.end(),
               {splits ? ProgramKind::kBackwardWeightReduce
                       : ProgramKind::kBackwardReduce,
                ProgramKind::kTie, ProgramKind::kNorm, ProgramKind::kUpdate});
  return kinds;
}

TemplateProgram MakeTemplate(const Pricer& pricer, Programs& programs,
                             int block, const BlockShape& shape,
                             ProgramKind kind, std::optional<int> position) {
  return TemplateMaker(pricer, programs, block, shape, position).Make(kind);
}

}  // namespace tessera
