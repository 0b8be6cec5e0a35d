#include <cmath>

#include "planner/topology/fabric.h"
#include "planner/topology/networks.h"

namespace tessera {
namespace {

// `count` in `dimensions` factors, as near to each other as divisors allow, the
// largest first.
std::vector<int> Sides(int count, int dimensions) {
  if (dimensions == 1) return {count};
  auto side =
      static_cast<int>(std::ceil(std::pow(count, 1.0 / dimensions) - 1e-9));
  while (count % side != 0) ++side;
  std::vector<int> sides = {side};
  for (int rest : Sides(count / side, dimensions - 1)) sides.push_back(rest);
  return sides;
}

}  // namespace

void ConnectTorus(Cluster& cluster,
                  const std::vector<std::vector<VertexId>>& nics, int nic_link,
                  int dimensions) {
  const auto nodes = static_cast<int>(nics.size());
  std::vector<VertexId> routers;
  for (int node = 0; node < nodes; ++node) {
    routers.push_back(AddVertex(cluster, VertexKind::kSwitch,
                                "router" + std::to_string(node)));
    for (VertexId nic : nics[static_cast<size_t>(node)]) {
      Connect(cluster, nic, routers.back(), nic_link);
    }
  }
  const int trunk =
      AddTrunk(cluster, nic_link, static_cast<double>(nics.front().size()));
  // Nodes count along the last dimension first.
  int stride = nodes;
  for (int side : Sides(nodes, dimensions)) {
    stride /= side;
    if (side == 1) continue;
    for (int node = 0; node < nodes; ++node) {
      const int at = node / stride % side;
      if (side == 2 && at == 1) continue;  // one cable, not two
      const int next = node + ((at + 1) % side - at) * stride;
      Connect(cluster, routers[static_cast<size_t>(node)],
              routers[static_cast<size_t>(next)], trunk);
    }
  }
}

}  // namespace tessera
