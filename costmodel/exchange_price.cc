#include "costmodel/exchange_price.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "planner/ir/cluster_lookup.h"

namespace tessera {
namespace {

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

// Who exchange a kComm or kSend with each other.
std::vector<std::vector<DeviceId>> Exchanging(const Task& task,
                                              const DeviceGroup& group,
                                              const DeviceGroup& peer) {
  return task.kind == TaskKind::kSend ? Pairs(group, peer)
                                      : SubgroupDevices(group, task.axes);
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
         view.value(task.reads[0]).category == MemoryCategory::kActivation;
}

// Whether it gathers parameters that ZeRO-3 has cut, amid the passes.
bool GathersParameters(const TaskView& view) {
  const Task& task = *view.task;
  return task.comm == CommKind::kAllGather && !task.optimizer &&
         !task.reads.empty() &&
         view.value(task.reads[0]).category == MemoryCategory::kParameter;
}

// Whether it reduces gradients to the ranks that ZeRO has cut them over.
bool CutsGradients(const TaskView& view) {
  const Task& task = *view.task;
  return task.comm == CommKind::kReduceScatter && !task.optimizer &&
         !task.reads.empty() &&
         view.value(task.reads[0]).category == MemoryCategory::kGradient;
}

// `cluster` as it was when its collectives were measured; null where no part
// has failed or become slow since.
std::unique_ptr<const Cluster> UsualOf(const Cluster& cluster,
                                       const Cluster* whole) {
  const auto slow = [](const LinkType& type) { return type.slowness != 1; };
  if (whole == nullptr && std::ranges::none_of(cluster.link_types, slow)) {
    return nullptr;
  }
  auto usual = std::make_unique<Cluster>(whole != nullptr ? *whole : cluster);
  for (LinkType& type : usual->link_types) {
    type.bandwidth = type.bandwidth * type.slowness;
    type.in_switch_bandwidth = type.in_switch_bandwidth * type.slowness;
    type.slowness = 1;
  }
  return usual;
}

// Uses of a link added up, in the order of links.
std::vector<LinkUse> OncePerLink(std::vector<LinkUse> uses) {
  std::ranges::stable_sort(uses, {}, &LinkUse::link);
  size_t kept = 0;
  for (const LinkUse& use : uses) {
    if (kept > 0 && uses[kept - 1].link == use.link) {
      uses[kept - 1].utilisation += use.utilisation;
    } else {
      uses[kept++] = use;
    }
  }
  uses.resize(kept);
  return uses;
}

double SecondsBy(const CollectiveModel& model, CommKind kind,
                 const std::vector<std::vector<DeviceId>>& groups,
                 Bytes payload) {
  return CollectiveModel::Best(model.Options(kind, groups), payload)
      .Seconds(payload);
}

}  // namespace

Bytes PayloadOf(const TaskView& view) {
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
      if (!view.value(task.writes[0]).layout.has_halo()) {
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

ExchangePrices::ExchangePrices(const Graph& graph, const Cluster& cluster,
                               const ProfileDb* profile, const Cluster* whole)
    : cluster_(cluster),
      profile_(profile),
      collectives_(cluster),
      usual_(profile != nullptr ? UsualOf(cluster, whole) : nullptr),
      usual_collectives_(
          usual_ ? std::make_unique<const CollectiveModel>(*usual_) : nullptr),
      routing_(RoutingOf(graph)),
      exchanged_slots_(ExchangedSlots(graph)) {}

void ExchangePrices::AppendKey(const TaskView& view, IntKey& key) const {
  const Task& task = *view.task;
  if (task.kind == TaskKind::kSend) {
    key.push_back(PayloadOf(view).value);
    key.push_back(SplitAxes(view));
    return;
  }
  key.push_back(static_cast<int64_t>(task.comm));
  key.push_back(task.axes);
  key.push_back(PayloadOf(view).value);
  key.push_back(IsBesideProducts(view)    ? 1
                : GathersParameters(view) ? 2
                : MovesSlots(view)        ? 3
                : CutsGradients(view)     ? 4
                                          : 0);
  key.push_back(Shards(view));
}

Cost ExchangePrices::Price(const TaskView& view,
                           const GroupClass& where) const {
  Cost cost =
      Collective(KindOf(*view.task),
                 Exchanging(*view.task, where.group, where.peer), Sent(view));
  if (const AxisSet split = SplitAxes(view); split != 0) {
    const Cost gather =
        Collective(CommKind::kAllGather, SubgroupDevices(where.peer, split),
                   PayloadOf(view));
    cost.seconds += gather.seconds;
    cost.source = std::max(cost.source, gather.source);  // the less certain
  }
  cost.seconds = OfStack(view, cost.seconds);
  return cost;
}

// As it was measured or, else, by the alpha-beta model.
Cost ExchangePrices::Collective(CommKind kind, const RankGroups& groups,
                                Bytes payload) const {
  CostQuery query;
  if (profile_ != nullptr) query.key = KeyOf(kind, groups, payload);
  query.device = &cluster_.TypeOf(groups[0][0]);
  query.collective = true;
  query.collective_seconds = SecondsBy(collectives_, kind, groups, payload);
  Cost cost = PriceOf(query, profile_);
  if (usual_ && cost.source != CostSource::kAnalytical) {
    const double usual = SecondsBy(*usual_collectives_, kind, groups, payload);
    if (usual > 0) cost.seconds *= query.collective_seconds / usual;
  }
  return cost;
}

// Whether tokens and experts exchange it.
bool ExchangePrices::MovesSlots(const TaskView& view) const {
  const Task& task = *view.task;
  if (task.comm != CommKind::kAllToAll &&
      task.comm != CommKind::kRedistribute) {
    return false;
  }
  const TensorId tensor = view.value(task.reads[0]).tensor;
  return tensor.valid() && HasSlots(tensor);
}

// The axes of ranks that have alike what a send carries, each of which sends a
// part of it.
AxisSet ExchangePrices::SplitAxes(const TaskView& view) const {
  const Task& task = *view.task;
  const SplitSends split = cluster_.stack.split_sends;
  if (split == SplitSends::kNever || task.kind != TaskKind::kSend ||
      !SameMesh(*view.group, *view.peer_group)) {
    return 0;
  }
  const Value& sent = view.value(task.reads[0]);
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
int64_t ExchangePrices::Shards(const TaskView& view) const {
  const bool gathers = GathersParameters(view);
  if (cluster_.stack.host_per_shard == Duration{} ||
      (!gathers && !CutsGradients(view))) {
    return 0;
  }
  int64_t parameters = 0;
  for (const ValueId id : gathers ? view.task->writes : view.task->reads) {
    const Value& whole = view.value(id);
    if (ElementsOf(whole, *view.group) >= Stack::kLeastSharded) ++parameters;
  }
  return parameters * view.group->Size(view.task->axes);
}

// What each of the ranks that have the payload of a send alike sends of it; the
// payload of a collective, or what is left of it where a token is sent to a
// host once. (The copies to several experts of one host take faster links.)
Bytes ExchangePrices::Sent(const TaskView& view) const {
  const Bytes payload = PayloadOf(view);
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

// What the stack makes of the time of what is exchanged.
double ExchangePrices::OfStack(const TaskView& view, double seconds) const {
  if (view.task->kind == TaskKind::kSend) return seconds;
  if (IsBesideProducts(view)) {
    seconds *= cluster_.stack.tensor_exposed;
  } else if (MovesSlots(view)) {
    seconds *= cluster_.stack.experts_exposed;
  } else if (GathersParameters(view)) {
    const double most = cluster_.stack.sharded_bandwidth.value;
    if (most > 0) {
      seconds =
          std::max(seconds, static_cast<double>(PayloadOf(view).value) / most);
    }
  }
  return seconds + static_cast<double>(Shards(view)) *
                       cluster_.stack.host_per_shard.seconds();
}

ProfileKey ExchangePrices::KeyOf(const TaskView& view,
                                 const GroupClass& where) const {
  return KeyOf(KindOf(*view.task),
               Exchanging(*view.task, where.group, where.peer), Sent(view));
}

// The ranks of the subgroup, or the pair, that spans the most hosts count,
// which the others wait for in the step.
ProfileKey ExchangePrices::KeyOf(CommKind kind, const RankGroups& groups,
                                 Bytes payload) const {
  size_t most = 0;
  for (const std::vector<DeviceId>& ranks : groups) {
    std::set<int> nodes;
    for (DeviceId rank : ranks) {
      nodes.insert(cluster_.devices[rank.index()].node);
    }
    most = std::max(most, nodes.size());
  }
  return CollectiveKey(kind, cluster_.TypeOf(groups[0][0]).name,
                       static_cast<int>(groups[0].size()),
                       static_cast<int>(most), payload);
}

std::vector<LinkUse> ExchangePrices::LinkUses(const TaskView& view,
                                              Duration duration) const {
  std::vector<LinkUse> uses;
  const auto add = [&](CommKind kind, const RankGroups& groups, Bytes payload) {
    const CollectiveOption& option =
        CollectiveModel::Best(collectives_.Options(kind, groups), payload);
    for (const LinkLoad& load :
         collectives_.Loads(kind, groups, option.algorithm)) {
      const double bandwidth = TypeOf(cluster_, load.link).bandwidth.value;
      const double share = load.bytes_per_payload_byte *
                           static_cast<double>(payload.value) /
                           (bandwidth * duration.seconds());
      if (share > 0) uses.push_back({load.link, share});
    }
  };
  const DeviceGroup none;
  add(KindOf(*view.task),
      Exchanging(*view.task, *view.group,
                 view.peer_group != nullptr ? *view.peer_group : none),
      Sent(view));
  if (const AxisSet split = SplitAxes(view); split != 0) {
    add(CommKind::kAllGather, SubgroupDevices(*view.peer_group, split),
        PayloadOf(view));
    uses = OncePerLink(std::move(uses));
  }
  for (LinkUse& use : uses) use.utilisation = std::min(use.utilisation, 1.0);
  return uses;
}

}  // namespace tessera
