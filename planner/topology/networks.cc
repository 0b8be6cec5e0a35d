#include "planner/topology/networks.h"

#include <algorithm>
#include <array>
#include <string>

#include "planner/base/table.h"
#include "planner/base/whole_number.h"

namespace tessera {
namespace {

constexpr std::string_view kOversubscription =
    "how much less the spine carries than the NICs under it";

constexpr std::array kNetworks = {
    Network{"rails", "NIC r of every node on leaf r, all leaves on a spine",
            kOversubscription, 1, 64, ConnectRailNetwork},
    Network{"fat-tree", "leaves of 32 NICs, node by node, on a spine",
            kOversubscription, 1, 64, ConnectFatTree},
    Network{"dragonfly", "leaves of 32 NICs, node by node, each joined to each",
            kOversubscription, 1, 64, ConnectDragonfly},
    Network{"torus", "nodes joined to the next ones in each dimension",
            "dimensions", 3, 3, ConnectTorus},
};

}  // namespace

std::span<const Network> Networks() {
  return kNetworks;
}

NetworkSide NetworkSideOf(const Cluster& cluster) {
  // Each NIC stands behind a device of its node. What follows the last of them
  // is the network.
  NetworkSide side;
  side.nics.resize(static_cast<size_t>(cluster.num_nodes()));
  std::vector<int> node_of(cluster.vertices.size(), -1);
  for (const Device& device : cluster.devices) {
    node_of[device.vertex.index()] = device.node;
  }
  int node = 0;
  for (size_t v = 0; v < cluster.vertices.size(); ++v) {
    if (node_of[v] >= 0) node = node_of[v];
    const VertexKind kind = cluster.vertices[v].kind;
    if (kind == VertexKind::kNic) {
      side.nics[static_cast<size_t>(node)].emplace_back(
          static_cast<int64_t>(v));
    }
    if (kind != VertexKind::kSwitch) side.first = v + 1;
  }
  return side;
}

Result<Cluster> WithNetwork(Cluster cluster, std::string_view text) {
  const size_t colon = text.find(':');
  TESSERA_TRY(const Network* network,
              Find("network", Networks(), text.substr(0, colon)));
  int parameter = network->default_parameter;
  if (colon != std::string_view::npos) {
    const std::string_view number = text.substr(colon + 1);
    parameter = ParseWhole<int>(number).value_or(0);
    if (parameter < 1 || parameter > network->most) {
      return InvalidInput("expected " + std::string(network->parameter) +
                              " in [1, " + std::to_string(network->most) +
                              "], is '" + std::string(number) + "'",
                          "network '" + std::string(text) + "'");
    }
  }
  const auto [nics, first] = NetworkSideOf(cluster);
  const auto in_network = [&](VertexId vertex) {
    return vertex.index() >= first;
  };
  const auto port = std::ranges::find_if(cluster.links, [&](const Link& link) {
    return !in_network(link.from) && in_network(link.to);
  });
  if (port == cluster.links.end()) return cluster;  // one node
  if (network->connect == ConnectRailNetwork && parameter > 1 &&
      nics.front().size() == 1) {
    return InvalidInput(
        "expected 1 where nodes have one NIC, whose rail needs "
        "no spine, is '" +
            std::to_string(parameter) + "'",
        "network '" + std::string(text) + "'");
  }
  const int nic_link = port->type;
  std::erase_if(cluster.links, [&](const Link& link) {
    return in_network(link.from) || in_network(link.to);
  });
  cluster.vertices.resize(first);
  std::erase_if(cluster.link_types, [](const LinkType& type) {
    return type.name.ends_with("-trunk");  // the last
  });
  network->connect(cluster, nics, nic_link, parameter);
  return cluster;
}

}  // namespace tessera
