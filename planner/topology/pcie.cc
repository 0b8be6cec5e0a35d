// Two TITAN RTX in a workstation, with and without the NVLink bridge (two
// NVLink 2 links, 50 GB/s a direction: TITAN RTX NVLink Bridge product page,
// 2018).

#include <vector>

#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"
#include "planner/topology/rows.h"

namespace tessera {
namespace {

Cluster MakePair(int nodes, int gpus, bool nvlink_bridge) {
  Cluster cluster;
  cluster.host = HostOf("titan-rtx-pair");
  const int device = UseDeviceType(cluster, "titan-rtx-24gb");
  const int host = UseLinkType(cluster, "pcie3-host");
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
    if (nvlink_bridge && gpus == 2) {
      Connect(cluster, vertices[0], vertices[1],
              UseLinkType(cluster, "nvlink2-x2"));
    }
    nics.push_back({AddVertex(cluster, VertexKind::kNic, InNode(n, "nic"))});
    Connect(cluster, nics.back()[0], cpu, host);
  }
  ConnectRails(cluster, nics, "ethernet-10g");
  return cluster;
}

}  // namespace

Result<Cluster> MakeTitanRtxPair(int nodes, std::optional<int> gpus) {
  return MakePair(nodes, gpus.value_or(2), true);
}

Result<Cluster> MakeTitanRtxPairWithoutNvLink(int nodes,
                                              std::optional<int> gpus) {
  return MakePair(nodes, gpus.value_or(2), false);
}

}  // namespace tessera
