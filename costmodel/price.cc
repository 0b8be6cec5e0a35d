#include "costmodel/price.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "planner/base/rng.h"
#include "planner/lower/factored_update.h"
#include "planner/lower/staging.h"
#include "planner/plan/sequence_order.h"

namespace tessera {
namespace {

int64_t LargestExtent(const Value& value, const DeviceGroup& group,
                      size_t dim) {
  return LargestExtent(value.layout, group, value.shape, dim);
}

int64_t Elements(const Value& value, const DeviceGroup& group) {
  return LargestElements(value.layout, group, value.shape);
}

Bytes BytesOf(const Value& value, const DeviceGroup& group) {
  return {Elements(value, group) * SizeOf(value.dtype)};
}

// Of one rank, all values of a list. A value of another group (a scalar of the
// world's) is small and counted whole.
Bytes BytesOf(const TaskView& view, const std::vector<ValueId>& ids) {
  Bytes total;
  for (ValueId id : ids) {
    const Value& value = view.values[id.index()];
    total += value.shape.empty() ? Bytes{SizeOf(value.dtype)}
                                 : BytesOf(value, *view.group);
  }
  return total;
}

int64_t ElementsOf(const TaskView& view, const std::vector<ValueId>& ids) {
  int64_t total = 0;
  for (ValueId id : ids) {
    const Value& value = view.values[id.index()];
    total += value.shape.empty() ? 1 : Elements(value, *view.group);
  }
  return total;
}

// The type that a kernel computes in: of its first float tensor.
DType ComputeType(const TaskView& view) {
  for (const auto* ids : {&view.task->reads, &view.task->writes}) {
    for (ValueId id : *ids) {
      const DType dtype = view.values[id.index()].dtype;
      if (IsFloat(dtype)) return dtype;
    }
  }
  return DType::kFloat32;
}

std::vector<std::vector<DeviceId>> SubgroupDevices(const DeviceGroup& group,
                                                   AxisSet axes) {
  std::vector<std::vector<DeviceId>> subgroups;
  for (const std::vector<int>& positions : Subgroups(group, axes)) {
    auto& devices = subgroups.emplace_back();
    for (int position : positions) {
      devices.push_back(group.devices[static_cast<size_t>(position)]);
    }
  }
  return subgroups;
}

CommKind KindOf(const Task& task) {
  return task.kind == TaskKind::kSend ? CommKind::kSendRecv : task.comm;
}

std::vector<std::vector<DeviceId>> Pairs(const DeviceGroup& from,
                                         const DeviceGroup& to) {
  std::vector<std::vector<DeviceId>> pairs;
  const size_t n = to.devices.size();
  for (size_t j = 0; j < n; ++j) {
    pairs.push_back({from.devices[j * from.devices.size() / n], to.devices[j]});
  }
  return pairs;
}

// Whether a collective is one of activations within a layer, as tensor
// parallelism has them before and after its products.
bool IsBesideProducts(const TaskView& view) {
  const Task& task = *view.task;
  switch (task.comm) {
    case CommKind::kAllReduce:
    case CommKind::kAllGather:
    case CommKind::kReduceScatter:
      break;
    default:
      return false;
  }
  return !task.optimizer && !task.reads.empty() &&
         view.values[task.reads[0].index()].category ==
             MemoryCategory::kActivation;
}

// Whether it gathers parameters that ZeRO-3 has cut, amid the passes.
bool GathersParameters(const TaskView& view) {
  const Task& task = *view.task;
  return task.comm == CommKind::kAllGather && !task.optimizer &&
         !task.reads.empty() &&
         view.values[task.reads[0].index()].category ==
             MemoryCategory::kParameter;
}

// Whether it reduces gradients to the ranks that ZeRO has cut them over.
bool CutsGradients(const TaskView& view) {
  const Task& task = *view.task;
  return task.comm == CommKind::kReduceScatter && !task.optimizer &&
         !task.reads.empty() &&
         view.values[task.reads[0].index()].category ==
             MemoryCategory::kGradient;
}

// The rule of a kernel that walks over flat lists: "n+n->n".
std::string FlatRule(size_t operands) {
  std::string rule;
  for (size_t i = 0; i < operands; ++i) rule += i == 0 ? "n" : "+n";
  return rule + "->n";
}

// What a kSlice copies: all of the one value is a part of the other.
int64_t SlicedElements(const TaskView& view) {
  int64_t total = 0;
  for (size_t i = 0; i < view.task->reads.size(); ++i) {
    total += std::min(
        Elements(view.values[view.task->reads[i].index()], *view.group),
        Elements(view.values[view.task->writes[i].index()], *view.group));
  }
  return total;
}

// The copy that a kLoad, kSlice or kRecv is.
ProfileKey CopyKey(const TaskView& view) {
  ProfileKey key;
  key.name = "copy";
  key.dtype = ComputeType(view);
  key.rule = FlatRule(1);
  key.extents = {view.task->kind == TaskKind::kSlice
                     ? SlicedElements(view)
                     : ElementsOf(view, view.task->writes)};
  return key;
}

// A factor of a node as the task's values have it: the first operand with it,
// and where in that. Nothing where there is none.
struct FactorAt {
  const Value* value = nullptr;
  size_t dim = 0;
};
FactorAt FindFactor(const TaskView& view, const Node& node, int factor) {
  for (size_t k = 0; k < node.rule.operands.size(); ++k) {
    const Indices& indices = node.rule.operands[k];
    for (size_t d = 0; d < indices.size(); ++d) {
      if (indices[d] != factor) continue;
      return {&view.values[view.task->reads[k].index()], d};
    }
  }
  return {};
}

// Queries and keys of an attention, where they are split.
struct SplitSequence {
  FactorAt queries;
  FactorAt keys;
};
std::optional<SplitSequence> SplitOf(const Graph& graph, const TaskView& view) {
  const Task& task = *view.task;
  if (task.kind != TaskKind::kCompute || !task.node.valid()) return {};
  const Node& node = graph.node(task.node);
  if (node.op->op_class != OpClass::kAttention) return {};
  const SplitSequence split = {
      FindFactor(view, node, node.rule.FactorOf(kSequenceFactor)),
      FindFactor(view, node, node.rule.FactorOf(kKeyFactor))};
  const auto axes = [](const FactorAt& f) {
    return f.value == nullptr ? 0 : f.value->layout.dims[f.dim];
  };
  if ((axes(split.queries) | axes(split.keys)) == 0) return {};
  return split;
}

// `cluster` as it was when its collectives were measured; null where no link
// has become slow since.
std::unique_ptr<const Cluster> WithUsualLinks(const Cluster& cluster) {
  const auto slow = [](const LinkType& type) { return type.slowness != 1; };
  if (std::ranges::none_of(cluster.link_types, slow)) return nullptr;
  auto usual = std::make_unique<Cluster>(cluster);
  for (LinkType& type : usual->link_types) {
    type.bandwidth = type.bandwidth * type.slowness;
    type.in_switch_bandwidth = type.in_switch_bandwidth * type.slowness;
    type.slowness = 1;
  }
  return usual;
}

}  // namespace

// Two numbers at a time, by the high and the low half of a product (as wyhash
// does; Wang Yi).
size_t IntKeyHash::operator()(const IntKey& key) const {
  const auto at = [&](size_t i) { return static_cast<uint64_t>(key[i]); };
  const auto fold = [](uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^
           static_cast<uint64_t>(product >> 64);
  };
  uint64_t hash = 0x9e3779b97f4a7c15ULL + key.size();
  size_t i = 0;
  for (; i + 1 < key.size(); i += 2) {
    hash = fold(at(i) ^ 0xa0761d6478bd642fULL, at(i + 1) ^ hash);
  }
  if (i < key.size()) hash = fold(at(i) ^ 0xe7037ed1a0b428dbULL, hash);
  return Mix64(hash);
}

PricerOptions PricerOptionsOf(const TrainingOptions& options) {
  PricerOptions pricing;
  pricing.update = options.stochastic_rounding ? "" : options.optimizer;
  return pricing;
}

Pricer::Pricer(const Graph& graph, const Cluster& cluster,
               const ProfileDb* profile, const PricerOptions& options)
    : graph_(graph),
      cluster_(cluster),
      profile_(profile),
      products_(profile, cluster.device_types),
      collectives_(cluster),
      usual_(WithUsualLinks(cluster)),
      options_(options),
      shards_(kShards) {
  if (usual_) usual_collectives_ = std::make_unique<CollectiveModel>(*usual_);
  int node = -1;
  for (size_t i = 0; i < cluster.devices.size(); ++i) {
    if (cluster.devices[i].node == node) continue;
    node = cluster.devices[i].node;
    first_device_.push_back(static_cast<int>(i));
  }
  for (size_t n = 0; n < first_device_.size(); ++n) {
    const size_t next = n + 1 < first_device_.size()
                            ? static_cast<size_t>(first_device_[n + 1])
                            : cluster.devices.size();
    devices_per_host_ = std::max(
        devices_per_host_,
        static_cast<double>(next - static_cast<size_t>(first_device_[n])));
  }
  hosts_alike_ = HostsAreAlike();
  fusion_ = FusionOf(graph, cluster.stack);
  fused_ = FuseNodes(graph,
                     [&](std::string_view kernel) { return HasRows(kernel); });
  for (const Node& node : graph.nodes) {
    const std::string kernel(node.op->name);
    if (node.op->op_class == OpClass::kMatmul && kernel.ends_with("_dw") &&
        HasRows(kernel + std::string(kAdds))) {
      adding_.insert(kernel);
    }
  }
  for (const FusedKernel& fused : FusedKernels()) {
    if (fused.first == options_.update && fused.second == "cast") {
      update_with_cast_ = fused.name;
    }
  }
  casts_fused_ = !update_with_cast_.empty() && HasRows(update_with_cast_);
  routing_ = RoutingOf(graph);
  exchanged_slots_ = ExchangedSlots(graph);
  std::map<std::pair<std::string, std::vector<double>>, int> signatures;
  for (const Node& n : graph.nodes) {
    std::vector<double> attributes;
    for (const Attribute& a : n.attributes) {
      // Salts only tell dropouts apart.
      if (a.name != "salt") attributes.push_back(a.value);
    }
    const Fusion& fusion = fusion_[signature_.size()];
    attributes.push_back(fusion.outputs);
    attributes.push_back(fusion.traffic);
    attributes.push_back(fusion.operand_rounded);
    attributes.push_back(fusion.of_head);
    if (!fused_.empty()) {
      const FusedNode& fused = fused_[signature_.size()];
      attributes.push_back(fused.elsewhere);
      attributes.push_back(
          fused.kernel() != nullptr
              ? static_cast<double>(fused.kernel() - FusedKernels().data())
              : -1);
    }
    const auto [it, is_new] = signatures.try_emplace(
        {std::string(n.op->name) + " " + n.rule.ToString(), attributes},
        static_cast<int>(signatures.size()));
    signature_.push_back(it->second);
  }
  static const std::vector<std::string>* const kStates = [] {
    auto* names = new std::vector<std::string>();
    for (const OpDef& op : Ops()) {
      names->push_back(std::string(op.name) + ".state");
    }
    return names;
  }();
  int number = 0;
  for (const OpDef& op : Ops()) kernels_[op.name] = ++number;
  for (const std::string& name : *kStates) kernels_[name] = ++number;
  kernels_["cast"] = ++number;
  kernels_["stochastic_cast"] = ++number;
  // Those of the graph's file.
  for (const Node& node : graph.nodes) {
    if (kernels_.try_emplace(node.op->name, number + 1).second) ++number;
  }
}

// Every host has the same vertices and links in the same order, and joins the
// network between hosts at the same places, and no two hosts are joined beside
// it: then renaming hosts changes no route and no time.
bool Pricer::HostsAreAlike() const {
  const auto hosts = first_device_.size();
  const Router& router = collectives_.router();
  const size_t n = cluster_.vertices.size();
  std::vector<int> owner(n);  // -1: the network
  std::vector<int> local(n);  // number within its host
  std::vector<int> count(hosts);
  for (size_t v = 0; v < n; ++v) {
    owner[v] = router.NodeOf(VertexId(static_cast<int64_t>(v)));
    if (owner[v] >= 0) local[v] = count[static_cast<size_t>(owner[v])]++;
  }
  // What a host looks like, hosts left out.
  std::vector<std::vector<int64_t>> looks(hosts);
  for (const Device& device : cluster_.devices) {
    auto& look = looks[static_cast<size_t>(device.node)];
    look.push_back(device.type);
    look.push_back(local[device.vertex.index()]);
  }
  const auto end = [&](VertexId v) {
    return owner[v.index()] >= 0 ? -1 - int64_t{local[v.index()]}
                                 : int64_t{v.value};
  };
  for (const Link& link : cluster_.links) {
    const int from = owner[link.from.index()];
    const int to = owner[link.to.index()];
    if (from >= 0 && to >= 0 && from != to) return false;
    const int host = std::max(from, to);
    if (host < 0) continue;
    auto& look = looks[static_cast<size_t>(host)];
    look.insert(look.end(), {end(link.from), end(link.to), link.type});
  }
  for (const auto& look : looks) {
    if (look != looks[0]) return false;
  }
  return true;
}

int Pricer::ClassOf(const DeviceGroup& group, const DeviceGroup* peer) const {
  std::vector<int> renamed(first_device_.size(), -1);
  int hosts = 0;
  IntKey key;
  const auto add = [&](const DeviceGroup& g) {
    key.push_back(static_cast<int64_t>(g.axes.size()));
    for (const MeshAxis& axis : g.axes) {
      key.push_back(axis.size);
      if (axis.shares.empty()) continue;
      key.back() = -axis.size;
      key.insert(key.end(), axis.shares.begin(), axis.shares.end());
    }
    for (DeviceId device : g.devices) {
      if (!hosts_alike_) {
        key.push_back(device.value);
        continue;
      }
      const auto host =
          static_cast<size_t>(cluster_.devices[device.index()].node);
      if (renamed[host] < 0) renamed[host] = hosts++;
      key.push_back(first_device_[static_cast<size_t>(renamed[host])] +
                    device.value - first_device_[host]);
    }
  };
  add(group);
  const size_t size = key.size();
  if (peer != nullptr) {
    key.push_back(-1);
    add(*peer);
  }
  {
    std::shared_lock lock(class_mutex_);
    if (auto it = class_numbers_.find(key); it != class_numbers_.end()) {
      return it->second;
    }
  }
  auto made = std::make_unique<GroupClass>();
  made->group.axes = group.axes;
  for (size_t i = size - group.devices.size(); i < size; ++i) {
    made->group.devices.push_back(DeviceId(key[i]));
  }
  if (peer != nullptr) {
    made->peer.axes = peer->axes;
    for (size_t i = key.size() - peer->devices.size(); i < key.size(); ++i) {
      made->peer.devices.push_back(DeviceId(key[i]));
    }
  }
  std::set<int> types;
  for (DeviceId device : made->group.devices) {
    types.insert(cluster_.devices[device.index()].type);
  }
  made->device_types.assign(types.begin(), types.end());
  if (group.IsUneven(group.all_axes())) {
    for (int type : types) {
      std::vector<int> positions;
      for (size_t i = 0; i < made->group.devices.size(); ++i) {
        const DeviceId device = made->group.devices[i];
        if (cluster_.devices[device.index()].type == type) {
          positions.push_back(static_cast<int>(i));
        }
      }
      made->counted.push_back(CountedAt(made->group, positions));
    }
  }
  std::unique_lock lock(class_mutex_);
  const auto [it, is_new] = class_numbers_.try_emplace(
      std::move(key), static_cast<int>(classes_.size()));
  if (is_new) classes_.push_back(std::move(made));
  return it->second;
}

const Pricer::GroupClass& Pricer::Class(int number) const {
  std::shared_lock lock(class_mutex_);
  return *classes_[static_cast<size_t>(number)];
}

void Pricer::AppendKey(const TaskView& view, IntKey& key) const {
  const Task& task = *view.task;
  key.push_back(static_cast<int64_t>(task.kind));
  key.push_back(view.group_class);
  if (task.kind == TaskKind::kComm) {
    key.push_back(static_cast<int64_t>(task.comm));
    key.push_back(task.axes);
    key.push_back(Payload(view).value);
    key.push_back(IsBesideProducts(view)    ? 1
                  : GathersParameters(view) ? 2
                  : MovesSlots(view)        ? 3
                  : CutsGradients(view)     ? 4
                                            : 0);
    key.push_back(Shards(view));
    return;
  }
  if (task.kind == TaskKind::kSend) {
    key.push_back(view.pair_class);
    key.push_back(Payload(view).value);
    key.push_back(SplitAxes(view));
    return;
  }
  if (task.kind == TaskKind::kCompute) {
    const auto kernel = kernels_.find(task.kernel);
    TESSERA_CHECK(kernel != kernels_.end()) << "unknown kernel " << task.kernel;
    key.push_back(kernel->second);
    key.push_back(static_cast<int64_t>(task.optimizer));
    key.push_back(task.node.valid() ? signature_[task.node.index()] : -1);
    key.push_back(FusedAt(task) != nullptr);
    key.push_back(static_cast<int64_t>(task.adds_microbatches));
  }
  for (const auto* ids : {&task.reads, &task.writes}) {
    key.push_back(static_cast<int64_t>(ids->size()));
    for (ValueId id : *ids) {
      const Value& value = view.values[id.index()];
      key.push_back(static_cast<int64_t>(value.dtype) |
                    static_cast<int64_t>(value.shape.size()) << 8 |
                    static_cast<int64_t>(value.tier) << 16);
      if (value.layout.flat != 0) {
        key.push_back(-Elements(value, *view.group));
        continue;
      }
      for (size_t d = 0; d < value.shape.size(); ++d) {
        key.push_back(LargestExtent(value, *view.group, d));
        if (!view.group->IsUneven(value.layout.dims[d] & ~value.layout.even)) {
          continue;
        }
        for (const DeviceGroup& counted : Class(view.group_class).counted) {
          key.push_back(LargestExtent(value, counted, d));
        }
      }
    }
  }
  if (const auto split = SplitOf(graph_, view)) {
    key.push_back(view.zigzag);
    for (const FactorAt& f : {split->queries, split->keys}) {
      key.push_back(f.value->shape[f.dim]);
      key.push_back(f.value->layout.dims[f.dim]);
      key.push_back(f.value->layout.ring);
      key.push_back(f.value->layout.turn);
    }
  }
}

// Any will do.
Pricer::Shard& Pricer::ShardOf(const IntKey& key) const {
  const auto number = static_cast<uint64_t>(key[0] + key[1] + key.back());
  return shards_[Mix64(number) % kShards];
}

TaskCost Pricer::Price(const TaskView& view) const {
  thread_local IntKey key;  // most keys are known, and copied nowhere
  key.clear();
  AppendKey(view, key);
  Shard& shard = ShardOf(key);
  {
    std::shared_lock lock(shard.mutex);
    if (auto it = shard.costs.find(key); it != shard.costs.end()) {
      return it->second;
    }
  }
  const TaskCost cost = Compute(view);
  std::unique_lock lock(shard.mutex);
  shard.costs.emplace(key, cost);
  return cost;
}

Bytes Pricer::Staging(const TaskView& view) const {
  const Task& task = *view.task;
  if (task.kind != TaskKind::kComm && task.kind != TaskKind::kSend &&
      task.kind != TaskKind::kRecv) {
    return {};
  }
  // A tensor that is summed alone is summed where it lies.
  if (task.kind == TaskKind::kComm && task.comm == CommKind::kAllReduce &&
      task.reads.size() == 1) {
    return {};
  }
  thread_local IntKey key;  // as in Price
  key.clear();
  key.push_back(task.kind == TaskKind::kComm ? view.group_class
                                             : view.pair_class);
  AppendStagingKey(task, view.values, view.peer, key);
  Shard& shard = ShardOf(key);
  {
    std::shared_lock lock(shard.mutex);
    if (auto it = shard.staging.find(key); it != shard.staging.end()) {
      return it->second;
    }
  }
  const Bytes staging =
      StagingBytes(task, view.values, *view.group, view.peer, view.peer_group);
  std::unique_lock lock(shard.mutex);
  shard.staging.emplace(key, staging);
  return staging;
}

Bytes Pricer::Payload(const TaskView& view) const {
  const Task& task = *view.task;
  if (task.kind == TaskKind::kSend) {
    return BytesOf(*view.peer, *view.peer_group);
  }
  switch (task.comm) {
    case CommKind::kAllGather:
    case CommKind::kGather:
      return BytesOf(view, task.writes);
    case CommKind::kRedistribute: {
      const Bytes written = BytesOf(view, task.writes);
      if (!view.values[task.writes[0].index()].layout.has_halo()) {
        return Max(BytesOf(view, task.reads), written);
      }
      // Only the halo travels: of a payload that all exchange with all, each
      // sends what the others' parts of it are.
      const auto ranks = static_cast<double>(view.group->Size(task.axes));
      const Bytes halo = written - BytesOf(view, task.reads);
      return {
          std::llround(static_cast<double>(halo.value) * ranks / (ranks - 1))};
    }
    default:
      return BytesOf(view, task.reads);
  }
}

std::vector<std::vector<DeviceId>> Pricer::Exchanging(
    const TaskView& view, const DeviceGroup& group,
    const DeviceGroup& peer) const {
  const Task& task = *view.task;
  return task.kind == TaskKind::kSend ? Pairs(group, peer)
                                      : SubgroupDevices(group, task.axes);
}

// Whether tokens and experts exchange it.
bool Pricer::MovesSlots(const TaskView& view) const {
  const Task& task = *view.task;
  if (task.comm != CommKind::kAllToAll &&
      task.comm != CommKind::kRedistribute) {
    return false;
  }
  const TensorId tensor = view.values[task.reads[0].index()].tensor;
  return tensor.valid() && exchanged_slots_[tensor.index()];
}

// The axes of ranks that have alike what a send carries, each of which sends a
// part of it.
AxisSet Pricer::SplitAxes(const TaskView& view) const {
  const Task& task = *view.task;
  const SplitSends split = cluster_.stack.split_sends;
  if (split == SplitSends::kNever || task.kind != TaskKind::kSend ||
      !SameMesh(*view.group, *view.peer_group)) {
    return 0;
  }
  const Value& sent = view.values[task.reads[0].index()];
  if ((task.pass != Pass::kForward && split != SplitSends::kAlways) ||
      sent.category == MemoryCategory::kGradient ||
      sent.layout != view.peer->layout) {
    return 0;
  }
  return sent.layout.replicated(*view.group);
}

// The tensors of the lists that the host makes for gathers of cut parameters
// and reductions of their gradients (Stack::host_per_shard): of each parameter
// one for each rank.
int64_t Pricer::Shards(const TaskView& view) const {
  const bool gathers = GathersParameters(view);
  if (cluster_.stack.host_per_shard == Duration{} ||
      (!gathers && !CutsGradients(view))) {
    return 0;
  }
  int64_t parameters = 0;
  for (const ValueId id : gathers ? view.task->writes : view.task->reads) {
    const Value& whole = view.values[id.index()];
    if (Elements(whole, *view.group) >= Stack::kLeastSharded) ++parameters;
  }
  return parameters * view.group->Size(view.task->axes);
}

// What each of the ranks that have the payload of a send alike sends of it; the
// payload of a collective, or what is left of it where a token is sent to a
// host once. (The copies to several experts of one host take faster links.)
Bytes Pricer::Sent(const TaskView& view) const {
  const Bytes payload = Payload(view);
  if (const AxisSet split = SplitAxes(view); split != 0) {
    const int64_t ranks = view.group->Size(split);
    return {(payload.value + ranks - 1) / ranks};
  }
  if (view.task->kind != TaskKind::kComm ||
      !cluster_.stack.experts_once_per_host || !MovesSlots(view)) {
    return payload;
  }
  const auto subgroups = SubgroupDevices(*view.group, view.task->axes);
  std::set<int> hosts;
  for (DeviceId device : subgroups[0]) {
    hosts.insert(cluster_.devices[device.index()].node);
  }
  if (hosts.size() == 1) return payload;
  return Bytes(
      std::llround(static_cast<double>(payload.value) *
                   HostsPerChoice(routing_, static_cast<int>(hosts.size()))));
}

// Of a kComm or kSend, by the alpha-beta model and what the stack makes of it.
double Pricer::ExchangeSeconds(const TaskView& view, const GroupClass& where,
                               const CollectiveModel& collectives) const {
  const bool send = view.task->kind == TaskKind::kSend;
  const Bytes sent = Sent(view);
  double seconds =
      CollectiveModel::Best(
          collectives.Options(KindOf(*view.task),
                              Exchanging(view, where.group, where.peer)),
          sent)
          .Seconds(sent);
  if (const AxisSet split = SplitAxes(view); split != 0) {
    const Bytes payload = Payload(view);
    seconds += CollectiveModel::Best(
                   collectives.Options(CommKind::kAllGather,
                                       SubgroupDevices(where.peer, split)),
                   payload)
                   .Seconds(payload);
  }
  if (!send && IsBesideProducts(view)) {
    seconds *= cluster_.stack.tensor_exposed;
  } else if (!send && MovesSlots(view)) {
    seconds *= cluster_.stack.experts_exposed;
  } else if (!send && GathersParameters(view)) {
    const double most = cluster_.stack.sharded_bandwidth.value;
    if (most > 0) {
      seconds =
          std::max(seconds, static_cast<double>(Payload(view).value) / most);
    }
  }
  return seconds + static_cast<double>(Shards(view)) *
                       cluster_.stack.host_per_shard.seconds();
}

// The task as the group's devices of one type see it.
TaskView Pricer::CountedView(const TaskView& view, const GroupClass& where,
                             size_t type) {
  TaskView counted = view;
  if (!where.counted.empty()) counted.group = &where.counted[type];
  return counted;
}

// A copy by the slowest device of the group.
template <typename Traffic>
double Pricer::CopySeconds(const TaskView& view, Traffic traffic,
                           CostSource& source) const {
  CostQuery query;
  double seconds = 0;
  const GroupClass& where = Class(view.group_class);
  for (size_t i = 0; i < where.device_types.size(); ++i) {
    const TaskView counted = CountedView(view, where, i);
    query.key = CopyKey(counted);
    query.bytes = traffic(counted);
    query.device =
        &cluster_.device_types[static_cast<size_t>(where.device_types[i])];
    query.key.device = query.device->name;
    const Cost cost = PriceOf(query, profile_);
    seconds = std::max(seconds, cost.seconds * query.device->slowness);
    source = std::max(source, cost.source);
  }
  return seconds;
}

// A copy between tiers, or a kernel on the host, where these are no memory of
// the devices'. REQUIRES: the cluster has a host.
double Pricer::TierSeconds(const TaskView& view, CostSource& source) const {
  const Task& task = *view.task;
  const Host& host = *cluster_.host;
  source = CostSource::kAnalytical;
  const Bytes read = BytesOf(view, task.reads);
  const Bytes written = BytesOf(view, task.writes);
  const auto seconds = [](Bytes bytes, double bandwidth) {
    return static_cast<double>(bytes.value) / bandwidth;
  };
  if (task.kind == TaskKind::kCompute) {
    // The optimizer's results and what is added to are read, too. (The first
    // of a step's microbatches has nothing to add to, and counts as the others:
    // Task::like.)
    const bool casts =
        task.kernel == "cast" || task.kernel == "stochastic_cast";
    const Bytes again = casts ? Bytes{} : written;
    return seconds(read + written + again,
                   host.memory_bandwidth.value / devices_per_host_);
  }
  if (view.values[task.reads[0].index()].tier == MemoryTier::kFile) {
    return seconds(written, host.storage_read.value / devices_per_host_);
  }
  if (view.values[task.writes[0].index()].tier == MemoryTier::kFile) {
    return seconds(read, host.storage_write.value / devices_per_host_);
  }
  return seconds(read, host.device_link.value);
}

CostQuery Pricer::KernelQuery(const TaskView& view) const {
  const Task& task = *view.task;
  const OpDef* op = OperatorOf(task.kernel);
  const bool state = task.kernel.ends_with(".state");
  CostQuery query;
  query.key.name = std::string(task.kernel);
  query.key.dtype = ComputeType(view);
  query.bytes = BytesOf(view, task.reads) + BytesOf(view, task.writes);

  const Node* node = task.node.valid() ? &graph_.node(task.node) : nullptr;
  if (op == nullptr || op->name == "sum") {
    query.key.rule = FlatRule(std::max<size_t>(1, task.reads.size()));
    if (op == nullptr) query.key.rule = FlatRule(1);
    query.key.extents = {ElementsOf(view, task.writes)};
    return query;
  }

  std::vector<DType> operand_dtypes;
  std::vector<DType> result_dtypes;
  IndexRule flat;
  const IndexRule* rule = nullptr;
  std::vector<int64_t> extents;
  if (node != nullptr) {
    rule = &node->rule;
    extents.assign(rule->factors.size(), 1);
    // Behind a coupled operator's operands stands its state; the state kernel
    // writes only that.
    const auto read = [&](const std::vector<ValueId>& ids,
                          const std::vector<Indices>& sides,
                          std::vector<DType>& dtypes) {
      TESSERA_CHECK(ids.size() >= sides.size()) << node->name;
      for (size_t i = 0; i < sides.size(); ++i) {
        const Value& value = view.values[ids[i].index()];
        dtypes.push_back(value.dtype);
        for (size_t d = 0; d < sides[i].size(); ++d) {
          extents[sides[i][d]] = LargestExtent(value, *view.group, d);
        }
      }
    };
    read(task.reads, rule->operands, operand_dtypes);
    if (!state) read(task.writes, rule->results, result_dtypes);
  } else {
    auto parsed = IndexRule::Parse(op->rule);
    TESSERA_CHECK(parsed.has_value()) << op->name;
    flat = std::move(*parsed);
    rule = &flat;
    // The optimizer's lists: as many tensors as the rule has updated results
    // for each, or for sums the gradients it reads. (Of a factored optimizer's
    // vectors only what is read with these counts, which is little.)
    const size_t updated = rule->results.size();
    const FactoredKernel* factored = FindFactoredKernel(op->name);
    const bool reads = op->name == "square_sum" ||
                       (factored != nullptr && factored->weight_writes > 0);
    int64_t elements = ElementsOf(view, reads ? task.reads : task.writes);
    if (MomentsOf(op->name)) elements /= static_cast<int64_t>(updated);
    if (factored != nullptr) {
      // One long matrix; where only its sums are read, long along its rows.
      extents.assign(rule->factors.size(), 1);
      extents[factored->piece_reads > 0 ? 0 : 1] = elements;
    } else {
      extents.assign(rule->factors.size(), elements);
    }
    operand_dtypes.assign(rule->operands.size(), DType::kFloat32);
    if (!task.reads.empty()) {
      operand_dtypes[0] = view.values[task.reads[0].index()].dtype;
    }
    for (size_t i = 0; i < updated; ++i) {
      result_dtypes.push_back(i < task.writes.size()
                                  ? view.values[task.writes[i].index()].dtype
                                  : DType::kFloat32);
    }
  }
  if (const FusedNode* const fused = FusedAt(task);
      fused != nullptr && fused->kernel() != nullptr) {
    query.key.name = fused->kernel()->name;
  } else if (task.optimizer && casts_fused_ && task.kernel == options_.update) {
    query.key.name = update_with_cast_;
  }
  query.key.rule = rule->ToString();
  query.key.extents = extents;
  query.op_class = state ? OpClass::kMemory : op->op_class;
  const OpCall call = {
      .rule = rule,
      .extents = extents,
      .operand_dtypes = operand_dtypes,
      .result_dtypes = result_dtypes,
      .attributes = node != nullptr
                        ? std::span<const Attribute>(node->attributes)
                        : std::span<const Attribute>()};
  query.flops = CallFlops(*op, call);
  if (op->bytes != nullptr && !state) query.bytes = op->bytes(call);
  if (query.op_class == OpClass::kMatmul) query.matmul = MatmulShapeOf(call);
  if (query.op_class == OpClass::kAttention) {
    query.attention = AttentionShapeOf(call);
    query.backward = IsAttentionBackward(*op);
    const auto extent = [&](char letter) {
      return Range{0, call.Extent(letter)};
    };
    query.attention->pairs = static_cast<double>(
        SeenPairs(extent(kSequenceFactor), extent(kKeyFactor), MaskOf(*node)));
  }
  AddStack(view, call, query);
  return query;
}

// What the stack's kernels do otherwise than fused ones at their operands'
// types.
void Pricer::AddStack(const TaskView& view, const OpCall& call,
                      CostQuery& query) const {
  const Stack& stack = cluster_.stack;
  const std::string_view kernel = view.task->kernel;
  const Fusion fusion = FusionAt(view);
  if (query.matmul && view.task->node.valid()) {
    const double fused = fusion.outputs;
    (kernel == "linear_dx"   ? query.matmul->k
     : kernel == "linear_dw" ? query.matmul->m
                             : query.matmul->n) *= fused;
    query.matmul_share = 1 / (fused * stack.sustained);
  }
  // No convolution of fp8 is in use, nor a head.
  if (query.matmul && !query.matmul->traffic && !fusion.of_head &&
      stack.products != ProductType::kAsValues &&
      SizeOf(query.key.dtype) == 2) {
    query.products = stack.products;
    query.matmul->operand_bytes =
        stack.products == ProductType::kFp8 ? 1.0 : 0.5;
    // The activation or its gradient is read, rounded and written in both
    // orders; weights' products use what the others have rounded. Four bits
    // need the largest of all values first: a pass of its own
    // (Transformer Engine's NVFP4 recipe, scales of two levels).
    const bool fp4 = stack.products == ProductType::kFp4;
    if (kernel != "linear_dw" && (fp4 || !fusion.operand_rounded)) {
      query.rounding = {static_cast<int64_t>(
          ((fp4 ? 4 : 2) + 2 * query.matmul->operand_bytes) *
          query.matmul->batch * query.matmul->m * query.matmul->k)};
    }
  }
  if (query.op_class == OpClass::kAttention &&
      stack.attention == StackAttention::kUnfused) {
    // Between the products forward has a softmax (2 passes) and dropout (2,
    // and a mask of one byte), backward their gradients: 2.5 and 3, as the
    // softmax's reads its result, too.
    query.score_passes = query.backward ? 5.5 : 4.5;
  }
  if (stack.attention == StackAttention::kFlash1) {
    query.attention_kernel = AttentionKernel::kFlash1;
  }
  if (!view.task->optimizer && query.op_class == OpClass::kMemory) {
    query.bytes =
        Bytes{static_cast<int64_t>(stack.kernel_traffic * fusion.traffic *
                                   static_cast<double>(query.bytes.value))};
  }
  // Half of the passes in each direction. Where ranks share the logits, their
  // states are made from them and the rest from the states.
  const OpDef* op = OperatorOf(kernel);
  if (op != nullptr && op->name.starts_with("cross_entropy")) {
    const bool merges = !kernel.ends_with(".state") &&
                        op->name == "cross_entropy" &&
                        view.task->reads.size() > call.rule->operands.size();
    if (!merges) {
      const Value& logits = view.values[view.task->reads[0].index()];
      query.bytes += Bytes{static_cast<int64_t>(
          stack.logits_passes / 2 * SizeOf(DType::kFloat32) *
          static_cast<double>(Elements(logits, *view.group)))};
    }
  }
  if (view.task->optimizer && (kernel == "adamw" || kernel == "adam")) {
    query.bytes = Bytes{static_cast<int64_t>(
        stack.optimizer_traffic * static_cast<double>(query.bytes.value))};
  }
}

// What the busiest rank of a group does of an attention's pairs.
void Pricer::SetAttentionShare(const TaskView& view, CostQuery& query) const {
  const auto split = SplitOf(graph_, view);
  if (!split) return;
  const AttentionMask mask = MaskOf(graph_.node(view.task->node));
  const int64_t queries = split->queries.value->shape[split->queries.dim];
  const int64_t keys = split->keys.value->shape[split->keys.dim];
  const auto block = [&](const FactorAt& f, int rank) {
    return BlockAt(f.value->layout, *view.group, f.value->shape, rank)[f.dim];
  };
  std::set<std::pair<int64_t, int64_t>> known;
  int64_t most = 0;
  for (int rank = 0; rank < std::ssize(view.group->devices); ++rank) {
    const Range q = block(split->queries, rank);
    const Range k = block(split->keys, rank);
    if (!known.emplace(q.begin, k.begin).second) continue;
    most = std::max(most, SeenPairs(PositionsOf(queries, view.zigzag, q),
                                    PositionsOf(keys, view.zigzag, k), mask));
  }
  const int64_t s =
      LargestExtent(*split->queries.value, *view.group, split->queries.dim);
  const int64_t t =
      LargestExtent(*split->keys.value, *view.group, split->keys.dim);
  const auto all =
      static_cast<double>(SeenPairs({0, queries}, {0, keys}, mask));
  const double local = static_cast<double>(s) * static_cast<double>(t);
  query.share =
      static_cast<double>(most) / all *
      (static_cast<double>(queries) * static_cast<double>(keys) / local);
  // Kernels are timed on the first positions of a sequence.
  query.share_of_measured =
      static_cast<double>(most) /
      static_cast<double>(SeenPairs({0, s}, {0, t}, mask));
  query.attention->pairs = static_cast<double>(most);
}

// Of a kComm or kSend: the ranks of the subgroup, or the pair, that spans the
// most hosts count, which the others wait for in the step.
ProfileKey Pricer::ExchangeKey(const TaskView& view) const {
  const Task& task = *view.task;
  const bool send = task.kind == TaskKind::kSend;
  const GroupClass& where = Class(send ? view.pair_class : view.group_class);
  const auto subgroups = send ? Pairs(where.group, where.peer)
                              : SubgroupDevices(where.group, task.axes);
  size_t most = 0;
  for (const std::vector<DeviceId>& ranks : subgroups) {
    std::set<int> nodes;
    for (DeviceId rank : ranks) {
      nodes.insert(cluster_.devices[rank.index()].node);
    }
    most = std::max(most, nodes.size());
  }
  return CollectiveKey(KindOf(task),
                       cluster_.TypeOf(where.group.devices[0]).name,
                       static_cast<int>(subgroups[0].size()),
                       static_cast<int>(most), Payload(view));
}

ProfileKey Pricer::ProfileKeyOf(const TaskView& view) const {
  const TaskKind kind = view.task->kind;
  if (kind == TaskKind::kComm || kind == TaskKind::kSend) {
    return ExchangeKey(view);
  }
  ProfileKey key =
      kind == TaskKind::kCompute ? KernelQuery(view).key : CopyKey(view);
  key.device = cluster_.TypeOf(view.group->devices[0]).name;
  if (HasAddingRow(*view.task, key)) key.name += kAdds;
  return key;
}

bool Pricer::HasAddingRow(const Task& task, const ProfileKey& key) const {
  if (!task.adds_microbatches || !adding_.contains(key.name)) return false;
  if (profile_ == nullptr || profile_->Find(key) == nullptr) return true;
  ProfileKey adding = key;
  adding.name += kAdds;
  return profile_->Find(adding) != nullptr;
}

Fusion Pricer::FusionAt(const TaskView& view) const {
  const NodeId node = view.task->node;
  return node.valid() ? fusion_[node.index()] : Fusion{};
}

// Of the host, to start a kernel: one for each expert of a rank.
double Pricer::HostSeconds(const TaskView& view, const CostQuery& query) const {
  const double one = cluster_.stack.host_per_operator.seconds();
  return view.task->kernel.starts_with("expert_linear") && query.matmul
             ? one * query.matmul->batch
             : one;
}

// Measured for the devices of this cluster, at the type that is computed in;
// masters of updates are fp32.
bool Pricer::HasRows(std::string_view kernel) const {
  const bool update = kernel.ends_with("+cast");
  if (update && SizeOf(graph_.dtype) != 2) return false;
  if (options_.all_fused) return true;
  if (profile_ == nullptr) return false;
  ProfileKey key;
  key.name = kernel;
  key.dtype = update ? DType::kFloat32 : graph_.dtype;
  return std::ranges::all_of(cluster_.device_types,
                             [&](const DeviceType& type) {
                               key.device = type.name;
                               const auto [begin, end] = profile_->Family(key);
                               return begin != end;
                             });
}

// What is computed again is not fused: of its neighbours some are kept.
const FusedNode* Pricer::FusedAt(const Task& task) const {
  if (fused_.empty() || task.kind != TaskKind::kCompute || !task.node.valid()) {
    return nullptr;
  }
  const Node& node = graph_.node(task.node);
  const bool own = task.kernel == node.op->name && task.pass == node.pass;
  return own ? &fused_[task.node.index()] : nullptr;
}

bool Pricer::FusesAll() const {
  const auto all = FuseNodes(graph_, [](std::string_view) { return true; });
  // Of updated masters.
  const bool casts = SizeOf(graph_.dtype) == 2 && !update_with_cast_.empty();
  return (!casts || casts_fused_) &&
         std::ranges::all_of(all, [&](const FusedNode& node) {
           return node.kernel() == nullptr || HasRows(node.kernel()->name);
         });
}

// What the nodes behind a task's would take beside it, by the bytes that only
// they read or write; for a kernel of whose size nothing was measured.
double Pricer::PartsSeconds(const Task& task, const CostQuery& query) const {
  const FusedNode* const fused = FusedAt(task);
  if (fused == nullptr) return 0;
  std::set<TensorId> seen;
  const auto bytes_of = [&](const Node& node) {
    double bytes = 0;
    for (const auto* tensors : {&node.operands, &node.results}) {
      for (TensorId id : *tensors) {
        if (!seen.insert(id).second) continue;
        const Tensor& tensor = graph_.tensor(id);
        double all = SizeOf(tensor.dtype);
        for (const int64_t extent : tensor.shape) {
          all *= static_cast<double>(extent);
        }
        bytes += all;
      }
    }
    return bytes;
  };
  const double own = bytes_of(graph_.node(task.node));
  double others = 0;
  for (const FusedNode::Part& part : fused->parts) {
    others += bytes_of(graph_.node(part.node));
  }
  // A rank's share of them is that of the first node's.
  const double share = static_cast<double>(query.bytes.value) / own;
  return others * share /
         (query.device->memory_bandwidth.value *
          query.device->memory_efficiency);
}

std::span<const FusedNode::Part> Pricer::PartsOf(const Task& task) const {
  const FusedNode* const fused = FusedAt(task);
  if (fused == nullptr) return {};
  return fused->parts;
}

bool Pricer::IsElsewhere(const Task& task) const {
  if (task.optimizer && task.kernel == "cast") return casts_fused_;
  const FusedNode* const fused = FusedAt(task);
  return fused != nullptr && fused->elsewhere;
}

TaskCost Pricer::Compute(const TaskView& view) const {
  const Task& task = *view.task;
  const GroupClass& where = Class(view.group_class);
  const DeviceType& first =
      cluster_.device_types[static_cast<size_t>(where.device_types[0])];
  double seconds = 0;
  CostSource source = CostSource::kMeasured;
  switch (task.kind) {
    case TaskKind::kCompute: {
      if (OnHost(task, view.values) && !first.shared_memory) {
        seconds = TierSeconds(view, source);
        break;
      }
      if (FusionAt(view).traffic == 0 || IsElsewhere(task)) {
        source = CostSource::kAnalytical;
        break;
      }
      CostQuery query;
      std::string kernel;
      for (size_t i = 0; i < where.device_types.size(); ++i) {
        const TaskView counted = CountedView(view, where, i);
        if (i == 0 || !where.counted.empty()) {
          query = KernelQuery(counted);
          kernel = query.key.name;
          SetAttentionShare(counted, query);
          seconds = std::max(seconds, HostSeconds(counted, query));
        }
        query.device =
            &cluster_.device_types[static_cast<size_t>(where.device_types[i])];
        query.key.device = query.device->name;
        query.key.name = kernel;
        if (HasAddingRow(task, query.key)) query.key.name += kAdds;
        if (query.matmul && query.products == ProductType::kAsValues) {
          const auto factor_of = [&](std::string_view name) {
            return products_.Factor(name, query.device->name, query.key.dtype,
                                    *query.matmul);
          };
          query.matmul_factor = factor_of(query.key.name);
          query.factor_of_kernel = query.matmul_factor.has_value();
          if (!query.matmul_factor) {
            query.matmul_factor = factor_of(kProductName);
          }
        }
        const Cost cost = PriceOf(query, profile_);
        const double parts = cost.source == CostSource::kAnalytical
                                 ? PartsSeconds(task, query)
                                 : 0;
        seconds =
            std::max(seconds, (cost.seconds + parts) * query.device->slowness);
        source = std::max(source, cost.source);
      }
      break;
    }
    case TaskKind::kLoad: {
      seconds = CopySeconds(
          view,
          [&](const TaskView& seen) { return BytesOf(seen, task.writes); },
          source);
      break;
    }
    case TaskKind::kSlice: {
      // Read and written.
      const auto moved = [](const TaskView& seen) {
        return Bytes{2 * SlicedElements(seen) * SizeOf(ComputeType(seen))};
      };
      seconds = CopySeconds(view, moved, source);
      break;
    }
    case TaskKind::kCopy: {
      const auto in_file = [&](ValueId id) {
        return view.values[id.index()].tier == MemoryTier::kFile;
      };
      if (first.shared_memory && !in_file(task.reads[0]) &&
          !in_file(task.writes[0])) {
        seconds = CopySeconds(
            view,
            [&](const TaskView& seen) { return BytesOf(seen, task.reads) * 2; },
            source);
      } else {
        seconds = TierSeconds(view, source);
      }
      break;
    }
    case TaskKind::kRecv: {
      if (!first.shared_memory) break;
      seconds = CopySeconds(
          view,
          [&](const TaskView& seen) { return BytesOf(seen, task.writes) * 2; },
          source);
      break;
    }
    case TaskKind::kComm:
    case TaskKind::kSend: {
      const bool send = task.kind == TaskKind::kSend;
      const GroupClass& pair = send ? Class(view.pair_class) : where;
      CostQuery query;
      if (profile_ != nullptr) query.key = ExchangeKey(view);
      query.device = &first;
      query.collective = true;
      query.collective_seconds = ExchangeSeconds(view, pair, collectives_);
      const Cost cost = PriceOf(query, profile_);
      seconds = cost.seconds;
      if (usual_ && cost.source != CostSource::kAnalytical) {
        const double usual = ExchangeSeconds(view, pair, *usual_collectives_);
        if (usual > 0) seconds *= query.collective_seconds / usual;
      }
      source = cost.source;
      break;
    }
  }
  return {Duration::FromSeconds(seconds), source};
}

std::vector<LinkUse> Pricer::LinkUses(const TaskView& view,
                                      Duration duration) const {
  const TaskKind kind = view.task->kind;
  if ((kind != TaskKind::kComm && kind != TaskKind::kSend) ||
      duration <= Duration{}) {
    return {};
  }
  const DeviceGroup none;
  const auto subgroups = Exchanging(
      view, *view.group, view.peer_group != nullptr ? *view.peer_group : none);
  const Bytes sent = Sent(view);
  const CollectiveOption& option = CollectiveModel::Best(
      collectives_.Options(KindOf(*view.task), subgroups), sent);
  const auto payload = static_cast<double>(sent.value);
  std::vector<LinkUse> uses;
  for (const LinkLoad& load :
       collectives_.Loads(KindOf(*view.task), subgroups, option.algorithm)) {
    const Link& link = cluster_.links[load.link.index()];
    const double bandwidth =
        cluster_.link_types[static_cast<size_t>(link.type)].bandwidth.value;
    const double share = load.bytes_per_payload_byte * payload /
                         (bandwidth * duration.seconds());
    if (share > 0) uses.push_back({load.link, std::min(share, 1.0)});
  }
  return uses;
}

}  // namespace tessera
