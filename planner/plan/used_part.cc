#include "planner/plan/used_part.h"

#include <algorithm>

namespace tessera {

std::vector<bool> UsedDevices(const Cluster& cluster, const Plan& plan) {
  std::vector<bool> used(cluster.devices.size(), false);
  for (const DeviceGroup& group : plan.groups) {
    for (const DeviceId device : group.devices) used[device.index()] = true;
  }
  return used;
}

std::optional<UsedPart> UsedPartOf(const Cluster& cluster, const Plan& plan) {
  const std::vector<bool> used = UsedDevices(cluster, plan);
  if (std::ranges::find(used, false) == used.end()) return std::nullopt;
  UsedPart part = {cluster, plan};
  part.cluster.devices.clear();
  std::vector<DeviceId> ranks(used.size());  // in the part
  int last_node = -1;                        // of those that are used
  int nodes = 0;
  for (size_t d = 0; d < used.size(); ++d) {
    if (!used[d]) continue;
    ranks[d] = DeviceId(std::ssize(part.cluster.devices));
    Device device = cluster.devices[d];
    if (device.node != last_node) ++nodes;
    last_node = device.node;
    device.node = nodes - 1;
    part.cluster.devices.push_back(device);
  }
  for (DeviceGroup& group : part.plan.groups) {
    for (DeviceId& device : group.devices) device = ranks[device.index()];
  }
  return part;
}

std::optional<Strategy> StrategyOnPart(const GraphIndex& index,
                                       const Cluster& cluster,
                                       const Plan& plan) {
  const auto part = UsedPartOf(cluster, plan);
  return part ? UniformStrategy(index, part->cluster, part->plan)
              : UniformStrategy(index, cluster, plan);
}

}  // namespace tessera
