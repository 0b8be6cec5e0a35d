#include "planner/plan/stages.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "planner/base/append.h"

namespace tessera {
namespace {

// Calls `visit(device, group, first)` for each place of a device in a group, in
// order; `first` is the first group that has the device.
template <typename Visit>
void ForEachDevice(std::span<const DeviceGroup> groups, const Visit& visit) {
  std::vector<GroupId> first;
  for (size_t g = 0; g < groups.size(); ++g) {
    const GroupId group(static_cast<int64_t>(g));
    for (DeviceId device : groups[g].devices) {
      if (device.index() >= first.size()) first.resize(device.index() + 1);
      if (!first[device.index()].valid()) first[device.index()] = group;
      visit(device, group, first[device.index()]);
    }
  }
}

bool AnyDeviceIsShared(std::span<const DeviceGroup> groups) {
  bool shared = false;
  ForEachDevice(groups, [&](DeviceId, GroupId group, GroupId first) {
    shared |= group != first;
  });
  return shared;
}

// The groups of each device, ascending.
std::vector<std::vector<GroupId>> GroupsOfDevices(
    std::span<const DeviceGroup> groups) {
  std::vector<std::vector<GroupId>> of_device;
  ForEachDevice(groups, [&](DeviceId device, GroupId group, GroupId) {
    if (device.index() >= of_device.size()) {
      of_device.resize(device.index() + 1);
    }
    of_device[device.index()].push_back(group);
  });
  return of_device;
}

}  // namespace

Stages StagesOf(const Graph& graph, const Plan& plan) {
  // Disjoint sets of groups; a root is the least of its set.
  std::vector<size_t> parent(plan.groups.size());
  std::iota(parent.begin(), parent.end(), size_t{0});
  const auto root = [&](size_t g) {
    while (parent[g] != g) g = parent[g] = parent[parent[g]];
    return g;
  };
  const auto join = [&](size_t a, size_t b) {
    a = root(a);
    b = root(b);
    parent[std::max(a, b)] = std::min(a, b);
  };
  std::vector<int> group_of_block(graph.blocks.size(), -1);
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    int& first = group_of_block[static_cast<size_t>(graph.nodes[i].block)];
    if (first < 0) first = plan.ops[i].group.value;
    join(static_cast<size_t>(first), plan.ops[i].group.index());
  }
  ForEachDevice(plan.groups, [&](DeviceId, GroupId group, GroupId first) {
    join(first.index(), group.index());
  });

  Stages stages;
  stages.of_group.resize(plan.groups.size());
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const size_t first = root(g);
    if (first == g) {
      stages.of_group[g] = stages.count();
      stages.groups.emplace_back();
    } else {
      stages.of_group[g] = stages.of_group[first];
    }
    stages.groups[static_cast<size_t>(stages.of_group[g])].push_back(
        GroupId(static_cast<int64_t>(g)));
  }
  for (int group : group_of_block) {
    stages.of_block.push_back(
        group < 0 ? -1 : stages.of_group[static_cast<size_t>(group)]);
  }
  return stages;
}

PipelineShape ShapeOf(const Graph& graph, const Plan& plan) {
  int last_chunk = 0;
  for (const OpPlacement& op : plan.ops) {
    last_chunk = std::max(last_chunk, op.chunk);
  }
  return {StagesOf(graph, plan).count(), last_chunk + 1, plan.microbatches};
}

StageOrders OrdersOf(const Graph& graph, const Plan& plan) {
  const auto schedule = FindSchedule(plan.schedule);
  TESSERA_CHECK(schedule.has_value()) << plan.schedule;
  if ((*schedule)->order == nullptr) return plan.actions;
  return OrdersOf(**schedule, ShapeOf(graph, plan));
}

std::vector<std::vector<GroupId>> Overlaps(
    std::span<const DeviceGroup> groups) {
  std::vector<std::vector<GroupId>> overlaps(groups.size());
  if (!AnyDeviceIsShared(groups)) return overlaps;
  for (const auto& of_device : GroupsOfDevices(groups)) {
    if (of_device.size() < 2) continue;
    for (GroupId group : of_device) {
      for (GroupId other : of_device) {
        auto& list = overlaps[group.index()];
        const auto at = std::lower_bound(list.begin(), list.end(), other);
        if (other != group && (at == list.end() || *at != other)) {
          list.insert(at, other);
        }
      }
    }
  }
  return overlaps;
}

DeviceGroup World(const Plan& plan) {
  DeviceGroup world;
  world.name = "world";
  ForEachDevice(plan.groups,
                [&](DeviceId device, GroupId group, GroupId first) {
                  if (group == first) world.devices.push_back(device);
                });
  world.axes = {{"world", static_cast<int>(world.devices.size())}};
  return world;
}

bool Holds(const DeviceSet& set, GroupId group) {
  return std::binary_search(set.groups.begin(), set.groups.end(), group);
}

std::vector<DeviceSet> DeviceSets(std::span<const DeviceGroup> groups) {
  std::vector<DeviceSet> sets;
  if (!AnyDeviceIsShared(groups)) {
    for (size_t g = 0; g < groups.size(); ++g) {
      sets.push_back({groups[g].name,
                      {GroupId(static_cast<int64_t>(g))},
                      groups[g].devices});
    }
    return sets;
  }
  const auto of_device = GroupsOfDevices(groups);
  std::map<std::vector<GroupId>, size_t> known;
  ForEachDevice(groups, [&](DeviceId device, GroupId group, GroupId first) {
    if (group != first) return;
    const std::vector<GroupId>& own = of_device[device.index()];
    const auto [it, is_new] = known.try_emplace(own, sets.size());
    if (is_new) {
      DeviceSet& set = sets.emplace_back();
      set.groups = own;
      for (GroupId member : own) {
        AppendTo(set.name, " + ", groups[member.index()].name);
      }
    }
    sets[it->second].devices.push_back(device);
  });
  return sets;
}

}  // namespace tessera
