#include <algorithm>

#include "costmodel/collective/algorithms.h"

namespace tessera {
namespace {

// The orders in which the rings visit all ranks.
std::vector<std::vector<int>> RingOrders(const CollectiveGroup& group) {
  if (group.nodes.size() == 1) return group.node_rings[0];
  size_t widest = 0;
  for (const auto& node : group.nodes) widest = std::max(widest, node.size());
  std::vector<std::vector<int>> orders(widest);
  for (size_t ring = 0; ring < widest; ++ring) {
    for (size_t n = 0; n < group.nodes.size(); ++n) {
      // Ring r enters even hosts at their r-th rank and leaves them at the one
      // before it; odd hosts the other way round. Then both ends of a crossing
      // have the same local index, hence the same rail.
      std::vector<int> local = group.node_rings[n][0];
      std::ranges::rotate(
          local, local.begin() + static_cast<int64_t>(ring % local.size()));
      if (n % 2 == 1) std::ranges::reverse(local);
      orders[ring].insert(orders[ring].end(), local.begin(), local.end());
    }
  }
  return orders;
}

// Ring k's position p owns chunk k * n + p. A reduction of that chunk starts at
// position p + 1 and ends at p, n - 1 steps later; a gather starts at p.
Round RingRound(const std::vector<std::vector<int>>& orders, int n,
                bool reduce) {
  Round round;
  round.repeat = n - 1;
  round.shift = -1;
  round.modulus = n;
  round.reduce = reduce;
  for (size_t k = 0; k < orders.size(); ++k) {
    for (int p = 0; p < n; ++p) {
      Send send;
      send.from = orders[k][static_cast<size_t>(p)];
      send.to = orders[k][static_cast<size_t>((p + 1) % n)];
      send.base = static_cast<int>(k) * n;
      send.first = reduce ? (p + n - 1) % n : p;
      round.sends.push_back(send);
    }
  }
  return round;
}

}  // namespace

bool RingApplies(CommKind kind, const CollectiveGroup&) {
  return kind == CommKind::kAllReduce || kind == CommKind::kAllGather ||
         kind == CommKind::kReduceScatter;
}

Rounds RingRounds(CommKind kind, const CollectiveGroup& group) {
  const std::vector<std::vector<int>> orders = RingOrders(group);
  Rounds out;
  out.own_share = 1.0 / group.ranks;
  out.chunks = static_cast<int>(orders.size()) * group.ranks;
  for (const auto& order : orders) {
    out.owner.insert(out.owner.end(), order.begin(), order.end());
  }
  if (kind != CommKind::kAllGather) {
    out.rounds.push_back(RingRound(orders, group.ranks, true));
  }
  if (kind != CommKind::kReduceScatter) {
    out.rounds.push_back(RingRound(orders, group.ranks, false));
  }
  return out;
}

}  // namespace tessera
