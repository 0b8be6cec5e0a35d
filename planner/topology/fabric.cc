#include "planner/topology/fabric.h"

#include <algorithm>

#include "planner/topology/hardware.h"
#include "planner/topology/networks.h"

namespace tessera {
namespace {

// NVIDIA Quantum QM8700 datasheet (2018): a switch passes a packet on in
// "sub-130 ns".
constexpr double kSwitchLatency = 0.13e-6;
// Half of the 64 ports of a switch (NVIDIA Quantum-2 QM9700 datasheet, 2021).
constexpr size_t kLeafNics = 32;

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
  ConnectRailNetwork(cluster, nics, nic_link, /*oversubscription=*/1);
}

int AddTrunk(Cluster& cluster, int nic_link, double times) {
  const LinkType& nic = cluster.link_types[static_cast<size_t>(nic_link)];
  LinkType trunk;
  trunk.name = nic.name + "-trunk";
  trunk.source = "so many " + nic.name +
                 " together; latency: NVIDIA QM8700 datasheet (2018)";
  trunk.bandwidth = nic.bandwidth * times;
  trunk.latency = Duration::FromSeconds(kSwitchLatency);
  trunk.start = nic.start;
  cluster.link_types.push_back(trunk);
  return static_cast<int>(cluster.link_types.size()) - 1;
}

std::vector<VertexId> AddLeaves(Cluster& cluster,
                                const std::vector<std::vector<VertexId>>& nics,
                                int nic_link) {
  const auto per_leaf =
      static_cast<size_t>(NicsPerLeaf(nics)) / nics.front().size();  // nodes
  std::vector<VertexId> leaves;
  for (size_t node = 0; node < nics.size(); ++node) {
    if (node % per_leaf == 0) {
      leaves.push_back(AddVertex(cluster, VertexKind::kSwitch,
                                 "leaf" + std::to_string(leaves.size())));
    }
    for (VertexId nic : nics[node]) {
      Connect(cluster, nic, leaves.back(), nic_link);
    }
  }
  return leaves;
}

double NicsPerLeaf(const std::vector<std::vector<VertexId>>& nics) {
  const size_t of_node = nics.front().size();
  return static_cast<double>(std::max<size_t>(1, kLeafNics / of_node) *
                             of_node);
}

std::string InNode(int node, std::string_view part) {
  return "node" + std::to_string(node) + "." + std::string(part);
}

std::string InNode(int node, std::string_view part, int index) {
  return InNode(node, part) + std::to_string(index);
}

}  // namespace tessera
