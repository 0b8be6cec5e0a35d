#include "costmodel/evaluate/block_cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "planner/base/element_count.h"
#include "planner/lower/lower.h"

namespace tessera {
namespace {

// The tensor that two programs of one kind take from one block to another, if
// that is the only one: what `from` exports and `to` imports.
std::optional<TensorId> OnlyCrossing(const TemplateProgram& from,
                                     const BlockShape& from_shape,
                                     const TemplateProgram& to,
                                     const BlockShape& to_shape) {
  const auto tensors = [&](const std::vector<TemplateBinding>& bindings,
                           const BlockShape& shape) {
    std::set<TensorId> out;
    for (const TemplateBinding& b : bindings) {
      if (b.port.kind != Port::kTensor || b.port.index != 0) continue;
      out.insert(shape.tensors[static_cast<size_t>(b.port.tensor)]);
    }
    return out;
  };
  const auto left = tensors(from.exports, from_shape);
  const auto read = tensors(to.imports, to_shape);
  std::optional<TensorId> only;
  for (TensorId id : left) {
    if (!read.contains(id)) continue;
    if (only) return std::nullopt;
    only = id;
  }
  return only;
}

// The buffer that a program binds to a tensor; -1 for none.
int BufferOf(const std::vector<TemplateBinding>& bindings,
             const BlockShape& shape, std::optional<TensorId> tensor) {
  if (!tensor) return -1;
  for (const TemplateBinding& b : bindings) {
    if (b.port.kind == Port::kTensor && b.port.index == 0 &&
        shape.tensors[static_cast<size_t>(b.port.tensor)] == *tensor) {
      return b.buffer;
    }
  }
  return -1;
}

// The most bytes that a program holds above those before it, less what of its
// imports it is the last to touch.
int64_t PeakIn(const TemplateProgram& program) {
  std::map<int, int64_t> change;  // behind a task
  for (const TemplateBytes& given : program.given) {
    change[given.task] -= given.bytes;
  }
  std::set<int> imported;
  for (const TemplateBinding& import : program.imports) {
    const auto& buffer = program.buffers[static_cast<size_t>(import.buffer)];
    if (buffer.persistent || !imported.insert(import.buffer).second) continue;
    if (buffer.last_touch >= 0) change[buffer.last_touch] -= buffer.bytes.value;
  }
  int64_t now = 0;
  int64_t peak = 0;
  size_t taken = 0;
  for (int t = 0; t < static_cast<int>(program.tasks.size()); ++t) {
    for (; taken < program.taken.size() && program.taken[taken].task == t;
         ++taken) {
      now += program.taken[taken].bytes;
    }
    peak = std::max(peak, now);
    if (const auto it = change.find(t); it != change.end()) now += it->second;
  }
  return peak;
}

int64_t ComputeOf(const TemplateProgram& program) {
  int64_t time = 0;
  for (const TemplateTask& task : program.tasks) {
    if (task.stream == 0) time += task.cost.duration.picoseconds;
  }
  return time;
}

Passage PassageOf(const TemplateProgram& program, int input, int output,
                  const std::vector<bool>* exchanges) {
  struct Row {  // an end as a function of both times
    int64_t stream = kNoPath;
    int64_t input = kNoPath;
  };
  std::vector<Row> rows(program.tasks.size());
  std::map<int, int> last;  // task, by stream
  size_t access = 0;
  for (size_t t = 0; t < rows.size(); ++t) {
    const TemplateTask& task = program.tasks[t];
    Row& row = rows[t];
    const auto join = [&](int other) {
      const Row& from = rows[static_cast<size_t>(other)];
      row.stream = std::max(row.stream, from.stream);
      row.input = std::max(row.input, from.input);
    };
    const auto follow = [&](int stream) {
      if (const auto it = last.find(stream); it != last.end()) {
        join(it->second);
      } else if (stream == 0) {
        row.stream = std::max<int64_t>(row.stream, 0);
      }
    };
    follow(task.stream);
    if (task.after_compute) follow(0);
    for (int d = task.first_dep; d < task.last_dep; ++d) {
      join(program.deps[static_cast<size_t>(d)]);
    }
    for (; access < program.outside.size() &&
           program.outside[access].task == static_cast<int>(t);
         ++access) {
      if (program.outside[access].buffer != input) continue;
      row.input = std::max<int64_t>(row.input, 0);
    }
    const int64_t duration = task.cost.duration.picoseconds;
    if (row.stream != kNoPath) row.stream += duration;
    if (row.input != kNoPath) row.input += duration;
    last[task.stream] = static_cast<int>(t);
  }
  Row stream = {0, kNoPath};
  if (const auto it = last.find(0); it != last.end()) {
    stream = rows[static_cast<size_t>(it->second)];
  }
  Row out;
  if (output >= 0) {
    const int writer = program.buffers[static_cast<size_t>(output)].last_writer;
    if (writer >= 0) {
      const auto w = static_cast<size_t>(writer);
      out = rows[w];
      if (exchanges != nullptr && (*exchanges)[w]) {
        const int64_t own = program.tasks[w].cost.duration.picoseconds;
        if (out.stream != kNoPath) out.stream -= own;
        if (out.input != kNoPath) out.input -= own;
      }
    }
  }
  return {stream.stream, out.stream, stream.input, out.input};
}

// A replica of the strategy, all on the device: what its data parallelism,
// pipeline, order and offloading are no part of.
Strategy ReplicaOf(const Strategy& strategy) {
  static const Strategy kUsual;
  Strategy replica = strategy;
  replica.dp = 1;
  replica.pp = 1;
  replica.vp = 1;
  replica.zero = 0;
  replica.zero_group = 0;
  replica.bucket = {};
  replica.prefetch = kUsual.prefetch;
  replica.by_speed = kUsual.by_speed;
  replica.schedule = kUsual.schedule;
  replica.order = kUsual.order;
  replica.parameter_tier = kUsual.parameter_tier;
  replica.optimizer_tier = kUsual.optimizer_tier;
  replica.gradient_tier = kUsual.gradient_tier;
  return replica;
}

// The cluster's first devices, alone.
Cluster FirstDevices(const Cluster& cluster, int ranks) {
  Cluster first;
  first.name = cluster.name;
  first.device_types = cluster.device_types;
  first.devices.assign(cluster.devices.begin(),
                       cluster.devices.begin() + ranks);
  return first;
}

// Tensors that several blocks' forward passes read.
std::set<TensorId> TiedTensors(const Graph& graph) {
  std::set<TensorId> tied;
  std::map<TensorId, int> reader;
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    for (TensorId id : node.operands) {
      if (reader.try_emplace(id, node.block).first->second != node.block) {
        tied.insert(id);
      }
    }
  }
  return tied;
}

// The costs of blocks from the priced programs of one replica.
class CostsOfReplica {
 public:
  CostsOfReplica(const ReplicaSetting& setting, const Strategy& replica,
                 const Plan& plan, bool comm, bool splits)
      : setting_(setting),
        pricer_(*setting.pricer),
        graph_(pricer_.graph()),
        shapes_(setting.shapes),
        replica_(replica),
        plan_(plan),
        splits_(splits),
        backward_(splits ? ProgramKind::kBackwardInput
                         : ProgramKind::kBackward),
        context_(*setting.facts, plan),
        programs_(context_),
        priced_(shapes_.size()),
        tied_(TiedTensors(graph_)) {
    FindElsewhere();
    for (size_t b = 0; b < shapes_.size(); ++b) {
      if (IsAround(b)) MakeTemplates(b, comm);
    }
    for (size_t b = 0; b < shapes_.size(); ++b) {
      for (const TemplateBinding& e :
           program(b, ProgramKind::kForward).exports) {
        if (e.port.kind == Port::kTensor) {
          produced_[PortOf(b, e.port)] = {b, e.buffer};
        }
      }
    }
  }

  std::vector<BlockCost> Find() {
    std::vector<BlockCost> costs(shapes_.size());
    for (size_t b = 0; b < costs.size(); ++b) {
      if (!Stands(b)) continue;
      SetPassages(b, costs[b]);
      costs[b].update = ComputeOf(program(b, ProgramKind::kNorm)) +
                        ComputeOf(program(b, ProgramKind::kUpdate));
      costs[b].backward_peak = PeakIn(program(b, backward_));
      SetKept(b, costs[b]);
      SetStored(b, costs[b]);
    }
    for (size_t b = 0; b < setting_.stands.size(); ++b) {
      if (!Stands(b)) costs[b] = costs[static_cast<size_t>(setting_.stands[b])];
    }
    return costs;
  }

 private:
  bool Stands(size_t b) const {
    return setting_.stands.empty() || setting_.stands[b] == static_cast<int>(b);
  }
  // Whether a block's programs, or those of its neighbours, are asked for.
  bool IsAround(size_t b) const {
    return Stands(b) || (b > 0 && Stands(b - 1)) ||
           (b + 1 < shapes_.size() && Stands(b + 1));
  }

  // Of blocks that are not asked for they are empty.
  const TemplateProgram& program(size_t b, ProgramKind kind) const {
    static const TemplateProgram kEmpty;
    return priced_[b] ? priced_[b]->templates[static_cast<size_t>(kind)]
                      : kEmpty;
  }

  Port PortOf(size_t b, const TemplatePort& port) const {
    return {port.kind,
            port.tensor < 0
                ? TensorId()
                : shapes_[b].tensors[static_cast<size_t>(port.tensor)],
            port.index, port.tile};
  }

  // Replicas that lie differently from the first, each kind once.
  void FindElsewhere() {
    const DeviceGroup& own = plan_.groups[0];
    const auto ranks = static_cast<int>(own.devices.size());
    const int period =
        std::min(std::lcm(ranks, setting_.period),
                 static_cast<int>(pricer_.cluster().devices.size()));
    const auto counts = [&](const DeviceGroup& group) {
      return setting_.types == 0 ||
             TypesOf(pricer_.cluster(), group) == setting_.types;
    };
    own_counts_ = counts(own);
    std::set<int> known = {pricer_.ClassOf(own)};
    for (int first = ranks; first + ranks <= period; first += ranks) {
      DeviceGroup group = own;
      for (DeviceId& device : group.devices) {
        device = DeviceId(device.value + first);
      }
      if (!counts(group)) continue;
      const int number = pricer_.ClassOf(group);
      if (!known.insert(number).second) continue;
      elsewhere_.push_back(std::move(group));
      classes_.push_back(number);
    }
    TESSERA_CHECK(own_counts_ || !elsewhere_.empty()) << "no such replica";
  }

  // Each replica pays what the luckiest pays; of exchanges without `comm`
  // nothing.
  void MakeTemplates(size_t b, bool comm) {
    std::vector<ProgramKind> kinds = {ProgramKind::kForward, ProgramKind::kNorm,
                                      ProgramKind::kUpdate, backward_};
    if (splits_) kinds.push_back(ProgramKind::kBackwardWeight);
    const auto block = static_cast<int>(b);
    priced_[b] = std::make_unique<Priced>();
    for (ProgramKind kind : kinds) {
      const auto k = static_cast<size_t>(kind);
      TemplateProgram& made = priced_[b]->templates[k];
      std::vector<bool>& exchanges = priced_[b]->exchanges[k];
      made = MakeTemplate(pricer_, programs_, block, shapes_[b], kind);
      const BlockProgram& lowered = programs_.Of(block, kind);
      exchanges.resize(made.tasks.size());
      for (size_t t = 0; t < made.tasks.size(); ++t) {
        const Task& task = lowered.tasks[t];
        exchanges[t] = task.kind == TaskKind::kComm;
        Duration& duration = made.tasks[t].cost.duration;
        if (exchanges[t] && !comm) duration = {};
        if (exchanges[t] ? !comm : !setting_.unlike_devices) continue;
        bool known = own_counts_;
        for (size_t g = 0; g < elsewhere_.size(); ++g) {
          TaskView view;
          view.task = &task;
          view.values = lowered.values;
          view.group = &elsewhere_[g];
          view.group_class = classes_[g];
          view.zigzag = plan_.zigzag;
          const Duration price = pricer_.Price(view).duration;
          duration =
              std::exchange(known, true) ? std::min(duration, price) : price;
        }
      }
    }
  }

  // None where either is before the first block or behind the last.
  std::optional<TensorId> Crossing(size_t from, size_t to,
                                   ProgramKind kind) const {
    if (std::max(from, to) >= shapes_.size()) return std::nullopt;
    return OnlyCrossing(program(from, kind), shapes_[from], program(to, kind),
                        shapes_[to]);
  }

  // Of a microbatch's samples of a tensor, where it has such.
  int64_t SentBytes(const std::optional<TensorId>& sent) const {
    if (!sent || graph_.tensor(*sent).sample_dim < 0) return 0;
    const Tensor& tensor = graph_.tensor(*sent);
    int64_t bytes = SizeOf(tensor.dtype) * replica_.mbs * replica_.ep;
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      if (static_cast<int>(d) != tensor.sample_dim) bytes *= tensor.shape[d];
    }
    return bytes * (tensor.shape[static_cast<size_t>(tensor.sample_dim)] /
                    graph_.global_batch);
  }

  void SetPassages(size_t b, BlockCost& cost) const {
    const auto pass = [&](ProgramKind kind, size_t before, size_t after,
                          Passage& within, Passage& out, int64_t& bytes) {
      const TemplateProgram& p = program(b, kind);
      const auto sent = Crossing(b, after, kind);
      const int input =
          BufferOf(p.imports, shapes_[b], Crossing(before, b, kind));
      const int output = BufferOf(p.exports, shapes_[b], sent);
      within = PassageOf(p, input, output, nullptr);
      out = PassageOf(p, input, output,
                      &priced_[b]->exchanges[static_cast<size_t>(kind)]);
      bytes = SentBytes(sent);
    };
    pass(ProgramKind::kForward, b - 1, b + 1, cost.forward, cost.forward_out,
         cost.forward_bytes);
    pass(backward_, b + 1, b - 1, cost.backward, cost.backward_out,
         cost.backward_bytes);
    if (!splits_) return;
    cost.weight =
        PassageOf(program(b, ProgramKind::kBackwardWeight), -1, -1, nullptr)
            .stream_to_stream;
  }

  // What its backward, of all those yet looked at the first, reads of forward.
  void SetKept(size_t b, BlockCost& cost) {
    for (ProgramKind kind : {backward_, ProgramKind::kBackwardWeight}) {
      for (const TemplateBinding& import : program(b, kind).imports) {
        const auto from = produced_.find(PortOf(b, import.port));
        if (from == produced_.end() || !kept_.insert(from->second).second) {
          continue;
        }
        const auto& [producer, buffer] = from->second;
        cost.kept += program(producer, ProgramKind::kForward)
                         .buffers[static_cast<size_t>(buffer)]
                         .bytes.value;
      }
    }
  }

  // Of how many ranks of the replica each has all of what one stores.
  double CopiesOf(TensorId weight) const {
    const Shape& shape = graph_.tensor(weight).shape;
    const double elements = LargeElementCount(shape);
    const DeviceGroup& group = plan_.groups[0];
    return static_cast<double>(group.devices.size()) *
           static_cast<double>(LargestElements(
               context_.replicas(weight)[0].layout, group, shape)) /
           elements;
  }

  // Parameters, gradients and states that no block before it has.
  void SetStored(size_t b, BlockCost& cost) {
    std::set<TensorId> exchanged;
    for (const TemplateProgram& p : priced_[b]->templates) {
      for (const TemplateBinding& binding : p.imports) {
        const auto& buffer = p.buffers[static_cast<size_t>(binding.buffer)];
        const Port at = PortOf(b, binding.port);
        const auto category = static_cast<size_t>(buffer.category);
        if (!buffer.persistent || !at.tensor.valid() ||
            category >= cost.stored.size() ||
            graph_.tensor(at.tensor).kind != TensorKind::kWeight ||
            !stored_.insert(at).second) {
          continue;
        }
        const double copies = CopiesOf(at.tensor);
        cost.stored[category] += buffer.bytes.value;
        // Tied ones are reduced elsewhere, and not cut by all stages.
        if (category < cost.exchanged.size() && !tied_.contains(at.tensor) &&
            std::llround(copies) == replica_.cp * replica_.ep) {
          cost.exchanged[category] += buffer.bytes.value;
          exchanged.insert(at.tensor);
        }
        cost.cut[category] += static_cast<double>(buffer.bytes.value) / copies;
      }
    }
    for (ProgramKind kind : {ProgramKind::kForward, backward_}) {
      const TemplateProgram& p = program(b, kind);
      for (const TemplateBinding& binding : p.imports) {
        const auto& buffer = p.buffers[static_cast<size_t>(binding.buffer)];
        if (buffer.persistent &&
            buffer.category == MemoryCategory::kParameter &&
            exchanged.contains(PortOf(b, binding.port).tensor)) {
          cost.gathered += buffer.bytes.value;
        }
      }
    }
  }

  const ReplicaSetting& setting_;
  const Pricer& pricer_;
  const Graph& graph_;
  const std::span<const BlockShape> shapes_;
  const Strategy& replica_;
  const Plan& plan_;
  const bool splits_;
  const ProgramKind backward_;
  const LoweringContext context_;
  Programs programs_;
  // By kind; those that are not looked at are empty.
  struct Priced {
    std::array<TemplateProgram, kProgramKinds> templates;
    // Of their tasks, which are exchanges.
    std::array<std::vector<bool>, kProgramKinds> exchanges;
  };
  std::vector<std::unique_ptr<Priced>> priced_;  // by block
  const std::set<TensorId> tied_;
  bool own_counts_ = true;  // the plan's own group
  std::vector<DeviceGroup> elsewhere_;
  std::vector<int> classes_;  // of these
  // Of what forward leaves the block and the buffer that has it.
  std::map<Port, std::pair<size_t, int>> produced_;
  std::set<std::pair<size_t, int>> kept_;
  std::set<Port> stored_;
};

}  // namespace

Passage Passage::Then(const Passage& next) const {
  const auto join = [](int64_t a, int64_t b, int64_t c, int64_t d) {
    return std::max({a + b, c + d, kNoPath});
  };
  return {
      join(stream_to_stream, next.stream_to_stream,  //
           stream_to_output, next.input_to_stream),
      join(stream_to_stream, next.stream_to_output,  //
           stream_to_output, next.input_to_output),
      join(input_to_stream, next.stream_to_stream,  //
           input_to_output, next.input_to_stream),
      join(input_to_stream, next.stream_to_output,  //
           input_to_output, next.input_to_output),
  };
}

uint64_t TypesOf(const Cluster& cluster, const DeviceGroup& group) {
  uint64_t types = 0;
  for (const DeviceId device : group.devices) {
    types |= uint64_t{1} << cluster.devices[device.index()].type;
  }
  return types;
}

std::vector<BlockCost> CostsOfBlocks(const ReplicaSetting& setting,
                                     const Strategy& strategy, bool comm,
                                     bool splits) {
  const Strategy replica = ReplicaOf(strategy);
  const auto plan =
      PlanFromStrategy(*setting.index,
                       FirstDevices(setting.pricer->cluster(),
                                    replica.tp * replica.cp * replica.ep),
                       replica);
  if (!plan) return {};
  return CostsOfReplica(setting, replica, *plan, comm, splits).Find();
}

}  // namespace tessera
