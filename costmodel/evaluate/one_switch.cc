#include "costmodel/evaluate/one_switch.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "costmodel/link/router.h"

namespace tessera {

std::optional<Cluster> OnOneSwitch(const Cluster& cluster) {
  const Router router(cluster);
  Cluster out = cluster;
  out.links.clear();
  std::optional<VertexId> hub;
  // Of each host: where its links end, in their order.
  std::vector<std::vector<VertexId>> ends(
      static_cast<size_t>(cluster.num_nodes()));
  std::set<std::pair<VertexId, bool>> joined;
  for (const Link& link : cluster.links) {
    const int from = router.NodeOf(link.from);
    const int to = router.NodeOf(link.to);
    if (from < 0 && to < 0) continue;
    if (from == to) {
      out.links.push_back(link);
      continue;
    }
    if (from >= 0 && to >= 0) return std::nullopt;
    const bool leaves = from >= 0;
    const VertexId end = leaves ? link.to : link.from;
    if (!hub) hub = end;
    ends[static_cast<size_t>(leaves ? from : to)].push_back(end);
    if (!joined.emplace(leaves ? link.from : link.to, leaves).second) {
      return std::nullopt;
    }
    Link& direct = out.links.emplace_back(link);
    (leaves ? direct.to : direct.from) = *hub;
  }
  const bool same = std::ranges::all_of(
      ends, [&](const std::vector<VertexId>& e) { return e == ends[0]; });
  if (same) return std::nullopt;
  return out;
}

}  // namespace tessera
