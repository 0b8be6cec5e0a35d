#include "costmodel/collective/ring.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace tessera {
namespace {

// The position by which each ring leaves a host with these doors: the door of
// the ring before it or, where that is its own, of another.
std::vector<int> Exits(const std::vector<int>& doors) {
  const size_t rings = doors.size();
  std::vector<int> exits(rings);
  for (size_t r = 0; r < rings; ++r) exits[r] = doors[(r + rings - 1) % rings];
  for (size_t r = 0; r < rings; ++r) {
    for (size_t q = 0; exits[r] == doors[r] && q < rings; ++q) {
      if (exits[q] != doors[r] && exits[r] != doors[q]) {
        std::swap(exits[q], exits[r]);
      }
    }
  }
  return exits;
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

// Which of a host's orders each ring takes. A ring leaves a mesh by the rank
// before its door: of as many rings in a row as the host has ranks each does so
// by a rank of its own, as they would in any one order. (Augmenting paths; each
// ring begins with another order.)
std::vector<size_t> OrdersTaken(const std::vector<std::vector<int>>& orders,
                                const std::vector<int>& doors) {
  std::vector<size_t> taken(doors.size(), 0);
  if (orders.size() == 1) return taken;
  std::map<int, size_t> ring_by;  // the rank that it leaves by
  std::set<int> tried;
  const auto place = [&](const auto& self, size_t ring) -> bool {
    const int door = orders[0][static_cast<size_t>(doors[ring])];
    for (size_t i = 0; i < orders.size(); ++i) {
      const size_t k = (ring + i) % orders.size();
      const auto at = std::ranges::find(orders[k], door);
      const int exit =
          at == orders[k].begin() ? orders[k].back() : *std::prev(at);
      if (!tried.insert(exit).second) continue;
      const auto other = ring_by.find(exit);
      if (other != ring_by.end() && !self(self, other->second)) continue;
      ring_by[exit] = ring;
      taken[ring] = k;
      return true;
    }
    return false;
  };
  for (size_t ring = 0; ring < doors.size(); ++ring) {
    if (ring % orders[0].size() == 0) ring_by.clear();
    tried.clear();
    place(place, ring);
  }
  return taken;
}

}  // namespace

std::vector<std::vector<int>> RingOrders(const CollectiveGroup& group) {
  if (group.nodes.size() == 1) return group.node_rings[0];
  const size_t rings = group.doors[0].size();
  std::vector<std::vector<int>> orders(rings);
  for (size_t n = 0; n < group.nodes.size(); ++n) {
    const auto& of_host = group.node_rings[n];
    const std::vector<int> exits = Exits(group.doors[n]);
    const std::vector<size_t> taken = OrdersTaken(of_host, group.doors[n]);
    for (size_t ring = 0; ring < rings; ++ring) {
      // Rings enter even hosts at their own door and leave them at another's;
      // odd hosts the other way round. Then both ends of a crossing are doors
      // of one ring, hence on the same rail.
      std::vector<int> local = of_host[taken[ring]];
      const int enters = group.doors[n][ring];
      const int leaves = exits[ring];
      const int last = of_host[0][static_cast<size_t>(leaves)];
      std::ranges::rotate(
          local,
          std::ranges::find(local, of_host[0][static_cast<size_t>(enters)]));
      if (!group.meshed[n] && leaves != enters) {
        const auto at = std::ranges::find(local, last);
        std::rotate(at, at + 1, local.end());
      }
      if (n % 2 == 1) std::ranges::reverse(local);
      orders[ring].insert(orders[ring].end(), local.begin(), local.end());
    }
  }
  return orders;
}

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
