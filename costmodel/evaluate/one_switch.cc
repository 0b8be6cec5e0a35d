#include "costmodel/evaluate/one_switch.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "costmodel/link/router.h"

namespace tessera {

std::optional<Cluster> OnOneSwitch(const Cluster& cluster) {
  const Router router(cluster);
  // Of each host: where its links to the network end, in their order.
  std::vector<std::vector<VertexId>> ends(
      static_cast<size_t>(cluster.num_nodes()));
  std::set<std::pair<VertexId, bool>> joined;
  for (const Link& link : cluster.links) {
    const int from = router.NodeOf(link.from);
    const int to = router.NodeOf(link.to);
    if (from == to) continue;
    if (from >= 0 && to >= 0) return std::nullopt;
    const bool leaves = from >= 0;
    ends[static_cast<size_t>(leaves ? from : to)].push_back(leaves ? link.to
                                                                   : link.from);
    if (!joined.emplace(leaves ? link.from : link.to, leaves).second) {
      return std::nullopt;
    }
  }
  const bool same = std::ranges::all_of(
      ends, [&](const std::vector<VertexId>& e) { return e == ends[0]; });
  if (same) return std::nullopt;

  Cluster out = cluster;
  std::erase_if(out.links, [&](const Link& link) {
    return router.NodeOf(link.from) < 0 && router.NodeOf(link.to) < 0;
  });
  const auto ended = std::ranges::find_if(
      ends, [](const std::vector<VertexId>& e) { return !e.empty(); });
  const VertexId hub = ended->front();
  for (Link& link : out.links) {
    if (router.NodeOf(link.from) < 0) link.from = hub;
    if (router.NodeOf(link.to) < 0) link.to = hub;
  }
  return out;
}

}  // namespace tessera
