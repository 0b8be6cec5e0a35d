#include <algorithm>
#include <vector>

#include "planner/topology/fabric.h"
#include "planner/topology/networks.h"

namespace tessera {
namespace {

// `count` as a product of `dimensions` sides of at most `most`, the largest
// first: each as small as divisors allow. Empty where there is none.
std::vector<int> Sides(int count, int dimensions, int most) {
  if (dimensions == 1) {
    return count <= most ? std::vector{count} : std::vector<int>();
  }
  for (int side = 1; side <= std::min(count, most); ++side) {
    if (count % side != 0) continue;
    std::vector<int> sides = Sides(count / side, dimensions - 1, side);
    if (sides.empty()) continue;
    sides.insert(sides.begin(), side);
    return sides;
  }
  return {};
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
  for (const int side : Sides(nodes, dimensions, nodes)) {
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
