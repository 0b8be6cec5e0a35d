#include "costmodel/group_classes.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "planner/ir/cluster_lookup.h"

namespace tessera {
namespace {

// Which of equal looks each is: numbers from 0 in the order of first
// appearance.
std::vector<int> Numbered(const std::vector<IntKey>& looks) {
  std::map<IntKey, int> numbers;
  std::vector<int> out;
  for (const IntKey& look : looks) {
    const auto number = static_cast<int>(numbers.size());
    out.push_back(numbers.try_emplace(look, number).first->second);
  }
  return out;
}

// Each vertex's number among those with the same owner; -1 owns none.
std::vector<int> Counted(const std::vector<int>& owner) {
  std::map<int, int> counts;
  std::vector<int> out;
  for (int o : owner) out.push_back(o < 0 ? -1 : counts[o]++);
  return out;
}

// What the links of each owner of vertices look like from within, in their
// order: its own vertices by their number there, others by their id. A link to
// another owner makes a look like no other.
std::vector<IntKey> Looks(const Cluster& cluster, const std::vector<int>& owner,
                          size_t owners) {
  const std::vector<int> number = Counted(owner);
  std::vector<IntKey> looks(owners);
  const auto add = [&](int self, const Link& link) {
    if (self < 0) return;
    IntKey& look = looks[static_cast<size_t>(self)];
    for (VertexId end : {link.from, link.to}) {
      const int other = owner[end.index()];
      if (other == self) {
        look.insert(look.end(),
                    {0, number[end.index()],
                     static_cast<int64_t>(cluster.vertices[end.index()].kind)});
      } else if (other < 0) {
        look.insert(look.end(), {1, end.value});
      } else {
        look.insert(look.end(), {2, self});
      }
    }
    look.push_back(link.type);
  };
  for (const Link& link : cluster.links) {
    const int from = owner[link.from.index()];
    const int to = owner[link.to.index()];
    add(from, link);
    if (to != from) add(to, link);
  }
  for (const Device& device : cluster.devices) {
    const size_t v = device.vertex.index();
    looks[static_cast<size_t>(owner[v])].insert(
        looks[static_cast<size_t>(owner[v])].end(), {device.type, number[v]});
  }
  return looks;
}

// By host.
std::vector<int> PodsOf(const Cluster& cluster, const Router& router) {
  std::vector<int> host_of;
  for (size_t v = 0; v < cluster.vertices.size(); ++v) {
    host_of.push_back(router.NodeOf(VertexId(static_cast<int64_t>(v))));
  }
  return Numbered(
      Looks(cluster, host_of, static_cast<size_t>(cluster.num_nodes())));
}

// By pod: equal numbers may take each other's names.
std::vector<int> KindsOfPods(const Cluster& cluster, const Router& router,
                             const std::vector<int>& pods, size_t count) {
  // A switch that hosts of one pod alone hang on is the pod's.
  constexpr int kNobody = -1;
  constexpr int kSeveral = -2;
  std::vector<int> pod_of;
  for (size_t v = 0; v < cluster.vertices.size(); ++v) {
    const int host = router.NodeOf(VertexId(static_cast<int64_t>(v)));
    pod_of.push_back(host < 0 ? kNobody : pods[static_cast<size_t>(host)]);
  }
  const std::vector<int> of_hosts = pod_of;
  for (const Link& link : cluster.links) {
    const auto hang = [&](VertexId at, VertexId host) {
      const int pod = of_hosts[host.index()];
      if (pod < 0 || of_hosts[at.index()] >= 0) return;
      int& known = pod_of[at.index()];
      known = known == kNobody || known == pod ? pod : kSeveral;
    };
    hang(link.from, link.to);
    hang(link.to, link.from);
  }
  return Numbered(Looks(cluster, pod_of, count));
}

}  // namespace

GroupClasses::GroupClasses(const Cluster& cluster, const Router& router)
    : cluster_(cluster),
      first_device_(FirstDevicesOfNodes(cluster)),
      pod_of_(PodsOf(cluster, router)) {
  const int pods = 1 + *std::ranges::max_element(pod_of_);
  hosts_.resize(static_cast<size_t>(pods));
  for (size_t host = 0; host < pod_of_.size(); ++host) {
    hosts_[static_cast<size_t>(pod_of_[host])].push_back(
        static_cast<int>(host));
  }
  kind_of_ = KindsOfPods(cluster, router, pod_of_, hosts_.size());
  pods_.resize(hosts_.size());
  for (size_t pod = 0; pod < kind_of_.size(); ++pod) {
    pods_[static_cast<size_t>(kind_of_[pod])].push_back(static_cast<int>(pod));
  }
}

std::vector<int> GroupClasses::NamesOf(const DeviceGroup& group,
                                       const DeviceGroup* peer) const {
  const size_t hosts = pod_of_.size();
  std::vector<int> names(hosts, -1);
  const auto mark = [&](const DeviceGroup& g) {
    for (DeviceId device : g.devices) {
      names[static_cast<size_t>(cluster_.devices[device.index()].node)] = 0;
    }
  };
  mark(group);
  if (peer != nullptr) mark(*peer);
  std::vector<int> pod_names(hosts_.size(), -1);
  std::vector<size_t> hosts_named(hosts_.size());
  std::vector<size_t> pods_named(pods_.size());
  int last = -1;
  bool ascend = true;
  for (size_t host = 0; host < hosts; ++host) {
    if (names[host] < 0) continue;
    const auto pod = static_cast<size_t>(pod_of_[host]);
    const auto kind = static_cast<size_t>(kind_of_[pod]);
    int& pod_name = pod_names[pod];
    if (pod_name < 0) pod_name = pods_[kind][pods_named[kind]++];
    names[host] = hosts_[static_cast<size_t>(pod_name)][hosts_named[pod]++];
    ascend = ascend && names[host] > last;
    last = names[host];
  }
  if (!ascend) std::iota(names.begin(), names.end(), 0);
  return names;
}

int GroupClasses::NumberOf(const DeviceGroup& group,
                           const DeviceGroup* peer) const {
  const std::vector<int> names = NamesOf(group, peer);
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
      const auto host =
          static_cast<size_t>(cluster_.devices[device.index()].node);
      key.push_back(first_device_[static_cast<size_t>(names[host])] +
                    device.value - first_device_[host]);
    }
  };
  add(group);
  const size_t group_end = key.size();
  if (peer != nullptr) {
    key.push_back(-1);
    add(*peer);
  }
  {
    std::shared_lock lock(mutex_);
    if (auto it = numbers_.find(key); it != numbers_.end()) return it->second;
  }
  auto made = std::make_unique<const GroupClass>(
      MakeClass(group, peer, key, group_end));
  std::unique_lock lock(mutex_);
  const auto [it, is_new] =
      numbers_.try_emplace(std::move(key), static_cast<int>(classes_.size()));
  if (is_new) classes_.push_back(std::move(made));
  return it->second;
}

// `key` has the renamed devices of `group` up to `group_end`, and those of
// `peer` at its end.
GroupClass GroupClasses::MakeClass(const DeviceGroup& group,
                                   const DeviceGroup* peer, const IntKey& key,
                                   size_t group_end) const {
  const auto renamed = [&](const DeviceGroup& of, size_t end) {
    DeviceGroup named;
    named.axes = of.axes;
    for (size_t i = end - of.devices.size(); i < end; ++i) {
      named.devices.push_back(DeviceId(key[i]));
    }
    return named;
  };
  GroupClass made;
  made.group = renamed(group, group_end);
  if (peer != nullptr) made.peer = renamed(*peer, key.size());
  std::set<int> types;
  for (DeviceId device : made.group.devices) {
    types.insert(cluster_.devices[device.index()].type);
  }
  made.device_types.assign(types.begin(), types.end());
  if (!group.IsUneven(group.all_axes())) return made;
  for (int type : types) {
    std::vector<int> positions;
    for (size_t i = 0; i < made.group.devices.size(); ++i) {
      const DeviceId device = made.group.devices[i];
      if (cluster_.devices[device.index()].type == type) {
        positions.push_back(static_cast<int>(i));
      }
    }
    made.counted.push_back(CountedAt(made.group, positions));
  }
  return made;
}

const GroupClass& GroupClasses::operator[](int number) const {
  std::shared_lock lock(mutex_);
  return *classes_[static_cast<size_t>(number)];
}

}  // namespace tessera
