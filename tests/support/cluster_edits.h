#pragma once
// Clusters of presets, edited by the names of their vertices.

#include <algorithm>
#include <string_view>

#include "planner/base/check.h"
#include "planner/ir/cluster.h"

namespace tessera::testing {

inline VertexId VertexNamed(const Cluster& cluster, std::string_view name) {
  const auto at = std::ranges::find(cluster.vertices, name, &Vertex::name);
  TESSERA_CHECK(at != cluster.vertices.end()) << name;
  return VertexId(at - cluster.vertices.begin());
}

// Erases the links from and to a vertex. Their type, if they have one.
inline int EraseLinksOf(VertexId vertex, Cluster& cluster) {
  int type = 0;
  std::erase_if(cluster.links, [&](const Link& link) {
    if (link.from != vertex && link.to != vertex) return false;
    type = link.type;
    return true;
  });
  return type;
}

// Links in both directions.
inline void Join(VertexId a, VertexId b, int type, Cluster& cluster) {
  cluster.links.push_back({a, b, type});
  cluster.links.push_back({b, a, type});
}

}  // namespace tessera::testing
