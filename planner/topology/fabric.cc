#include "planner/topology/fabric.h"

#include "planner/topology/hardware.h"

namespace tessera {
namespace {

// NVIDIA Quantum QM8700 datasheet (2018): a switch passes a packet on in
// "sub-130 ns".
constexpr double kSwitchLatency = 0.13e-6;

}  // namespace

void ConnectRails(Cluster& cluster,
                  const std::vector<std::vector<VertexId>>& nics,
                  std::string_view nic_link) {
  if (nics.size() < 2) return;
  ConnectRails(cluster, nics, UseLinkType(cluster, nic_link));
}

void ConnectRails(Cluster& cluster,
                  const std::vector<std::vector<VertexId>>& nics,
                  int nic_link) {
  if (nics.size() < 2) return;
  const size_t rails = nics.front().size();
  std::vector<VertexId> leaves;
  for (size_t rail = 0; rail < rails; ++rail) {
    leaves.push_back(
        AddVertex(cluster, VertexKind::kSwitch, "leaf" + std::to_string(rail)));
    for (const auto& node : nics) {
      Connect(cluster, node[rail], leaves.back(), nic_link);
    }
  }
  if (rails == 1) return;
  LinkType trunk;
  const LinkType& nic = cluster.link_types[static_cast<size_t>(nic_link)];
  trunk.name = nic.name + "-trunk";
  trunk.source =
      "non-blocking: the NICs of a rail together; latency: NVIDIA "
      "QM8700 datasheet (2018)";
  trunk.bandwidth = nic.bandwidth * static_cast<double>(nics.size());
  trunk.latency = Duration::FromSeconds(kSwitchLatency);
  cluster.link_types.push_back(trunk);
  const int trunk_link = static_cast<int>(cluster.link_types.size()) - 1;
  const VertexId spine = AddVertex(cluster, VertexKind::kSwitch, "spine");
  for (VertexId leaf : leaves) Connect(cluster, leaf, spine, trunk_link);
}

std::string InNode(int node, std::string_view part) {
  return "node" + std::to_string(node) + "." + std::string(part);
}

std::string InNode(int node, std::string_view part, int index) {
  return InNode(node, part) + std::to_string(index);
}

}  // namespace tessera
