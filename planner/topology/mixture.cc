#include "planner/topology/mixture.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/append.h"
#include "planner/ir/cluster_lookup.h"
#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/networks.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

// The nodes of one part, with the NICs of each.
struct Part {
  std::vector<std::vector<VertexId>> nics;
  int nic_link = 0;
};

// Adds the nodes of `part`, without the network between them.
Part AddNodes(const Topology& topology, const Cluster& part, Cluster& cluster) {
  const int first_node =
      cluster.devices.empty() ? 0 : cluster.devices.back().node + 1;
  std::vector<int> device_types;
  std::vector<int> hosts;
  for (const Host& host : part.hosts) {
    const auto known = std::ranges::find(cluster.hosts, host);
    hosts.push_back(static_cast<int>(known - cluster.hosts.begin()));
    if (known == cluster.hosts.end()) cluster.hosts.push_back(host);
  }
  for (DeviceType type : part.device_types) {
    type.host = hosts[static_cast<size_t>(type.host)];
    device_types.push_back(UseDeviceType(cluster, type));
  }
  const NetworkSide side = NetworkSideOf(part);
  const std::vector<DeviceId> device_at = DevicesAtVertices(part);
  std::vector<VertexId> renamed(side.first);
  for (size_t v = 0; v < side.first; ++v) {
    const Vertex& vertex = part.vertices[v];
    const size_t dot = vertex.name.find('.');  // "node3.gpu5"
    const int node = std::stoi(vertex.name.substr(4, dot - 4));
    const std::string name =
        InNode(first_node + node, vertex.name.substr(dot + 1));
    if (const DeviceId device = device_at[v]; device.valid()) {
      const auto type = static_cast<size_t>(part.devices[device.index()].type);
      const DeviceId id =
          AddDevice(cluster, device_types[type], first_node + node, name);
      renamed[v] = cluster.devices[id.index()].vertex;
      continue;
    }
    renamed[v] = AddVertex(cluster, vertex.kind, name);
  }
  Part added;
  for (const auto& nics : side.nics) {
    auto& of_node = added.nics.emplace_back();
    for (VertexId nic : nics) of_node.push_back(renamed[nic.index()]);
  }
  for (const Link& link : part.links) {
    if (std::max(link.from.index(), link.to.index()) >= side.first) continue;
    cluster.links.push_back({renamed[link.from.index()],
                             renamed[link.to.index()],
                             UseLinkType(cluster, TypeOf(part, link))});
  }
  added.nic_link = UseLinkType(cluster, topology.nic_link);
  return added;
}

// NIC r of every node on leaf r, all leaves on one spine, whose links carry
// what the leaf's NICs do.
void ConnectParts(Cluster& cluster, const std::vector<Part>& parts) {
  size_t rails = 0;
  for (const Part& part : parts) {
    for (const auto& node : part.nics) rails = std::max(rails, node.size());
  }
  std::vector<std::pair<VertexId, int>> leaves;  // with the link to the spine
  std::map<std::pair<double, int>, int> trunks;
  for (size_t rail = 0; rail < rails; ++rail) {
    const VertexId leaf =
        AddVertex(cluster, VertexKind::kSwitch, "leaf" + std::to_string(rail));
    double carried = 0;
    int fastest = -1;
    for (const Part& part : parts) {
      const auto& type = cluster.link_types[static_cast<size_t>(part.nic_link)];
      for (const auto& node : part.nics) {
        if (rail >= node.size()) continue;
        Connect(cluster, node[rail], leaf, part.nic_link);
        carried += type.bandwidth.value;
        if (fastest < 0 || type.bandwidth.value >
                               cluster.link_types[static_cast<size_t>(fastest)]
                                   .bandwidth.value) {
          fastest = part.nic_link;
        }
      }
    }
    const double times =
        carried /
        cluster.link_types[static_cast<size_t>(fastest)].bandwidth.value;
    const auto [trunk, is_new] = trunks.try_emplace({times, fastest}, 0);
    if (is_new) {
      trunk->second = AddTrunk(cluster, fastest, times);
      // Rails of fewer nodes have trunks of their own.
      if (trunks.size() > 1) {
        cluster.link_types.back().name += std::to_string(trunks.size());
      }
    }
    leaves.emplace_back(leaf, trunk->second);
  }
  if (leaves.size() == 1) return;
  const VertexId spine = AddVertex(cluster, VertexKind::kSwitch, "spine");
  for (const auto& [leaf, trunk] : leaves) {
    Connect(cluster, leaf, spine, trunk);
  }
}

}  // namespace

Cluster MixtureOf(const std::vector<ClusterPart>& clusters) {
  Cluster mixture;
  std::vector<Part> parts;
  for (const auto& [topology, part] : clusters) {
    AppendTo(mixture.name, "+", part.name);
    parts.push_back(AddNodes(*topology, part, mixture));
  }
  ConnectParts(mixture, parts);
  return mixture;
}

}  // namespace tessera
