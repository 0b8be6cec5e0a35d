#include "costmodel/whatif/rent.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

#include "planner/topology/topologies.h"
#include "planner/topology/upkeep.h"

namespace tessera {
namespace {

// By node the presets that it may be of, in "NAME[:NODES…][+NAME…]": its own,
// or all where there are not as many nodes as that says.
std::vector<std::vector<std::string_view>> PresetsOf(const Cluster& cluster) {
  std::string_view name = cluster.name;
  std::vector<std::string_view> all;
  std::vector<std::vector<std::string_view>> of_node;
  for (bool more = true; more;) {
    const size_t plus = name.find('+');
    const std::string_view part = name.substr(0, plus);
    const size_t colon = part.find(':');
    all.push_back(part.substr(0, colon));
    size_t nodes = 1;
    if (colon != std::string_view::npos) {
      const std::string_view count = part.substr(colon + 1);
      std::from_chars(count.data(), count.data() + count.size(), nodes);
    }
    of_node.resize(std::min<size_t>(of_node.size() + nodes, kMostNodes),
                   {all.back()});
    more = plus != std::string_view::npos;
    if (more) name.remove_prefix(plus + 1);
  }
  const auto nodes = static_cast<size_t>(cluster.num_nodes());
  if (of_node.size() != nodes) of_node.assign(nodes, all);
  return of_node;
}

// A node, as it is paid for.
struct Rented {
  std::string_view instance;  // its name, or empty
  int devices = 0;            // that the cluster has
  int paid = 0;               // at least as many
  std::optional<double> price;
};

std::vector<Rented> NodesOf(const Cluster& cluster) {
  const auto presets = PresetsOf(cluster);
  std::vector<Rented> nodes(static_cast<size_t>(cluster.num_nodes()));
  for (const Device& device : cluster.devices) {
    const auto& type = cluster.device_types[static_cast<size_t>(device.type)];
    Rented& node = nodes[static_cast<size_t>(device.node)];
    if (node.devices++ == 0) {
      node.price = 0;
      for (const std::string_view preset :
           presets[static_cast<size_t>(device.node)]) {
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
