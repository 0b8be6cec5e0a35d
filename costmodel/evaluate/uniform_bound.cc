#include "costmodel/evaluate/uniform_bound.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "planner/base/rng.h"
#include "planner/lower/lower.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

// No path. Sums of a few hundred do not wrap.
constexpr int64_t kNever = std::numeric_limits<int64_t>::min() / 1024;

// The devices of each host, where all hosts and devices are alike; else 0.
int HostSize(const Cluster& cluster, const Pricer& pricer) {
  const auto devices = static_cast<int>(cluster.devices.size());
  const bool alike =
      pricer.hosts_are_alike() &&
      std::ranges::all_of(cluster.devices, [&](const Device& device) {
        return device.type == cluster.devices[0].type;
      });
  return alike ? devices / cluster.num_nodes() : 0;
}

// Whether a layer's replica is a block of neighbours, in the usual order.
bool IsInnermost(const Strategy& strategy) {
  const std::pair<MeshDimension, int> degrees[] = {
      {MeshDimension::kTensor, strategy.tp},
      {MeshDimension::kContext, strategy.cp},
      {MeshDimension::kExpert, strategy.ep}};
  auto at = strategy.order.begin();
  for (const auto& [dimension, degree] : degrees) {
    if (degree == 1) continue;
    const auto idle = [&](MeshDimension d) {
      return std::ranges::any_of(degrees, [&](const auto& p) {
        return p.first == d && p.second == 1;
      });
    };
    while (at != strategy.order.end() && idle(*at)) ++at;
    if (at == strategy.order.end() || *at++ != dimension) return false;
  }
  return true;
}

// What the tables do not know.
bool IsPlain(const Strategy& s) {
  return s.actions.empty() && s.recompute_layers == 0 && !s.split_branches &&
         s.dp_kind == DataParallelKind::kDdp &&
         s.parameter_tier == MemoryTier::kDevice &&
         s.optimizer_tier == MemoryTier::kDevice &&
         s.activation_tier == MemoryTier::kDevice;
}

// The tensor that the programs of one kind take from one block to another, if
// that is the only one: what `from` exports and `to` imports.
std::optional<TensorId> OnlyCrossing(const BlockTemplate& from,
                                     const BlockShape& from_shape,
                                     const BlockTemplate& to,
                                     const BlockShape& to_shape,
                                     ProgramKind kind) {
  const auto tensors = [&](const std::vector<TemplateBinding>& bindings,
                           const BlockShape& shape) {
    std::set<TensorId> out;
    for (const TemplateBinding& b : bindings) {
      if (b.port.kind != Port::kTensor || b.port.index != 0) continue;
      out.insert(shape.tensors[static_cast<size_t>(b.port.tensor)]);
    }
    return out;
  };
  const auto k = static_cast<size_t>(kind);
  const auto left = tensors(from.programs[k].exports, from_shape);
  const auto read = tensors(to.programs[k].imports, to_shape);
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
int64_t PeakOf(const TemplateProgram& program) {
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

}  // namespace

size_t UniformBound::KeyHash::operator()(const Key& key) const {
  return Mix64(key[0] ^ Mix64(key[1] ^ Mix64(key[2])));
}

UniformBound::Passage UniformBound::Passage::Then(const Passage& next) const {
  const auto join = [](int64_t a, int64_t b, int64_t c, int64_t d) {
    return std::max({a + b, c + d, kNever});
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

UniformBound::UniformBound(const Graph& graph, const Cluster& cluster,
                           const ProfileDb* profile,
                           const TrainingOptions& options)
    : cluster_(cluster),
      options_(options),
      short_(Shorten(graph)),
      index_(short_.graph),
      shapes_(ShapesOf(short_.graph, Plan().prefetch)),
      pricer_(short_.graph, cluster, profile),
      host_size_(HostSize(cluster, pricer_)) {
  if (profile != nullptr) return;
  const Router router(cluster);
  double in = 0;
  double out = 0;
  for (const Link& link : cluster.links) {
    const LinkType& type = cluster.link_types[static_cast<size_t>(link.type)];
    const int from = router.NodeOf(link.from);
    const int to = router.NodeOf(link.to);
    if (from == to || (from != 0 && to != 0)) continue;
    if (type.in_switch_bandwidth.value > 0) crossings_of_sum_ = 1;
    (to == 0 ? in : out) +=
        std::max(type.bandwidth.value, type.in_switch_bandwidth.value);
  }
  host_bandwidth_ = std::max(in, out);
}

template <typename T, typename Make>
const T& UniformBound::Row(Table<T>& table, const Key& key, const Make& make) {
  {
    std::shared_lock lock(table.mutex);
    if (auto it = table.rows.find(key); it != table.rows.end()) {
      return *it->second;
    }
  }
  // Made outside the lock; a second thread's equal row is dropped.
  auto row = std::make_unique<const T>(make());
  std::unique_lock lock(table.mutex);
  return *table.rows.try_emplace(key, std::move(row)).first->second;
}

UniformBound::Passage UniformBound::PassageOf(const TemplateProgram& program,
                                              int input, int output) const {
  struct Row {  // an end as a function of both times
    int64_t stream = kNever;
    int64_t input = kNever;
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
    if (row.stream != kNever) row.stream += duration;
    if (row.input != kNever) row.input += duration;
    last[task.stream] = static_cast<int>(t);
  }
  Row stream = {0, kNever};
  if (const auto it = last.find(0); it != last.end()) {
    stream = rows[static_cast<size_t>(it->second)];
  }
  Row out;
  if (output >= 0) {
    const int writer = program.buffers[static_cast<size_t>(output)].last_writer;
    if (writer >= 0) out = rows[static_cast<size_t>(writer)];
  }
  return {stream.stream, out.stream, stream.input, out.input};
}

UniformBound::BlockCosts UniformBound::Measure(const Strategy& strategy,
                                               bool comm, bool splits) const {
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
  neighbours.name = cluster_.name;
  neighbours.device_types = cluster_.device_types;
  neighbours.devices.assign(cluster_.devices.begin(),
                            cluster_.devices.begin() + ranks);
  const auto plan = PlanFromStrategy(index_, neighbours, replica);
  if (!plan) return {};
  const LoweringContext context(short_.graph, cluster_, *plan, options_);
  Programs programs(context);

  // Where a host has room for several replicas, each pays what the luckiest
  // pays.
  std::vector<DeviceGroup> elsewhere;
  for (int first = ranks; first + ranks <= host_size_; first += ranks) {
    DeviceGroup& group = elsewhere.emplace_back(plan->groups[0]);
    for (DeviceId& device : group.devices)
      device = DeviceId(device.value + first);
  }
  const size_t n = shapes_.size();
  std::vector<BlockTemplate> templates;
  for (size_t b = 0; b < n; ++b) {
    const auto block = static_cast<int>(b);
    BlockTemplate& made = templates.emplace_back(
        MakeTemplate(pricer_, programs, block, shapes_[b], splits));
    for (int k = 0; k < kProgramKinds; ++k) {
      auto& tasks = made.programs[static_cast<size_t>(k)].tasks;
      if (tasks.empty()) continue;
      const BlockProgram& program =
          programs.Of(block, static_cast<ProgramKind>(k));
      for (size_t t = 0; t < tasks.size(); ++t) {
        if (program.tasks[t].kind != TaskKind::kComm) continue;
        Duration& duration = tasks[t].cost.duration;
        if (!comm) duration = {};
        for (const DeviceGroup& group : elsewhere) {
          TaskView view;
          view.task = &program.tasks[t];
          view.values = program.values;
          view.group = &group;
          view.group_class = pricer_.ClassOf(group);
          view.zigzag = plan->zigzag;
          duration = std::min(duration, pricer_.Price(view).duration);
        }
      }
    }
  }

  const ProgramKind backward =
      splits ? ProgramKind::kBackwardInput : ProgramKind::kBackward;
  const auto program = [&](size_t b, ProgramKind kind) -> const auto& {
    return templates[b].programs[static_cast<size_t>(kind)];
  };
  // What backward reads of forward, by the block and buffer that has it.
  std::map<Port, std::pair<size_t, int>> produced;
  const auto port = [&](size_t b, const TemplatePort& p) {
    return Port{p.kind,
                p.tensor < 0
                    ? TensorId()
                    : shapes_[b].tensors[static_cast<size_t>(p.tensor)],
                p.index, p.tile};
  };
  for (size_t b = 0; b < n; ++b) {
    for (const TemplateBinding& e : program(b, ProgramKind::kForward).exports) {
      if (e.port.kind == Port::kTensor)
        produced[port(b, e.port)] = {b, e.buffer};
    }
  }
  std::set<std::pair<size_t, int>> kept;
  std::set<Port> stored;
  BlockCosts costs(n);
  for (size_t b = 0; b < n; ++b) {
    BlockCost& cost = costs[b];
    const auto crossing = [&](size_t from, size_t to, ProgramKind kind) {
      if (std::max(from, to) >= n) return std::optional<TensorId>();
      return OnlyCrossing(templates[from], shapes_[from], templates[to],
                          shapes_[to], kind);
    };
    const auto passage = [&](ProgramKind kind, size_t before, size_t after) {
      const TemplateProgram& p = program(b, kind);
      return PassageOf(
          p, BufferOf(p.imports, shapes_[b], crossing(before, b, kind)),
          BufferOf(p.exports, shapes_[b], crossing(b, after, kind)));
    };
    // Before the first and behind the last there is none.
    cost.forward = passage(ProgramKind::kForward, b - 1, b + 1);
    cost.backward = passage(backward, b + 1, b - 1);
    if (splits) {
      cost.weight = PassageOf(program(b, ProgramKind::kBackwardWeight), -1, -1)
                        .stream_to_stream;
    }
    cost.update = ComputeOf(program(b, ProgramKind::kNorm)) +
                  ComputeOf(program(b, ProgramKind::kUpdate));
    cost.backward_peak = PeakOf(program(b, backward));
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
    for (const TemplateProgram& p : templates[b].programs) {
      for (const TemplateBinding& binding : p.imports) {
        const auto& buffer = p.buffers[static_cast<size_t>(binding.buffer)];
        const Port at = port(b, binding.port);
        const auto category = static_cast<size_t>(buffer.category);
        if (!buffer.persistent || !at.tensor.valid() ||
            category >= cost.stored.size() ||
            short_.graph.tensor(at.tensor).kind != TensorKind::kWeight ||
            !stored.insert(at).second) {
          continue;
        }
        const Shape& shape = short_.graph.tensor(at.tensor).shape;
        double elements = 1;
        for (int64_t extent : shape) elements *= static_cast<double>(extent);
        const double copies = ranks *
                              static_cast<double>(LargestElements(
                                  context.replicas(at.tensor)[0].layout,
                                  plan->groups[0], shape)) /
                              elements;
        cost.stored[category] += buffer.bytes.value;
        if (category < cost.exchanged.size() &&
            std::llround(copies) == replica.cp * replica.ep) {
          cost.exchanged[category] += buffer.bytes.value;
        }
        cost.cut[category] += static_cast<double>(buffer.bytes.value) / copies;
      }
    }
  }
  return costs;
}

std::vector<UniformBound::StageCost> UniformBound::StagesOf(
    const GraphIndex& index, const Strategy& strategy,
    const BlockCosts& blocks) const {
  const auto pp = static_cast<size_t>(strategy.pp);
  std::vector<StageCost> stages(pp);
  const std::vector<int> starts = StageStarts(index, strategy.pp * strategy.vp);
  int64_t fill = 0;
  int64_t drain = 0;
  for (size_t position = 0; position < starts.size(); ++position) {
    StageCost& stage = stages[position % pp];
    const auto begin = static_cast<size_t>(starts[position]);
    const size_t end = position + 1 < starts.size()
                           ? static_cast<size_t>(starts[position + 1])
                           : short_.block_of.size();
    const auto block = [&](size_t b) -> const BlockCost& {
      return blocks[static_cast<size_t>(short_.block_of[b])];
    };
    Passage forward = block(begin).forward;
    Passage backward = block(end - 1).backward;
    for (size_t b = begin + 1; b < end; ++b) {
      forward = forward.Then(block(b).forward);
      backward = backward.Then(block(begin + end - 1 - b).backward);
    }
    int64_t kept = 0;
    for (size_t b = begin; b < end; ++b) {
      const BlockCost& cost = block(b);
      kept += cost.kept;
      stage.weight += cost.weight;
      stage.update += cost.update;
      for (size_t c = 0; c < cost.stored.size(); ++c) {
        stage.stored[c] += cost.stored[c];
        stage.cut[c] += cost.cut[c];
      }
      for (size_t c = 0; c < cost.exchanged.size(); ++c) {
        stage.exchanged[c] += cost.exchanged[c];
        if (position < pp) stage.first_exchanged[c] += cost.exchanged[c];
      }
    }
    stage.forward += forward.stream_to_stream;
    stage.backward += backward.stream_to_stream;
    stage.kept = position < pp ? kept : std::min(stage.kept, kept);
    // The last chunk's backward comes first.
    stage.backward_peak = block(end - 1).backward_peak;
    if (position >= pp) continue;
    stage.last_backward = backward.stream_to_stream;
    stage.fill = fill;
    stage.drain = drain;
    fill += std::max<int64_t>(forward.input_to_stream, 0);
    drain += std::max<int64_t>(backward.input_to_stream, 0);
  }
  return stages;
}

double UniformBound::ExchangeOf(const Strategy& strategy, int64_t dp) const {
  if (host_bandwidth_ == 0 || dp == 1 || strategy.zero_group != 0 ||
      !IsInnermost(strategy)) {
    return 0;
  }
  const int64_t replica = int64_t{strategy.tp} * strategy.cp * strategy.ep;
  if (host_size_ % replica != 0) return 0;
  // Ranks from one replica of a stage to the next.
  const auto at = [&](MeshDimension d) {
    return std::ranges::find(strategy.order, d) - strategy.order.begin();
  };
  const bool apart = at(MeshDimension::kPipeline) < at(MeshDimension::kData);
  const int64_t stride = replica * (apart ? strategy.pp : 1);
  if (stride < host_size_ && host_size_ % stride != 0) return 0;
  const int64_t in_host = std::max<int64_t>(1, host_size_ / stride);
  if (dp % in_host != 0) return 0;
  const auto hosts = static_cast<double>(dp / in_host);
  return strategy.tp * (hosts - 1) / hosts / host_bandwidth_;
}

Score UniformBound::Of(const GraphIndex& index,
                       const Strategy& strategy) const {
  const Score unknown = {Duration{}, Bytes{}, /*feasible=*/true};
  const auto devices = static_cast<int64_t>(cluster_.devices.size());
  const int64_t replica = int64_t{strategy.tp} * strategy.cp * strategy.ep;
  const int64_t others = replica * strategy.pp;
  const auto schedule = FindSchedule(strategy.schedule);
  if (host_size_ == 0 || shapes_.empty() || !IsPlain(strategy) || !schedule ||
      others <= 0 || devices % others != 0) {
    return unknown;
  }
  const int64_t dp = devices / others;
  const int64_t samples = dp * strategy.ep * strategy.mbs;
  const int64_t batch = index.graph->global_batch;
  if (samples <= 0 || batch % samples != 0 || strategy.vp < 1 ||
      int64_t{strategy.pp} * strategy.vp > std::ssize(short_.block_of) ||
      strategy.vp < (*schedule)->least_chunks ||
      strategy.vp > (*schedule)->most_chunks) {
    return unknown;
  }
  const bool splits = (*schedule)->put_off != nullptr;
  const bool comm = IsInnermost(strategy) &&
                    (replica <= host_size_ ? host_size_ % replica == 0
                                           : replica % host_size_ == 0);
  const auto word = [](std::initializer_list<std::pair<int64_t, int>> fields) {
    uint64_t out = 0;
    for (const auto& [value, bits] : fields) {
      out = out << bits | static_cast<uint64_t>(value);
    }
    return out;
  };
  Key key = {word({{strategy.tp, 20}, {strategy.cp, 20}, {strategy.ep, 20}}),
             word({{strategy.mbs, 30},
                   {strategy.tiles, 20},
                   {static_cast<int64_t>(strategy.recompute), 4},
                   {static_cast<int64_t>(strategy.cp_kind[0]), 8},
                   {strategy.zigzag, 1},
                   {strategy.sp, 1}}),
             word({{comm, 1}, {splits, 1}})};
  const BlockCosts& blocks =
      Row(blocks_, key, [&] { return Measure(strategy, comm, splits); });
  if (blocks.empty()) return unknown;
  key[2] = word({{strategy.pp, 24}, {strategy.vp, 24}, {comm, 1}, {splits, 1}});
  const std::vector<StageCost>& stages =
      Row(stages_, key, [&] { return StagesOf(index, strategy, blocks); });

  const auto m = static_cast<int>(batch / samples);
  const PipelineShape shape = {strategy.pp, strategy.vp, m};
  const double exchange = 1e12 * ExchangeOf(strategy, dp);
  const auto picoseconds = [&](double bytes) {
    return static_cast<int64_t>(bytes * exchange);
  };
  int64_t time = 0;
  double most = 0;
  int64_t end = strategy.zero == 0 ? stages[0].update : 0;
  if (splits) end += (*schedule)->put_off(0, shape) * stages[0].weight;
  int64_t drained = 0;  // of the stages behind, through to the first
  for (int s = strategy.pp; s-- > 0;) {
    const StageCost& stage = stages[static_cast<size_t>(s)];
    const int put_off = splits ? (*schedule)->put_off(s, shape) : 0;
    const int64_t done = stage.fill + m * (stage.forward + stage.backward) +
                         (m - put_off) * stage.weight;
    const int64_t own_end =
        put_off * stage.weight + (strategy.zero == 0 ? stage.update : 0);
    time = std::max(time, done + std::max(stage.drain + end, own_end));

    const auto [parameters, gradients] = stage.exchanged;
    const auto [first_parameters, first_gradients] = stage.first_exchanged;
    double each = 0;  // of a microbatch
    double once = 0;
    if (strategy.zero >= 3) each += 2.0 * static_cast<double>(parameters);
    if (strategy.zero >= 2) each += static_cast<double>(gradients);
    if (strategy.zero == 2) once += static_cast<double>(parameters);
    time = std::max(time, stage.fill + picoseconds(m * each + once));
    if (strategy.zero <= 1) {
      once = static_cast<double>(first_gradients) *
             (strategy.zero == 0 ? crossings_of_sum_ : 1);
      if (strategy.zero == 1) once += static_cast<double>(first_parameters);
      int64_t begin = done - stage.last_backward;
      if (s + 1 < strategy.pp) {
        const StageCost& next = stages[static_cast<size_t>(s) + 1];
        begin = std::max(begin, drained - next.drain);
      }
      time = std::max(time, begin + picoseconds(once));
    }
    drained = std::max(drained, done + stage.drain);
    double bytes = static_cast<double>(
        stage.kept * (*schedule)->ahead(s, shape) + stage.backward_peak);
    for (size_t c = 0; c < stage.stored.size(); ++c) {
      const bool cut = strategy.zero >= 3 - static_cast<int>(c);
      bytes += cut ? stage.cut[c] / static_cast<double>(dp)
                   : static_cast<double>(stage.stored[c]);
    }
    most = std::max(most, bytes);
  }
  const Bytes floor = {static_cast<int64_t>(most)};
  const Bytes memory = cluster_.TypeOf(DeviceId(0)).memory;
  if (floor <= memory) return {{time}, Bytes{}, /*feasible=*/true};
  return {{time}, floor - memory, /*feasible=*/false};
}

}  // namespace tessera
