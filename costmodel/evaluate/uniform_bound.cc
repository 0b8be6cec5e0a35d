#include "costmodel/evaluate/uniform_bound.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "costmodel/evaluate/all_reduce.h"
#include "costmodel/evaluate/block_sample.h"
#include "costmodel/evaluate/one_switch.h"
#include "planner/base/rng.h"
#include "planner/base/sort_unique.h"
#include "planner/ir/cluster_lookup.h"
#include "planner/ir/host_size.h"
#include "planner/lower/accumulation.h"
#include "planner/plan/strategy_groups.h"
#include "planner/plan/work_shares.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

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

// Whether the stages of one replica are nearer to each other than replicas.
bool StagesAreInside(const Strategy& strategy) {
  const auto at = [&](MeshDimension d) {
    return std::ranges::find(strategy.order, d) - strategy.order.begin();
  };
  return at(MeshDimension::kPipeline) < at(MeshDimension::kData);
}

// Whether the tables know it.
bool IsPlain(const Strategy& s) {
  return s.actions.empty() && s.recompute_layers == 0 && !s.split_branches &&
         s.dp_kind == DataParallelKind::kDdp &&
         s.activation_tier == MemoryTier::kDevice;
}

// Where parameters, gradients and optimizer state are, as in BlockCost::stored.
std::array<MemoryTier, 3> TiersOf(const Strategy& s) {
  return {s.parameter_tier, s.gradient_tier, s.optimizer_tier};
}
bool Offloads(const Strategy& s) {
  return TiersOf(s) != std::array<MemoryTier, 3>{};
}

int64_t Picoseconds(double bytes, BytesPerSecond rate) {
  return bytes > 0 ? static_cast<int64_t>(bytes / rate.value * 1e12) : 0;
}

// Moments and masters are read and written.
constexpr double kUpdatePasses = 2;

// Types of devices that have bits in the keys of tables.
constexpr size_t kMostTypes = 8;

constexpr Score kNothingKnown = {Duration{}, Bytes{}, /*feasible=*/true};

// Fields of so many bits each.
uint64_t Word(std::initializer_list<std::pair<int64_t, int>> fields) {
  uint64_t out = 0;
  for (const auto& [value, bits] : fields) {
    out = out << bits | static_cast<uint64_t>(value);
  }
  return out;
}

// What a rank stores of a block or a stage, of category `c`, under a ZeRO
// stage.
template <typename Cost>
double StoredBytes(const Cost& cost, size_t c, int zero, int64_t dp) {
  return zero >= 3 - static_cast<int>(c) ? cost.cut[c] / static_cast<double>(dp)
                                         : static_cast<double>(cost.stored[c]);
}
// On a tier. Beside the device gradients, too, are kept once from ZeRO-1 on.
template <typename Cost>
double StoredBytes(const Cost& cost, const Strategy& strategy, int64_t dp,
                   MemoryTier tier) {
  const std::array<MemoryTier, 3> tiers = TiersOf(strategy);
  double bytes = 0;
  for (size_t c = 0; c < tiers.size(); ++c) {
    if (tiers[c] != tier) continue;
    const bool once = c == 1 && tier != MemoryTier::kDevice;
    bytes += StoredBytes(cost, c, strategy.zero + (once ? 1 : 0), dp);
  }
  return bytes;
}

// Whether several blocks read one weight.
bool ReadsAWeightTwice(const Graph& graph) {
  std::vector<int> reader(graph.tensors.size(), -1);
  for (const Node& node : graph.nodes) {
    if (node.pass != Pass::kForward) continue;
    for (const TensorId operand : node.operands) {
      if (graph.tensor(operand).kind != TensorKind::kWeight) continue;
      int& block = reader[operand.index()];
      if (block >= 0 && block != node.block) return true;
      block = node.block;
    }
  }
  return false;
}

}  // namespace

size_t UniformBound::KeyHash::operator()(const Key& key) const {
  return Mix64(key[0] ^ Mix64(key[1] ^ Mix64(key[2])));
}

UniformBound::UniformBound(const Graph& graph, const Cluster& cluster,
                           const ProfileDb* profile,
                           const TrainingOptions& options, Blocks blocks)
    : one_switch_(OnOneSwitch(cluster)),
      cluster_(one_switch_ ? *one_switch_ : cluster),
      short_(Shorten(graph)),
      stands_(blocks == Blocks::kSample ? SampleBlocks(short_.graph)
                                        : std::vector<int>()),
      index_(short_.graph),
      facts_(short_.graph, cluster_, options),
      shapes_(ShapesOf(short_.graph, Plan().prefetch)),
      pricer_(short_.graph, cluster_, profile, PricerOptionsOf(options)),
      host_size_(MostDevicesOfHost(cluster_)),
      least_host_size_(LeastDevicesOfHost(cluster_)),
      most_of_host_(MostDevicesByHost(cluster_)),
      fastest_host_(FastestHost(cluster_)),
      shared_memory_(std::ranges::any_of(
          cluster_.devices,
          [&](const Device& device) {
            return cluster_.device_types[static_cast<size_t>(device.type)]
                .shared_memory;
          })),
      alike_(pricer_.hosts_are_alike()),
      one_type_(std::ranges::all_of(
          cluster_.devices,
          [&](const Device& d) { return d.type == cluster_.devices[0].type; })),
      measured_(profile != nullptr),
      clips_(options.clip > 0),
      ties_(ReadsAWeightTwice(short_.graph)),
      adds_apart_(std::ranges::any_of(short_.graph.nodes, [&](const Node& n) {
        return !AddsItsGradients(short_.graph, n);
      })) {
  memory_of_type_.resize(cluster_.device_types.size());
  for (const Device& device : cluster_.devices) {
    const auto type = static_cast<size_t>(device.type);
    memory_of_type_[type] = cluster_.device_types[type].memory;
  }
  if (profile != nullptr) return;
  const Router router(cluster_);
  const auto hosts = static_cast<size_t>(cluster_.num_nodes());
  std::vector<double> in(hosts);
  std::vector<double> out(hosts);
  for (const Link& link : cluster_.links) {
    const LinkType& type = TypeOf(cluster_, link);
    const int from = router.NodeOf(link.from);
    const int to = router.NodeOf(link.to);
    if (from == to) continue;
    if (type.in_switch_bandwidth.value > 0) crossings_of_sum_ = 1;
    const double bandwidth =
        std::max(type.bandwidth.value, type.in_switch_bandwidth.value);
    if (from >= 0) out[static_cast<size_t>(from)] += bandwidth;
    if (to >= 0) in[static_cast<size_t>(to)] += bandwidth;
  }
  for (size_t h = 0; h < hosts; ++h) {
    bandwidth_of_host_.push_back(std::max(in[h], out[h]));
  }
  host_bandwidth_ = std::ranges::max(bandwidth_of_host_);
  std::vector<std::array<double, 2>> of_vertex(cluster_.vertices.size());
  for (const Link& link : cluster_.links) {
    const LinkType& type = TypeOf(cluster_, link);
    const double bandwidth =
        std::max(type.bandwidth.value, type.in_switch_bandwidth.value);
    of_vertex[link.from.index()][0] += bandwidth;
    of_vertex[link.to.index()][1] += bandwidth;
    if (type.in_switch_bandwidth.value > 0) device_crossings_of_sum_ = 1;
  }
  for (const Device& device : cluster_.devices) {
    const auto [from, to] = of_vertex[device.vertex.index()];
    device_bandwidth_ = std::max({device_bandwidth_, from, to});
  }
  // Where switches copy or add, what leaves a host is less than what enters it.
  // In another network routes may take other links out of it.
  if (alike_ && host_size_ > 1 && crossings_of_sum_ > 1 && !one_switch_) {
    SetBandwidths(router);
  }
}

void UniformBound::SetBandwidths(const Router& router) {
  std::map<int, uint64_t> bit_of;  // by link out of the first host
  std::vector<double> bandwidths;
  for (size_t i = 0; i < cluster_.links.size(); ++i) {
    const Link& link = cluster_.links[i];
    if (router.NodeOf(link.from) != 0 || router.NodeOf(link.to) == 0) continue;
    if (bandwidths.size() == 64) return;
    const LinkType& type = TypeOf(cluster_, link);
    bit_of[static_cast<int>(i)] = uint64_t{1} << bandwidths.size();
    bandwidths.push_back(
        std::max(type.bandwidth.value, type.in_switch_bandwidth.value));
  }
  if (bandwidths.size() < 2) return;
  const auto size = static_cast<size_t>(host_size_);
  // Links out of the first host by position there and in any other host.
  std::vector<uint64_t> taken(size * size);
  std::vector<RouteLink> route;
  for (size_t to = size; to < cluster_.devices.size(); ++to) {
    for (size_t from = 0; from < size; ++from) {
      route.clear();
      router.Route(DeviceId(static_cast<int>(from)),
                   DeviceId(static_cast<int>(to)), route);
      for (const auto& [link, share] : route) {
        if (const auto bit = bit_of.find(static_cast<int>(link.index()));
            bit != bit_of.end()) {
          taken[from * size + to % size] |= bit->second;
        }
      }
    }
  }
  for (size_t block = 1; block <= size; ++block) {
    if (size % block != 0) continue;
    for (size_t stride = block; stride <= size; stride += block) {
      if (size % stride != 0) continue;
      double most = 0;
      for (size_t offset = 0; offset < stride; offset += block) {
        const auto holds = [&](size_t position) {
          const size_t at = position % stride;
          return at >= offset && at < offset + block;
        };
        uint64_t links = 0;
        for (size_t from = 0; from < size; ++from) {
          for (size_t to = 0; to < size; ++to) {
            if (holds(from) && holds(to)) links |= taken[from * size + to];
          }
        }
        double sum = 0;
        for (size_t i = 0; i < bandwidths.size(); ++i) {
          if (links >> i & 1) sum += bandwidths[i];
        }
        most = std::max(most, sum);
      }
      bandwidth_of_[{static_cast<int64_t>(block),
                     static_cast<int64_t>(stride)}] = most;
    }
  }
}

UniformBound::Placement UniformBound::PlacementOf(
    const GraphIndex& index, const Strategy& strategy) const {
  const auto groups = GroupsOf(index, cluster_, strategy);
  Placement placement;
  placement.starts = PositionStarts(index, cluster_, strategy, groups);
  std::vector<std::vector<Held>> stages;
  for (const DeviceGroup& group : groups) {
    AxisSet data = 0;
    for (size_t a = 0; a < group.axes.size(); ++a) {
      if (group.axes[a].name.starts_with("dp")) data |= AxisSet{1} << a;
    }
    std::vector<DeviceGroup> devices(static_cast<size_t>(strategy.dp));
    for (size_t i = 0; i < group.devices.size(); ++i) {
      const auto r =
          static_cast<size_t>(group.Coordinate(static_cast<int>(i), data));
      devices[r].devices.push_back(group.devices[i]);
    }
    std::vector<Held>& replicas = stages.emplace_back();
    for (size_t r = 0; r < devices.size(); ++r) {
      const int64_t samples =
          ShardRange(group, data, SamplesOf(strategy), static_cast<int64_t>(r))
              .size();
      // Of its ranks one has no fewer than the average.
      const auto own = static_cast<int>(samples / strategy.ep);
      if (own == 0) return Placement();
      replicas.push_back({{TypesOf(cluster_, devices[r]), own}, samples});
    }
  }
  placement.chains = ChainsOf(stages);
  return placement;
}

std::vector<UniformBound::Chain> UniformBound::ChainsOf(
    const std::vector<std::vector<Held>>& stages) {
  std::vector<Chain> chains;
  std::vector<size_t> at(stages.size(), 0);  // replicas
  std::vector<int64_t> left;                 // of what each holds
  for (const std::vector<Held>& replicas : stages) {
    left.push_back(replicas[0].samples);
  }
  while (true) {
    Chain& chain = chains.emplace_back();
    for (size_t s = 0; s < stages.size(); ++s) {
      chain.push_back(stages[s][at[s]].replica);
    }
    const int64_t passed = std::ranges::min(left);
    for (size_t s = 0; s < stages.size(); ++s) {
      left[s] -= passed;
      if (left[s] > 0) continue;
      if (++at[s] == stages[s].size()) {
        SortUnique(chains);
        return chains;
      }
      left[s] = stages[s][at[s]].samples;
    }
  }
}

std::vector<UniformBound::Pipeline> UniformBound::PipelinesOf(
    const GraphIndex& index, const Strategy& strategy, bool splits) const {
  std::vector<Chain> chains;
  std::vector<int> starts;
  if (!one_type_ && IsInnermost(strategy) &&
      cluster_.device_types.size() <= kMostTypes) {
    // Where replicas lie; what else it depends on where work goes by speed.
    Strategy laid = strategy;
    if (!laid.by_speed) laid.mbs = laid.vp = 1;
    const Placement& placement = placements_.Keep(
        {Word({{laid.tp, 20}, {laid.cp, 20}, {laid.ep, 20}}),
         Word({{laid.pp, 16}, {laid.vp, 16}, {laid.mbs, 30}}),
         Word({{laid.by_speed, 1}, {StagesAreInside(laid), 1}})},
        [&] { return PlacementOf(index, laid); });
    chains = placement.chains;
    starts = placement.starts;
  } else if (!strategy.by_speed) {
    chains.emplace_back(strategy.pp, Replica());
  }
  if (!strategy.by_speed) {
    for (Chain& chain : chains) {
      for (Replica& replica : chain) replica.samples = strategy.mbs;
    }
    starts = StageStarts(index, strategy.pp * strategy.vp);
  }
  std::vector<Pipeline> pipelines;
  for (const Chain& chain : chains) {
    auto pipeline = PipelineOf(strategy, splits, starts, chain);
    if (!pipeline) return {};
    pipelines.push_back(*std::move(pipeline));
  }
  return pipelines;
}

std::optional<UniformBound::Pipeline> UniformBound::PipelineOf(
    const Strategy& strategy, bool splits, const std::vector<int>& starts,
    const Chain& chain) const {
  const auto pp = static_cast<size_t>(strategy.pp);
  Pipeline pipeline;
  pipeline.stages.resize(pp);
  std::vector<const BlockCosts*> blocks_of;  // by stage
  for (size_t s = 0; s < pp; ++s) {
    Strategy of_stage = strategy;
    of_stage.mbs = chain[s].samples;
    // More samples take no less, unless times are measured.
    const int64_t samples = short_.graph.global_batch / strategy.ep;
    if (measured_ && samples % of_stage.mbs != 0) return std::nullopt;
    while (samples % of_stage.mbs != 0) --of_stage.mbs;
    blocks_of.push_back(&CostsOf(of_stage, splits, chain[s].types));
    if (blocks_of.back()->empty()) return std::nullopt;
    Bytes& memory = pipeline.stages[s].memory;
    for (size_t type = 0; type < memory_of_type_.size(); ++type) {
      if (chain[s].types == 0 || (chain[s].types >> type & 1) != 0) {
        memory = Max(memory, memory_of_type_[type]);
      }
    }
  }
  int64_t fill = 0;
  int64_t drain = 0;
  for (size_t position = 0; position < starts.size(); ++position) {
    StageCost& stage = pipeline.stages[position % pp];
    Position& own = pipeline.positions.emplace_back();
    const auto begin = static_cast<size_t>(starts[position]);
    const size_t end = position + 1 < starts.size()
                           ? static_cast<size_t>(starts[position + 1])
                           : short_.block_of.size();
    const auto block = [&](size_t b) -> const BlockCost& {
      return (
          *blocks_of[position % pp])[static_cast<size_t>(short_.block_of[b])];
    };
    const BlockCost& first = block(begin);
    const BlockCost& last = block(end - 1);
    own.forward = begin + 1 == end ? last.forward_out : first.forward;
    own.backward = begin + 1 == end ? first.backward_out : last.backward;
    for (size_t b = begin + 1; b < end; ++b) {
      const size_t back = begin + end - 1 - b;
      own.forward =
          own.forward.Then(b + 1 == end ? last.forward_out : block(b).forward);
      own.backward = own.backward.Then(back == begin ? first.backward_out
                                                     : block(back).backward);
    }
    own.forward_bytes = last.forward_bytes;
    own.backward_bytes = first.backward_bytes;
    int64_t kept = 0;
    for (size_t b = begin; b < end; ++b) {
      const BlockCost& cost = block(b);
      kept += cost.kept;
      own.weight += cost.weight;
      stage.update += cost.update;
      for (size_t c = 0; c < cost.stored.size(); ++c) {
        stage.stored[c] += cost.stored[c];
        stage.cut[c] += cost.cut[c];
      }
      for (size_t c = 0; c < cost.exchanged.size(); ++c) {
        stage.exchanged[c] += cost.exchanged[c];
      }
      stage.gathered += cost.gathered;
      if (position < pp) stage.first_gradients += cost.exchanged[1];
    }
    stage.forward += own.forward.stream_to_stream;
    stage.backward += own.backward.stream_to_stream;
    stage.weight += own.weight;
    stage.kept = position < pp ? kept : std::min(stage.kept, kept);
    // The last chunk's backward comes first.
    stage.backward_peak = last.backward_peak;
    if (position >= pp) continue;
    stage.fill = fill;
    stage.drain = drain;
    fill += std::max<int64_t>(position == 0 ? own.forward.stream_to_output
                                            : own.forward.input_to_output,
                              0);
    drain += std::max<int64_t>(position == 0 ? own.backward.input_to_stream
                                             : own.backward.input_to_output,
                               0);
  }
  return pipeline;
}

void UniformBound::SetExchanges(const Strategy& strategy,
                                Setting& setting) const {
  const int64_t replica = int64_t{strategy.tp} * strategy.cp * strategy.ep;
  if (device_bandwidth_ > 0 && strategy.zero_group == 0) {
    const auto copies =
        static_cast<double>(setting.dp * strategy.cp * strategy.ep);
    setting.device_exchange = (copies - 1) / copies / device_bandwidth_;
  }
  if (host_bandwidth_ == 0 || !IsInnermost(strategy)) return;
  const bool stages_inside = StagesAreInside(strategy);
  // Ranks from one replica of a stage to its next.
  const int64_t stride = replica * (stages_inside ? strategy.pp : 1);
  const int64_t step = replica * (stages_inside ? 1 : setting.dp);
  const int64_t in_host = std::max<int64_t>(1, host_size_ / stride);
  const bool alike =  // all hosts of a stage have as many of its replicas
      alike_ && host_size_ % replica == 0 && setting.dp % in_host == 0 &&
      (stride < host_size_ ? host_size_ % stride == 0
                           : stride % host_size_ == 0);
  if (!alike) {
    if (strategy.zero_group != 0) return;
    setting.exchanges = &exchanges_.Keep(
        {Word({{strategy.tp, 20}, {strategy.cp, 20}, {strategy.ep, 20}}),
         Word({{strategy.pp, 20}, {setting.dp, 20}, {stages_inside, 1}}), 0},
        [&] { return ExchangesOf(strategy, setting.dp, stride, step); });
    return;
  }
  setting.step = step;
  const auto hosts = static_cast<double>(setting.dp / in_host);
  if (strategy.zero_group == 0) {
    double bandwidth = host_bandwidth_;
    if (const auto links = bandwidth_of_.find(
            {replica, std::min<int64_t>(stride, host_size_)});
        links != bandwidth_of_.end()) {
      bandwidth = std::min(bandwidth, links->second);
    }
    setting.exchange = strategy.tp * (hosts - 1) / hosts / bandwidth;
  }
  // Of unlike shares a chain does not say what its neighbours send.
  if (!strategy.by_speed) {
    setting.onward = static_cast<double>(in_host) / host_bandwidth_;
  }
}

std::vector<UniformBound::Exchange> UniformBound::ExchangesOf(
    const Strategy& strategy, int64_t dp, int64_t stride, int64_t step) const {
  std::vector<Exchange> exchanges(static_cast<size_t>(strategy.pp));
  const int64_t shared = int64_t{strategy.cp} * strategy.ep;
  const int64_t replica = strategy.tp * shared;
  const auto host_of = [&](int64_t device) {
    return cluster_.devices[static_cast<size_t>(device)].node;
  };
  const auto copies = static_cast<double>(dp * shared);
  for (size_t s = 0; s < exchanges.size(); ++s) {
    // Copies of each part on each host.
    std::map<int, std::vector<int64_t>> on_host;
    bool known = true;
    for (int64_t r = 0; r < dp; ++r) {
      const int64_t first = static_cast<int64_t>(s) * step + r * stride;
      // Which rank of a replica has which part is known where all of them are
      // on one host, or each has a part of its own.
      known &= shared == 1 || host_of(first) == host_of(first + replica - 1);
      for (int64_t rank = 0; rank < replica; ++rank) {
        auto& parts = on_host[host_of(first + rank)];
        parts.resize(static_cast<size_t>(strategy.tp));
        ++parts[static_cast<size_t>(rank % strategy.tp)];
      }
    }
    if (!known) continue;
    std::vector<int64_t> hosts(static_cast<size_t>(strategy.tp));  // by part
    double bandwidth = 0;                                          // of all
    for (const auto& [host, parts] : on_host) {
      const double own = bandwidth_of_host_[static_cast<size_t>(host)];
      bandwidth += own;
      double entering = 0;  // of a byte of each rank
      for (size_t part = 0; part < parts.size(); ++part) {
        if (parts[part] == 0) continue;
        ++hosts[part];
        entering += (copies - static_cast<double>(parts[part])) / copies;
      }
      if (entering == 0) continue;
      exchanges[s].once = std::max(exchanges[s].once, entering / own);
    }
    int64_t messages = 0;
    for (int64_t h : hosts) messages += std::max<int64_t>(0, h - 1);
    if (messages == 0) continue;
    exchanges[s].sum = static_cast<double>(messages) / bandwidth;
  }
  return exchanges;
}

UniformBound::Key UniformBound::KeyOf(const Strategy& strategy, bool comm,
                                      bool splits, uint64_t types) {
  return {Word({{strategy.tp, 20}, {strategy.cp, 20}, {strategy.ep, 20}}),
          Word({{strategy.mbs, 30},
                {strategy.tiles, 20},
                {static_cast<int64_t>(strategy.recompute), 4},
                {static_cast<int64_t>(strategy.cp_kind[0]), 8},
                {strategy.zigzag, 1},
                {strategy.sp, 1}}),
          Word({{strategy.etp, 20},
                {comm, 1},
                {splits, 1},
                {static_cast<int64_t>(types), kMostTypes}})};
}

const UniformBound::BlockCosts& UniformBound::CostsOf(const Strategy& strategy,
                                                      bool splits,
                                                      uint64_t types) const {
  const bool comm = IsInnermost(strategy);
  return blocks_.Keep(KeyOf(strategy, comm, splits, types), [&] {
    return CostsOfBlocks(
        {&index_, shapes_, &pricer_, &facts_,
         alike_ && one_type_ ? host_size_
                             : static_cast<int>(cluster_.devices.size()),
         !one_type_, types, stands_},
        strategy, comm, splits);
  });
}

double UniformBound::AllReduce(const Strategy& strategy, DeviceId first,
                               int64_t bytes) const {
  const int replicas = strategy.dp * strategy.cp * strategy.ep;
  if (replicas == 1 || bytes == 0) return 0;
  DeviceGroup group;
  group.axes = {{"dp", replicas}};
  if (strategy.tp > 1) group.axes.push_back({"tp", strategy.tp});
  for (int d = 0; d < replicas * strategy.tp; ++d) {
    group.devices.push_back(DeviceId(first.value + d));
  }
  Value sum;
  sum.dtype = index_.graph->dtype;
  sum.shape = {bytes / SizeOf(sum.dtype)};
  Task task;
  task.pass = Pass::kBackward;
  return static_cast<double>(
      PriceAllReduce(pricer_, task, sum, group).duration.picoseconds);
}

std::vector<LayerCost> UniformBound::LayerCosts(const Strategy& strategy,
                                                DeviceId first) const {
  if (cluster_.device_types.size() > kMostTypes || shapes_.empty() ||
      !IsPlain(strategy) || Offloads(strategy) || !IsInnermost(strategy)) {
    return {};
  }
  const int ranks = strategy.tp * strategy.cp * strategy.ep;
  std::set<uint64_t> types;  // of replicas
  if (one_type_) types.insert(0);
  for (int r = 0; !one_type_ && r < strategy.dp; ++r) {
    DeviceGroup replica;
    for (int d = 0; d < ranks; ++d) {
      replica.devices.push_back(DeviceId(first.value + r * ranks + d));
    }
    types.insert(TypesOf(cluster_, replica));
  }
  std::vector<const BlockCosts*> by_type;
  for (const uint64_t of : types) {
    by_type.push_back(&CostsOf(strategy, /*splits=*/false, of));
    if (by_type.back()->empty()) return {};
  }
  const int replicas = strategy.dp * strategy.cp * strategy.ep;
  const int cuts = strategy.zero > 0 ? replicas : 1;
  std::vector<LayerCost> costs;
  for (size_t b = 0; b < by_type[0]->size(); ++b) {
    const BlockCost& block = (*by_type[0])[b];
    LayerCost& cost = costs.emplace_back();
    const double parameters =
        AllReduce(strategy, first,
                  strategy.zero >= 3 ? block.gathered : block.exchanged[0]);
    const double gradients = AllReduce(strategy, first, block.exchanged[1]);
    switch (strategy.zero) {
      case 0:
        cost.reduction = gradients;
        break;
      case 1:
        cost.reduction = gradients / 2;
        cost.update = parameters / 2;
        break;
      case 2:
        cost.exchange = gradients / 2;
        cost.update = parameters / 2;
        break;
      default:
        cost.exchange = (gradients + parameters) / 2;
    }
    int64_t update = 0;
    for (const BlockCosts* const of_type : by_type) {
      const BlockCost& on = (*of_type)[b];
      cost.compute = std::max(
          cost.compute, static_cast<double>(on.forward.stream_to_stream +
                                            on.backward.stream_to_stream));
      update = std::max(update, on.update);
    }
    cost.update += static_cast<double>(update) / cuts;
    cost.kept = static_cast<double>(block.kept);
    cost.backward_peak = static_cast<double>(block.backward_peak);
    cost.stored =
        StoredBytes(block, strategy, strategy.dp, MemoryTier::kDevice);
  }
  std::vector<LayerCost> all;  // of the whole graph
  for (int of_short : short_.block_of) {
    all.push_back(costs[static_cast<size_t>(of_short)]);
  }
  return all;
}

std::optional<UniformBound::Setting> UniformBound::SettingOf(
    const GraphIndex& index, const Strategy& strategy) const {
  const auto devices = static_cast<int64_t>(cluster_.devices.size());
  const int64_t replica = int64_t{strategy.tp} * strategy.cp * strategy.ep;
  const int64_t others = replica * strategy.pp;
  const auto schedule = FindSchedule(strategy.schedule);
  if (shapes_.empty() || !IsPlain(strategy) || !schedule || others <= 0 ||
      devices % others != 0 || (Offloads(strategy) && cluster_.hosts.empty())) {
    return std::nullopt;
  }
  Setting setting;
  setting.schedule = *schedule;
  setting.dp = devices / others;
  const int64_t samples = setting.dp * strategy.ep * strategy.mbs;
  const int64_t batch = index.graph->global_batch;
  if (samples <= 0 || batch % samples != 0 || strategy.vp < 1 ||
      int64_t{strategy.pp} * strategy.vp > std::ssize(short_.block_of) ||
      strategy.vp < (*schedule)->least_chunks ||
      strategy.vp > (*schedule)->most_chunks) {
    return std::nullopt;
  }
  setting.shape = {strategy.pp, strategy.vp, static_cast<int>(batch / samples)};
  // Of the tables' plans, which have more, gradients are added up.
  if (adds_apart_ && setting.shape.microbatches == 1) return std::nullopt;
  const bool splits = (*schedule)->put_off != nullptr;
  const bool innermost = IsInnermost(strategy);
  Key key = KeyOf(strategy, innermost, splits, /*types=*/0);
  key[2] = Word({{strategy.pp, 16},
                 {strategy.vp, 16},
                 {strategy.by_speed, 1},
                 {StagesAreInside(strategy), 1}})
               << 30 |
           key[2];
  setting.pipelines = &pipelines_.Keep(key, [&] {
    Strategy complete = strategy;
    complete.dp = static_cast<int>(setting.dp);
    return PipelinesOf(index, complete, splits);
  });
  if (setting.pipelines->empty()) return std::nullopt;
  setting.pipeline = setting.pipelines->data();
  SetExchanges(strategy, setting);
  return setting;
}

// When the gradients of a stage's first chunk, reduced from the beginning of
// its last backward on, and all that they update are with all replicas.
int64_t UniformBound::ReductionEnd(const Strategy& strategy,
                                   const Setting& setting, size_t stage,
                                   int64_t begin) const {
  if (strategy.zero >= 3) return begin;
  const StageCost& cost = setting.pipeline->stages[stage];
  const auto gradients = static_cast<double>(cost.first_gradients);
  const auto parameters = static_cast<double>(cost.exchanged[0]);
  return begin + (strategy.zero == 0
                      ? ExchangeTime(setting, stage, 0, gradients)
                      : ExchangeTime(setting, stage, gradients + parameters));
}

int64_t UniformBound::ExchangeTime(const Setting& setting, size_t stage,
                                   double bytes, double summed) const {
  const Exchange exchange = setting.ExchangeOf(stage);
  return static_cast<int64_t>(
      1e12 * std::max(exchange.once * bytes +
                          exchange.sum * crossings_of_sum_ * summed,
                      setting.device_exchange *
                          (bytes + device_crossings_of_sum_ * summed)));
}

// What the optimizer takes behind a stage's last gradients of activations. On
// the host nothing may begin before the norm of all gradients is known.
int64_t UniformBound::UpdateOf(const Strategy& strategy, const Setting& setting,
                               size_t stage) const {
  if (strategy.optimizer_tier == MemoryTier::kDevice) {
    return strategy.zero == 0 ? setting.pipeline->stages[stage].update : 0;
  }
  return clips_ ? OnHost(kUpdatePasses * StateBytes(strategy, setting, stage))
                : 0;
}

// Of an optimizer beside the device.
double UniformBound::StateBytes(const Strategy& strategy,
                                const Setting& setting, size_t stage) const {
  return StoredBytes(setting.pipeline->stages[stage], 2, strategy.zero,
                     setting.dp);
}

// Of bytes that the host reads and writes for one device, while all its devices
// have it do so.
int64_t UniformBound::OnHost(double bytes) const {
  if (shared_memory_) return 0;
  return Picoseconds(bytes * least_host_size_, fastest_host_.memory_bandwidth);
}

// The longest of the streams that serve the tiers of a stage. Parameters beside
// the device are fetched for each pass; gradients there are added up for each
// microbatch.
int64_t UniformBound::TierTime(const Strategy& strategy, const Setting& setting,
                               size_t stage) const {
  const Host& host = fastest_host_;
  const StageCost& cost = setting.pipeline->stages[stage];
  const auto m = static_cast<double>(setting.shape.microbatches);
  const auto cuts = static_cast<double>(
      strategy.zero == 0 ? 1 : setting.dp * strategy.cp * strategy.ep);
  const double fetched = m * static_cast<double>(cost.gathered) / cuts;
  const double gradients = static_cast<double>(cost.exchanged[1]) / cuts;
  double on_host = 0;
  double out = 0;
  double in = 0;
  double file_read = 0;
  double file_written = 0;
  if (strategy.optimizer_tier != MemoryTier::kDevice) {
    const double state = StateBytes(strategy, setting, stage);
    on_host += kUpdatePasses * state;
    out += gradients;
    if (strategy.optimizer_tier == MemoryTier::kFile) {
      file_read += state;
      file_written += state;
    }
  }
  if (strategy.gradient_tier != MemoryTier::kDevice) {
    out = m * gradients;
    on_host += 3 * m * gradients;  // both terms read, the sum written
  }
  if (strategy.parameter_tier != MemoryTier::kDevice) in += fetched;
  if (strategy.parameter_tier == MemoryTier::kFile) file_read += fetched;
  int64_t time = std::max(
      OnHost(on_host),
      std::max(
          Picoseconds(file_read * least_host_size_, host.storage_read),
          Picoseconds(file_written * least_host_size_, host.storage_write)));
  if (!shared_memory_) {
    time = std::max(time, Picoseconds(std::max(in, out), host.device_link));
  }
  return time;
}

int64_t UniformBound::Formula(const Strategy& strategy,
                              const Setting& setting) const {
  const Pipeline& pipeline = *setting.pipeline;
  const int64_t m = setting.shape.microbatches;
  const auto put_off = [&](int stage) {
    return setting.schedule->put_off == nullptr
               ? 0
               : setting.schedule->put_off(stage, setting.shape);
  };
  int64_t time = 0;
  const int64_t end =
      put_off(0) * pipeline.stages[0].weight + UpdateOf(strategy, setting, 0);
  int64_t drained = 0;  // the stages behind, through to the first
  for (int s = strategy.pp; s-- > 0;) {
    const auto at = static_cast<size_t>(s);
    const StageCost& stage = pipeline.stages[at];
    const Position& first = pipeline.positions[at];
    // Its first forward waits for its input.
    const int64_t late =
        s == 0 ? 0
               : std::max<int64_t>(first.forward.input_to_stream, 0) -
                     first.forward.stream_to_stream;
    const int64_t done = stage.fill + late +
                         m * (stage.forward + stage.backward) +
                         (m - put_off(s)) * stage.weight;
    // Its last gradients leave it before it is done with them.
    const int64_t begin = done - first.backward.stream_to_stream;
    const int64_t sent =
        s == 0 ? done
               : begin + std::max<int64_t>(first.backward.stream_to_output, 0);
    const int64_t own_end =
        put_off(s) * stage.weight + UpdateOf(strategy, setting, at);
    time = std::max({time, done + own_end, sent + stage.drain + end});

    double bytes = 0;  // that the replicas exchange
    const auto [parameters, gradients] = stage.exchanged;
    if (Offloads(strategy)) {
      time = std::max(time, TierTime(strategy, setting, at));
    }
    if (strategy.zero >= 3) bytes += static_cast<double>(stage.gathered);
    if (strategy.zero >= 2) bytes += static_cast<double>(gradients);
    bytes *= static_cast<double>(m);
    if (strategy.zero == 2) bytes += static_cast<double>(parameters);
    time = std::max(time, ExchangeTime(setting, at, bytes));
    const int64_t reached =
        s + 1 < strategy.pp ? drained - pipeline.stages[at + 1].drain : 0;
    time = std::max(
        time, ReductionEnd(strategy, setting, at, std::max(begin, reached)));
    drained = std::max(drained, sent + stage.drain);
  }
  return time;
}

int64_t UniformBound::Walk(const Strategy& strategy,
                           const Setting& setting) const {
  const Pipeline& pipeline = *setting.pipeline;
  const PipelineShape& shape = setting.shape;
  const auto pp = static_cast<size_t>(shape.stages);
  const auto m = static_cast<size_t>(shape.microbatches);
  const size_t positions = pipeline.positions.size();
  // When a position's input is there, by microbatch; not yet: kNoPath.
  std::vector<int64_t> forward(positions * m, kNoPath);
  std::vector<int64_t> backward(positions * m, kNoPath);
  std::vector<int64_t> free(pp, 0);
  std::vector<int64_t> last_backward(pp, 0);
  std::vector<size_t> next(pp, 0);
  const StageOrders orders = OrdersOf(*setting.schedule, shape);
  const auto host_of = [&](size_t stage) {
    return static_cast<int64_t>(stage) * setting.step / host_size_;
  };
  // Runs an action, if its input is there.
  const auto run = [&](size_t s, const Action& action) {
    const size_t position = static_cast<size_t>(action.chunk) * pp + s;
    const Position& own = pipeline.positions[position];
    if (action.kind == ActionKind::kBackwardWeight) {
      free[s] += own.weight;
      return true;
    }
    const auto mb = static_cast<size_t>(action.microbatch);
    const bool ascends = action.kind == ActionKind::kForward;
    std::vector<int64_t>& inputs = ascends ? forward : backward;
    const Passage& passage = ascends ? own.forward : own.backward;
    const int64_t input = inputs[position * m + mb];
    const bool starts = position == (ascends ? 0 : positions - 1);
    if (!starts && input == kNoPath) return false;
    const int64_t out = std::max({free[s] + passage.stream_to_output,
                                  input + passage.input_to_output, int64_t{0}});
    if (!ascends) last_backward[s] = std::max(free[s], input);
    free[s] = std::max(free[s] + passage.stream_to_stream,
                       input + passage.input_to_stream);
    if (position == (ascends ? positions - 1 : 0)) return true;
    const size_t to = ascends ? position + 1 : position - 1;
    const double bytes =
        static_cast<double>(ascends ? own.forward_bytes : own.backward_bytes);
    const bool crosses = host_of(s) != host_of(to % pp);
    inputs[to * m + mb] =
        out +
        (crosses ? static_cast<int64_t>(1e12 * bytes * setting.onward) : 0);
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t s = 0; s < pp; ++s) {
      while (next[s] < orders[s].size() && run(s, orders[s][next[s]])) {
        ++next[s];
        moved = true;
      }
    }
  }
  int64_t time = 0;
  for (size_t s = 0; s < pp; ++s) {
    time = std::max({time, free[s] + UpdateOf(strategy, setting, s),
                     ReductionEnd(strategy, setting, s, last_backward[s])});
  }
  return time;
}

double UniformBound::LackingStored(const Strategy& strategy,
                                   const Setting& setting) const {
  double most = -std::numeric_limits<double>::infinity();
  for (const StageCost& stage : setting.pipeline->stages) {
    most = std::max(
        most, StoredBytes(stage, strategy, setting.dp, MemoryTier::kDevice) -
                  static_cast<double>(stage.memory.value));
  }
  return most;
}

double UniformBound::LackingAtPeak(const Strategy& strategy,
                                   const Setting& setting) const {
  double most = -std::numeric_limits<double>::infinity();
  for (int s = 0; s < strategy.pp; ++s) {
    const StageCost& stage = setting.pipeline->stages[static_cast<size_t>(s)];
    double bytes = static_cast<double>(
        stage.kept * setting.schedule->ahead(s, setting.shape) +
        stage.backward_peak);
    bytes += StoredBytes(stage, strategy, setting.dp, MemoryTier::kDevice);
    most = std::max(most, bytes - static_cast<double>(stage.memory.value));
  }
  return most;
}

Score UniformBound::Of(const GraphIndex& index, const Strategy& strategy,
                       Objective::Bound bound) const {
  const bool once = bound == Objective::Bound::kLoose &&
                    strategy.recompute != RecomputeLevel::kNone;
  Strategy told = strategy;
  if (once) told.recompute = RecomputeLevel::kNone;
  auto setting = SettingOf(index, told);
  if (!setting) return kNothingKnown;
  int64_t time = 0;
  double lacking = -std::numeric_limits<double>::infinity();
  for (const Pipeline& pipeline : *setting->pipelines) {
    setting->pipeline = &pipeline;
    time = std::max(time, Formula(told, *setting));
    if (bound == Objective::Bound::kClose) {
      time = std::max(time, Walk(told, *setting));
    }
    lacking = std::max(lacking, once ? LackingStored(told, *setting)
                                     : LackingAtPeak(told, *setting));
  }
  return ScoreFor(told, *setting, time, lacking);
}

// Bytes that the host lacks which lacks most of a tier. Where replicas are no
// neighbours it is not looked at which stages share a host, or where weights
// are tied what of them stays on the device: each stage counts as the least.
double UniformBound::LackingOfHosts(const Strategy& strategy,
                                    const Setting& setting,
                                    MemoryTier tier) const {
  const auto room = tier == MemoryTier::kHost ? &Host::memory : &Host::storage;
  std::vector<double> of_stage;
  for (const StageCost& stage : setting.pipeline->stages) {
    of_stage.push_back(StoredBytes(stage, strategy, setting.dp, tier));
  }
  const double least = std::ranges::min(of_stage);
  const double most = std::ranges::max(of_stage);
  // Of all hosts, of which each device holds so much.
  const auto lacking = [&](double of_device) {
    double lacks = 0;
    for (size_t h = 0; h < cluster_.hosts.size(); ++h) {
      lacks = std::max(
          lacks, most_of_host_[h] * of_device -
                     static_cast<double>((cluster_.hosts[h].*room).value));
    }
    return lacks;
  };
  if (ties_ || least == most || !IsInnermost(strategy)) return lacking(least);
  if (lacking(most) == 0) return 0;
  const int64_t replica = int64_t{strategy.tp} * strategy.cp * strategy.ep;
  const int64_t stride =
      StagesAreInside(strategy) ? replica : replica * setting.dp;
  std::vector<double> lacks(static_cast<size_t>(cluster_.num_nodes()));
  std::vector<bool> has_room(lacks.size());
  for (size_t d = 0; d < cluster_.devices.size(); ++d) {
    const int64_t stage = static_cast<int64_t>(d) / stride % strategy.pp;
    const auto node = static_cast<size_t>(cluster_.devices[d].node);
    lacks[node] += of_stage[static_cast<size_t>(stage)];
    if (!has_room[node]) {
      const DeviceId device(static_cast<int64_t>(d));
      lacks[node] -= static_cast<double>((cluster_.HostOf(device).*room).value);
      has_room[node] = true;
    }
  }
  return std::max(0.0, std::ranges::max(lacks));
}

// What the tiers beside the device lack counts as what devices do: the most
// that any has too little of.
Score UniformBound::ScoreFor(const Strategy& strategy, const Setting& setting,
                             int64_t time, double lacking) const {
  Bytes overflow = {static_cast<int64_t>(std::max(lacking, 0.0))};
  if (Offloads(strategy)) {
    for (const MemoryTier tier : {MemoryTier::kHost, MemoryTier::kFile}) {
      const double lacks = LackingOfHosts(strategy, setting, tier);
      overflow = Max(overflow, Bytes{static_cast<int64_t>(lacks)});
    }
  }
  return {{time}, overflow, overflow == Bytes{}};
}

}  // namespace tessera
