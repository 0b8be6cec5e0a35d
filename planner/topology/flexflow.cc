// The two clusters of "Beyond Data and Model Parallelism for Deep Neural
// Networks" (Jia et al., MLSys 2019), section 8.1: nodes of four P100 joined
// by NVLink with 100 Gb/s EDR InfiniBand; nodes of four K80, adjacent pairs on
// a private PCIe switch and all on a shared one, with 56 Gb/s InfiniBand.

#include <array>
#include <vector>

#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/rows.h"

namespace tessera {

Result<Cluster> MakeP100Edr(int nodes, std::optional<int> gpus_per_node) {
  Cluster cluster;
  cluster.hosts = {HostOf("p100-edr")};
  const int gpus = gpus_per_node.value_or(4);
  const int device = UseDeviceType(cluster, "p100-sxm2-16gb");
  const int nvlink = UseLinkType(cluster, "nvlink1");
  const int pcie = UseLinkType(cluster, "pcie3-x16");
  std::vector<std::vector<VertexId>> nics;
  for (int n = 0; n < nodes; ++n) {
    const VertexId cpu =
        AddVertex(cluster, VertexKind::kBridge, InNode(n, "cpu"));
    std::vector<VertexId> vertices;
    for (int g = 0; g < gpus; ++g) {
      const DeviceId id = AddDevice(cluster, device, n, InNode(n, "gpu", g));
      const VertexId gpu = cluster.devices[id.index()].vertex;
      Connect(cluster, gpu, cpu, pcie);
      // Three of a P100's four NVLinks reach its three peers.
      for (VertexId peer : vertices) Connect(cluster, peer, gpu, nvlink);
      vertices.push_back(gpu);
    }
    nics.push_back({AddVertex(cluster, VertexKind::kNic, InNode(n, "nic"))});
    Connect(cluster, nics.back()[0], cpu, pcie);
  }
  ConnectRails(cluster, nics, "ib-edr");
  return cluster;
}

Result<Cluster> MakeK80Fdr(int nodes, std::optional<int> gpus_per_node) {
  Cluster cluster;
  cluster.hosts = {HostOf("k80-fdr")};
  const int gpus = gpus_per_node.value_or(4);
  const int device = UseDeviceType(cluster, "k80-gk210-12gb");
  const int pcie = UseLinkType(cluster, "pcie3-x16");
  std::vector<std::vector<VertexId>> nics;
  for (int n = 0; n < nodes; ++n) {
    const VertexId shared =
        AddVertex(cluster, VertexKind::kBridge, InNode(n, "pcie-shared"));
    VertexId pair;
    for (int g = 0; g < gpus; ++g) {
      if (g % 2 == 0) {
        pair = AddVertex(cluster, VertexKind::kBridge,
                         InNode(n, "pcie-pair", g / 2));
        Connect(cluster, pair, shared, pcie);
      }
      const DeviceId id = AddDevice(cluster, device, n, InNode(n, "gpu", g));
      Connect(cluster, cluster.devices[id.index()].vertex, pair, pcie);
    }
    nics.push_back({AddVertex(cluster, VertexKind::kNic, InNode(n, "nic"))});
    Connect(cluster, nics.back()[0], shared, pcie);
  }
  ConnectRails(cluster, nics, "ib-fdr");
  return cluster;
}

}  // namespace tessera
