#include "planner/topology/fabric.h"
#include "planner/topology/networks.h"

namespace tessera {

void ConnectDragonfly(Cluster& cluster,
                      const std::vector<std::vector<VertexId>>& nics,
                      int nic_link, int oversubscription) {
  const std::vector<VertexId> leaves = AddLeaves(cluster, nics, nic_link);
  if (leaves.size() == 1) return;
  const int trunk = AddTrunk(cluster, nic_link,
                             NicsPerLeaf(nics) / oversubscription /
                                 static_cast<double>(leaves.size() - 1));
  for (size_t a = 0; a < leaves.size(); ++a) {
    for (size_t b = a + 1; b < leaves.size(); ++b) {
      Connect(cluster, leaves[a], leaves[b], trunk);
    }
  }
}

}  // namespace tessera
