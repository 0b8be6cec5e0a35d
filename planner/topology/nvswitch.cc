#include "planner/topology/nvswitch.h"

#include <vector>

#include "planner/topology/fabric.h"
#include "planner/topology/hardware.h"

namespace tessera {

Cluster MakeNvSwitchCluster(const NvSwitchNode& node, int nodes,
                            std::optional<int> gpus_per_node) {
  Cluster cluster;
  cluster.hosts = {HostOf(node.host)};
  const int device = UseDeviceType(cluster, node.device);
  const int nvlink = UseLinkType(cluster, node.nvlink);
  const int pcie = UseLinkType(cluster, node.pcie);
  const int gpus = gpus_per_node.value_or(node.gpus);
  std::vector<std::vector<VertexId>> nics(static_cast<size_t>(nodes));
  for (int n = 0; n < nodes; ++n) {
    const VertexId nvswitch =
        AddVertex(cluster, VertexKind::kSwitch, InNode(n, "nvswitch"));
    VertexId bridge;
    for (int g = 0; g < gpus; ++g) {
      const DeviceId id = AddDevice(cluster, device, n, InNode(n, "gpu", g));
      const VertexId gpu = cluster.devices[id.index()].vertex;
      Connect(cluster, gpu, nvswitch, nvlink);
      if (g % node.gpus_per_pcie_switch == 0) {
        bridge = AddVertex(cluster, VertexKind::kBridge,
                           InNode(n, "pcie", g / node.gpus_per_pcie_switch));
      }
      Connect(cluster, gpu, bridge, pcie);
      if (g % node.gpus_per_nic == 0) {
        auto& rails = nics[static_cast<size_t>(n)];
        rails.push_back(AddVertex(cluster, VertexKind::kNic,
                                  InNode(n, "nic", g / node.gpus_per_nic)));
        Connect(cluster, rails.back(), bridge, pcie);
      }
    }
  }
  ConnectRails(cluster, nics, node.nic);
  return cluster;
}

}  // namespace tessera
