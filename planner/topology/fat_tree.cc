#include "planner/topology/fabric.h"
#include "planner/topology/networks.h"

namespace tessera {

void ConnectFatTree(Cluster& cluster,
                    const std::vector<std::vector<VertexId>>& nics,
                    int nic_link, int oversubscription) {
  const std::vector<VertexId> leaves = AddLeaves(cluster, nics, nic_link);
  if (leaves.size() == 1) return;
  const int trunk =
      AddTrunk(cluster, nic_link, NicsPerLeaf(nics) / oversubscription);
  const VertexId spine = AddVertex(cluster, VertexKind::kSwitch, "spine");
  for (VertexId leaf : leaves) Connect(cluster, leaf, spine, trunk);
}

}  // namespace tessera
