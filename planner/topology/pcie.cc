// GPUs that meet on their host's PCIe. Two TITAN RTX in a workstation, with and
// without the NVLink bridge (two NVLink 2 links, 50 GB/s a direction: TITAN RTX
// NVLink Bridge product page, 2018); Amazon EC2's instances with T4, A10G and
// L4, which have no NVLink and one network card (EC2 accelerated computing
// pages, 2024); servers of eight PCIe cards with one EDR NIC, the processors
// and memory of a g5.48xlarge (assumed).

#include <vector>

#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/rows.h"

namespace tessera {
namespace {

struct PcieNode {
  std::string_view device;
  int gpus = 1;
  std::string_view pcie;  // between a GPU and the host
  std::string_view nic;
  std::string_view host;
  std::string_view bridge = {};  // between two GPUs
};

Cluster MakePcieCluster(const PcieNode& node, int nodes,
                        std::optional<int> gpus_per_node) {
  Cluster cluster;
  cluster.hosts = {HostOf(node.host)};
  const int gpus = gpus_per_node.value_or(node.gpus);
  const int device = UseDeviceType(cluster, node.device);
  const int host = UseLinkType(cluster, node.pcie);
  std::vector<std::vector<VertexId>> nics;
  for (int n = 0; n < nodes; ++n) {
    const VertexId cpu =
        AddVertex(cluster, VertexKind::kBridge, InNode(n, "cpu"));
    std::vector<VertexId> vertices;
    for (int g = 0; g < gpus; ++g) {
      const DeviceId id = AddDevice(cluster, device, n, InNode(n, "gpu", g));
      vertices.push_back(cluster.devices[id.index()].vertex);
      Connect(cluster, vertices.back(), cpu, host);
    }
    if (!node.bridge.empty() && gpus == 2) {
      Connect(cluster, vertices[0], vertices[1],
              UseLinkType(cluster, node.bridge));
    }
    nics.push_back({AddVertex(cluster, VertexKind::kNic, InNode(n, "nic"))});
    Connect(cluster, nics.back()[0], cpu, host);
  }
  ConnectRails(cluster, nics, node.nic);
  return cluster;
}

constexpr PcieNode kTitanRtxPair = {.device = "titan-rtx-24gb",
                                    .gpus = 2,
                                    .pcie = "pcie3-host",
                                    .nic = "ethernet-10g",
                                    .host = "titan-rtx-pair"};

constexpr PcieNode PcieServer(std::string_view device) {
  return {.device = device,
          .gpus = 8,
          .pcie = "pcie4-host",
          .nic = "ib-edr",
          .host = "g5.48xlarge"};
}

}  // namespace

Result<Cluster> MakeTitanRtxPair(int nodes, std::optional<int> gpus) {
  PcieNode node = kTitanRtxPair;
  node.bridge = "nvlink2-x2";
  return MakePcieCluster(node, nodes, gpus);
}

Result<Cluster> MakeTitanRtxPairWithoutNvLink(int nodes,
                                              std::optional<int> gpus) {
  return MakePcieCluster(kTitanRtxPair, nodes, gpus);
}

Result<Cluster> MakeG4dn(int nodes, std::optional<int> gpus) {
  return MakePcieCluster({.device = "t4-16gb",
                          .gpus = 4,
                          .pcie = "pcie3-host",
                          .nic = "ena-50g",
                          .host = "g4dn.12xlarge"},
                         nodes, gpus);
}

Result<Cluster> MakeG5(int nodes, std::optional<int> gpus) {
  return MakePcieCluster({.device = "a10g-24gb",
                          .gpus = 8,
                          .pcie = "pcie4-host",
                          .nic = "ena-100g",
                          .host = "g5.48xlarge"},
                         nodes, gpus);
}

Result<Cluster> MakeG6(int nodes, std::optional<int> gpus) {
  return MakePcieCluster({.device = "l4-24gb",
                          .gpus = 8,
                          .pcie = "pcie4-host",
                          .nic = "ena-100g",
                          .host = "g6.48xlarge"},
                         nodes, gpus);
}

Result<Cluster> MakePcieA40(int nodes, std::optional<int> gpus) {
  return MakePcieCluster(PcieServer("a40-48gb"), nodes, gpus);
}

Result<Cluster> MakePcieA100(int nodes, std::optional<int> gpus) {
  return MakePcieCluster(PcieServer("a100-pcie-80gb"), nodes, gpus);
}

Result<Cluster> MakePcieH100(int nodes, std::optional<int> gpus) {
  return MakePcieCluster(PcieServer("h100-pcie-80gb"), nodes, gpus);
}

Result<Cluster> MakePcieL40s(int nodes, std::optional<int> gpus) {
  return MakePcieCluster(PcieServer("l40s-48gb"), nodes, gpus);
}

}  // namespace tessera
