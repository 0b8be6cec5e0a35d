#include "costmodel/evaluate/memory_check.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "costmodel/memory/overhead.h"
#include "costmodel/memory/peak_memory.h"
#include "planner/base/format.h"

namespace tessera {
namespace {

// Of the smallest and of the largest device of a set.
std::pair<Bytes, Bytes> MemoriesOf(const Cluster& cluster,
                                   const DeviceSet& set) {
  Bytes least = cluster.TypeOf(set.devices[0]).memory;
  Bytes most = least;
  for (DeviceId device : set.devices) {
    least = std::min(least, cluster.TypeOf(device).memory);
    most = std::max(most, cluster.TypeOf(device).memory);
  }
  return {least, most};
}

void CheckDevices(const LoweringFacts& facts, const GraphIndex* index,
                  const Plan& plan, const MemoryByKind& memory_of,
                  Evaluation& result) {
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  AddOverheads(facts, index, plan, sets, result.memory);
  for (const DeviceSet& set : sets) {
    for (DeviceId device : set.devices) {
      const DeviceType& type = facts.cluster.TypeOf(device);
      if (type.Peak(facts.graph.dtype).value > 0) continue;
      result.violations.push_back("group " + set.name + ": " + type.name +
                                  " does not compute in " +
                                  std::string(NameOf(facts.graph.dtype)));
      break;
    }
  }
  const auto check = [&](const DeviceSet& set, const MemoryUse& use,
                         Bytes memory) {
    if (use.total <= memory) return;
    result.overflow = Max(result.overflow, use.total - memory);
    const auto largest = std::max_element(use.parts.begin(), use.parts.end());
    result.violations.push_back(
        "group " + set.name + ": needs " + FormatBytes(use.total) + " of " +
        FormatBytes(memory) + " per device, " +
        FormatBytes(use.total - memory) + " too much; largest: " +
        std::string(
            NameOf(static_cast<MemoryCategory>(largest - use.parts.begin()))) +
        " " + FormatBytes(*largest));
  };
  for (size_t s = 0; s < sets.size(); ++s) {
    const auto [smallest, largest] = MemoriesOf(facts.cluster, sets[s]);
    if (result.memory[s].total <= smallest) continue;
    const bool uneven = std::ranges::any_of(sets[s].groups, [&](GroupId group) {
      const DeviceGroup& of = plan.groups[group.index()];
      return of.IsUneven(of.all_axes());
    });
    if (smallest == largest || !uneven) {
      check(sets[s], result.memory[s], smallest);
      continue;
    }
    std::vector<DeviceSet> kinds;
    std::vector<MemoryUse> memory;
    for (KindMemory& kind : memory_of(sets[s])) {
      kinds.push_back(std::move(kind.devices));
      memory.push_back(kind.memory);
    }
    AddOverheads(facts, index, plan, kinds, memory);
    for (size_t k = 0; k < kinds.size(); ++k) {
      check(kinds[k], memory[k], MemoriesOf(facts.cluster, kinds[k]).first);
    }
  }
}

// A node by the name of its first device, "node3.gpu0": in a cluster that has
// lost parts names are those of the whole one, and nodes are numbered anew.
std::string NodeText(const Cluster& cluster, int node) {
  const auto device = std::ranges::find(cluster.devices, node, &Device::node);
  const std::string& name = cluster.vertices[device->vertex.index()].name;
  return name.empty() ? "node " + std::to_string(node) : name;
}

// What the ranks of a node keep beside their devices fits into its host.
void CheckHosts(const Cluster& cluster, const Plan& plan, Evaluation& result) {
  for (const auto& [tier, what] : {std::pair(MemoryTier::kHost, "memory"),
                                   std::pair(MemoryTier::kFile, "storage")}) {
    const auto lack = LackingHost(cluster, plan, result, tier);
    if (!lack) continue;
    const Bytes most = lack->needed - lack->has;
    result.overflow = Max(result.overflow, most);
    result.violations.push_back("host of " + NodeText(cluster, lack->node) +
                                ": needs " + FormatBytes(lack->needed) +
                                " of " + FormatBytes(lack->has) + " of " +
                                what + ", " + FormatBytes(most) + " too much");
  }
}

}  // namespace

std::optional<HostLack> LackingHost(const Cluster& cluster, const Plan& plan,
                                    const Evaluation& result, MemoryTier tier) {
  const bool in_memory = tier == MemoryTier::kHost;
  const bool on_cores =
      in_memory &&
      std::ranges::any_of(cluster.device_types, &DeviceType::shared_memory);
  if (cluster.hosts.empty() || (result.host_memory.empty() && !on_cores)) {
    return std::nullopt;
  }
  std::vector<HostLack> hosts(static_cast<size_t>(cluster.num_nodes()));
  const std::vector<DeviceSet> sets = DeviceSets(plan.groups);
  for (size_t s = 0; s < sets.size(); ++s) {
    for (DeviceId device : sets[s].devices) {
      const int node = cluster.devices[device.index()].node;
      HostLack& host = hosts[static_cast<size_t>(node)];
      const Host& figures = cluster.HostOf(device);
      host.node = node;
      host.has = in_memory ? figures.memory : figures.storage;
      if (in_memory && cluster.TypeOf(device).shared_memory) {
        host.needed += result.memory[s].total;
      }
      if (result.host_memory.empty()) continue;
      host.needed +=
          (in_memory ? result.host_memory : result.file_memory)[s].total;
    }
  }
  const auto most = std::ranges::max_element(
      hosts, {}, [](const HostLack& host) { return host.needed - host.has; });
  if (most->needed <= most->has) return std::nullopt;
  return *most;
}

std::vector<DeviceSet> DeviceKinds(const Cluster& cluster,
                                   const TaskGraph& tasks) {
  std::vector<DeviceSet> parts;
  for (const DeviceSet& set : AlikeDevices(tasks)) {
    std::map<int, DeviceSet> by_type;
    for (DeviceId device : set.devices) {
      DeviceSet& part = by_type[cluster.devices[device.index()].type];
      part.devices.push_back(device);
    }
    for (auto& [type, part] : by_type) {
      part.name = set.name;
      part.groups = set.groups;
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

std::vector<DeviceSet> KindsByShare(const Cluster& cluster,
                                    std::span<const DeviceGroup> groups,
                                    const DeviceSet& set) {
  std::map<DeviceId, std::vector<int>> keys;
  for (const DeviceId device : set.devices) {
    keys[device] = {cluster.devices[device.index()].type};
  }
  for (const GroupId of : set.groups) {
    const DeviceGroup& group = groups[of.index()];
    for (size_t i = 0; i < group.devices.size(); ++i) {
      const auto key = keys.find(group.devices[i]);
      if (key == keys.end()) continue;
      for (size_t a = 0; a < group.axes.size(); ++a) {
        if (group.axes[a].shares.empty()) continue;
        key->second.push_back(
            group.Coordinate(static_cast<int>(i), static_cast<int>(a)));
      }
    }
  }
  std::map<std::vector<int>, DeviceSet> kinds;
  for (const DeviceId device : set.devices) {
    DeviceSet& kind = kinds[keys[device]];
    kind.name = set.name;
    kind.groups = set.groups;
    kind.devices.push_back(device);
  }
  std::vector<DeviceSet> all;
  for (auto& [key, kind] : kinds) all.push_back(std::move(kind));
  return all;
}

void AddOverheads(const LoweringFacts& facts, const GraphIndex* index,
                  const Plan& plan, const std::vector<DeviceSet>& sets,
                  std::vector<MemoryUse>& memory) {
  const Stack& stack = facts.cluster.stack;
  if (stack.memory == StackMemory()) return;
  std::vector<int> communicators(sets.size(), 0);
  if (stack.memory.communicator > Bytes{}) {
    communicators = CommunicatorsOf(*index, plan, sets);
  }
  for (size_t s = 0; s < sets.size(); ++s) {
    AddOverhead(stack, facts.options, facts.graph.dtype, communicators[s],
                memory[s]);
  }
}

void CheckMemoryFits(const LoweringFacts& facts, const GraphIndex* index,
                     const Plan& plan, const MemoryByKind& memory_of,
                     Evaluation& result) {
  CheckDevices(facts, index, plan, memory_of, result);
  CheckHosts(facts.cluster, plan, result);
}

}  // namespace tessera
