#include "planner/topology/fabric.h"
#include "planner/topology/networks.h"

namespace tessera {

void ConnectRailNetwork(Cluster& cluster,
                        const std::vector<std::vector<VertexId>>& nics,
                        int nic_link, int oversubscription) {
  const auto nodes = static_cast<double>(nics.size());
  std::vector<VertexId> leaves;
  for (size_t rail = 0; rail < nics.front().size(); ++rail) {
    leaves.push_back(
        AddVertex(cluster, VertexKind::kSwitch, "leaf" + std::to_string(rail)));
    for (const auto& node : nics) {
      Connect(cluster, node[rail], leaves.back(), nic_link);
    }
  }
  if (leaves.size() == 1) return;
  const int trunk = AddTrunk(cluster, nic_link, nodes / oversubscription);
  const VertexId spine = AddVertex(cluster, VertexKind::kSwitch, "spine");
  for (VertexId leaf : leaves) Connect(cluster, leaf, spine, trunk);
}

}  // namespace tessera
