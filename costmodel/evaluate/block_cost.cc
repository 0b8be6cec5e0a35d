#include "costmodel/evaluate/block_cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

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

std::vector<BlockCost> CostsOfBlocks(const ReplicaSetting& setting,
                                     const Strategy& strategy, bool comm,
                                     bool splits) {
  const Pricer& pricer = *setting.pricer;
  const Cluster& cluster = pricer.cluster();
  const Graph& graph = pricer.graph();
  const std::span<const BlockShape> shapes = setting.shapes;
  Strategy replica = strategy;
  replica.dp = 1;
  replica.pp = 1;
  replica.vp = 1;
  replica.zero = 0;
  replica.zero_group = 0;
  replica.bucket = {};
  replica.prefetch = Strategy().prefetch;
  replica.schedule = Strategy().schedule;
  replica.order = Strategy().order;
  const int ranks = replica.tp * replica.cp * replica.ep;
  Cluster neighbours;
  neighbours.name = cluster.name;
  neighbours.device_types = cluster.device_types;
  neighbours.devices.assign(cluster.devices.begin(),
                            cluster.devices.begin() + ranks);
  const auto plan = PlanFromStrategy(*setting.index, neighbours, replica);
  if (!plan) return {};
  const LoweringContext context(*setting.facts, *plan);
  Programs programs(context);

  // Replicas lie differently in their hosts, up to where they begin with a host
  // again; each pays what the luckiest pays.
  std::vector<DeviceGroup> elsewhere;
  const int period = std::min(std::lcm(ranks, setting.host_size),
                              static_cast<int>(cluster.devices.size()));
  for (int first = ranks; first + ranks <= period; first += ranks) {
    DeviceGroup& group = elsewhere.emplace_back(plan->groups[0]);
    for (DeviceId& device : group.devices)
      device = DeviceId(device.value + first);
  }
  const size_t n = shapes.size();
  std::vector<ProgramKind> kinds = {ProgramKind::kForward, ProgramKind::kNorm,
                                    ProgramKind::kUpdate};
  if (splits) {
    kinds.push_back(ProgramKind::kBackwardInput);
    kinds.push_back(ProgramKind::kBackwardWeight);
  } else {
    kinds.push_back(ProgramKind::kBackward);
  }
  // By block and kind; others are empty.
  std::vector<std::array<TemplateProgram, kProgramKinds>> templates(n);
  std::vector<std::array<std::vector<bool>, kProgramKinds>> exchanges(n);
  for (size_t b = 0; b < n; ++b) {
    const auto block = static_cast<int>(b);
    for (ProgramKind kind : kinds) {
      const auto k = static_cast<size_t>(kind);
      templates[b][k] = MakeTemplate(pricer, programs, block, shapes[b], kind);
      auto& tasks = templates[b][k].tasks;
      const BlockProgram& program = programs.Of(block, kind);
      exchanges[b][k].resize(tasks.size());
      for (size_t t = 0; t < tasks.size(); ++t) {
        if (program.tasks[t].kind != TaskKind::kComm) continue;
        exchanges[b][k][t] = true;
        Duration& duration = tasks[t].cost.duration;
        if (!comm) {
          duration = {};
          continue;
        }
        for (const DeviceGroup& group : elsewhere) {
          TaskView view;
          view.task = &program.tasks[t];
          view.values = program.values;
          view.group = &group;
          view.group_class = pricer.ClassOf(group);
          view.zigzag = plan->zigzag;
          duration = std::min(duration, pricer.Price(view).duration);
        }
      }
    }
  }

  const ProgramKind backward =
      splits ? ProgramKind::kBackwardInput : ProgramKind::kBackward;
  const auto program = [&](size_t b, ProgramKind kind) -> const auto& {
    return templates[b][static_cast<size_t>(kind)];
  };
  // What backward reads of forward, by the block and buffer that has it.
  std::map<Port, std::pair<size_t, int>> produced;
  const auto port = [&](size_t b, const TemplatePort& p) {
    return Port{p.kind,
                p.tensor < 0 ? TensorId()
                             : shapes[b].tensors[static_cast<size_t>(p.tensor)],
                p.index, p.tile};
  };
  for (size_t b = 0; b < n; ++b) {
    for (const TemplateBinding& e : program(b, ProgramKind::kForward).exports) {
      if (e.port.kind == Port::kTensor)
        produced[port(b, e.port)] = {b, e.buffer};
    }
  }
  std::set<TensorId> tied;  // read by several blocks
  std::map<TensorId, int> reader;
  for (const Node& node : graph.nodes) {
    for (TensorId id : node.operands) {
      if (node.pass != Pass::kForward) continue;
      if (reader.try_emplace(id, node.block).first->second != node.block) {
        tied.insert(id);
      }
    }
  }
  std::set<std::pair<size_t, int>> kept;
  std::set<Port> stored;
  std::vector<BlockCost> costs(n);
  for (size_t b = 0; b < n; ++b) {
    BlockCost& cost = costs[b];
    const auto crossing = [&](size_t from, size_t to, ProgramKind kind) {
      if (std::max(from, to) >= n) return std::optional<TensorId>();
      return OnlyCrossing(program(from, kind), shapes[from], program(to, kind),
                          shapes[to]);
    };
    const auto pass = [&](ProgramKind kind, size_t before, size_t after,
                          Passage& within, Passage& out, int64_t& bytes) {
      const TemplateProgram& p = program(b, kind);
      const auto sent = crossing(b, after, kind);
      const int input =
          BufferOf(p.imports, shapes[b], crossing(before, b, kind));
      const int output = BufferOf(p.exports, shapes[b], sent);
      within = PassageOf(p, input, output, nullptr);
      out =
          PassageOf(p, input, output, &exchanges[b][static_cast<size_t>(kind)]);
      if (!sent || graph.tensor(*sent).sample_dim < 0) return;
      const Tensor& tensor = graph.tensor(*sent);
      bytes = SizeOf(tensor.dtype) * replica.mbs * replica.ep;
      for (size_t d = 0; d < tensor.shape.size(); ++d) {
        if (static_cast<int>(d) != tensor.sample_dim) bytes *= tensor.shape[d];
      }
      bytes *= tensor.shape[static_cast<size_t>(tensor.sample_dim)] /
               graph.global_batch;
    };
    // Before the first and behind the last there is none.
    pass(ProgramKind::kForward, b - 1, b + 1, cost.forward, cost.forward_out,
         cost.forward_bytes);
    pass(backward, b + 1, b - 1, cost.backward, cost.backward_out,
         cost.backward_bytes);
    if (splits) {
      cost.weight =
          PassageOf(program(b, ProgramKind::kBackwardWeight), -1, -1, nullptr)
              .stream_to_stream;
    }
    cost.update = ComputeOf(program(b, ProgramKind::kNorm)) +
                  ComputeOf(program(b, ProgramKind::kUpdate));
    cost.backward_peak = PeakIn(program(b, backward));
    for (ProgramKind kind : {backward, ProgramKind::kBackwardWeight}) {
      for (const TemplateBinding& import : program(b, kind).imports) {
        const auto from = produced.find(port(b, import.port));
        if (from == produced.end() || !kept.insert(from->second).second) {
          continue;
        }
        const auto& [producer, buffer] = from->second;
        cost.kept += program(producer, ProgramKind::kForward)
                         .buffers[static_cast<size_t>(buffer)]
                         .bytes.value;
      }
    }
    std::set<TensorId> exchanged;
    for (const TemplateProgram& p : templates[b]) {
      for (const TemplateBinding& binding : p.imports) {
        const auto& buffer = p.buffers[static_cast<size_t>(binding.buffer)];
        const Port at = port(b, binding.port);
        const auto category = static_cast<size_t>(buffer.category);
        if (!buffer.persistent || !at.tensor.valid() ||
            category >= cost.stored.size() ||
            graph.tensor(at.tensor).kind != TensorKind::kWeight ||
            !stored.insert(at).second) {
          continue;
        }
        const Shape& shape = graph.tensor(at.tensor).shape;
        double elements = 1;
        for (int64_t extent : shape) elements *= static_cast<double>(extent);
        const double copies = ranks *
                              static_cast<double>(LargestElements(
                                  context.replicas(at.tensor)[0].layout,
                                  plan->groups[0], shape)) /
                              elements;
        cost.stored[category] += buffer.bytes.value;
        // Tied ones are reduced elsewhere, and not cut by all stages.
        if (category < cost.exchanged.size() && !tied.contains(at.tensor) &&
            std::llround(copies) == replica.cp * replica.ep) {
          cost.exchanged[category] += buffer.bytes.value;
          exchanged.insert(at.tensor);
        }
        cost.cut[category] += static_cast<double>(buffer.bytes.value) / copies;
      }
    }
    for (ProgramKind kind : {ProgramKind::kForward, backward}) {
      const TemplateProgram& p = program(b, kind);
      for (const TemplateBinding& binding : p.imports) {
        const auto& buffer = p.buffers[static_cast<size_t>(binding.buffer)];
        if (buffer.persistent &&
            buffer.category == MemoryCategory::kParameter &&
            exchanged.contains(port(b, binding.port).tensor)) {
          cost.gathered += buffer.bytes.value;
        }
      }
    }
  }
  return costs;
}

}  // namespace tessera
