#include "costmodel/whatif/rent.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "planner/topology/upkeep.h"

namespace tessera {
namespace {

// The presets in "NAME[:COUNTS][+NAME…]".
std::vector<std::string_view> PresetsOf(std::string_view name) {
  std::vector<std::string_view> presets;
  for (bool more = true; more;) {
    const size_t plus = name.find('+');
    const std::string_view part = name.substr(0, plus);
    presets.push_back(part.substr(0, part.find(':')));
    more = plus != std::string_view::npos;
    if (more) name.remove_prefix(plus + 1);
  }
  return presets;
}

// A node, as it is paid for.
struct Rented {
  std::string_view instance;  // its name, or empty
  int devices = 0;            // that the cluster has
  int paid = 0;               // at least as many
  std::optional<double> price;
};

std::vector<Rented> NodesOf(const Cluster& cluster) {
  const std::vector<std::string_view> presets = PresetsOf(cluster.name);
  std::vector<Rented> nodes(static_cast<size_t>(cluster.num_nodes()));
  for (const Device& device : cluster.devices) {
    const auto& type = cluster.device_types[static_cast<size_t>(device.type)];
    Rented& node = nodes[static_cast<size_t>(device.node)];
    if (node.devices++ == 0) {
      node.price = 0;
      for (const std::string_view preset : presets) {
        const int together = InstanceDevices(preset, type.name);
        if (together == 0) continue;
        node.instance = preset;
        node.paid = together;
      }
    }
    if (type.upkeep.price == 0) node.price.reset();
    if (node.price) *node.price += type.upkeep.price;
  }
  for (Rented& node : nodes) {
    node.paid = std::max(node.paid, node.devices);
    if (node.price)
      *node.price *= static_cast<double>(node.paid) / node.devices;
  }
  return nodes;
}

}  // namespace

std::optional<double> UsdPerHour(const Cluster& cluster) {
  double sum = 0;
  for (const Rented& node : NodesOf(cluster)) {
    if (!node.price) return {};
    sum += *node.price;
  }
  return sum;
}

std::string PartsOfInstancesNote(const Cluster& cluster) {
  for (const Rented& node : NodesOf(cluster)) {
    if (!node.price || node.paid == node.devices) continue;
    return "all " + std::to_string(node.paid) + " devices of " +
           std::string(node.instance) + " are paid for, of which " +
           std::to_string(node.devices) + (node.devices == 1 ? " is" : " are") +
           " in the cluster: instances are rented whole";
  }
  return "";
}

}  // namespace tessera
