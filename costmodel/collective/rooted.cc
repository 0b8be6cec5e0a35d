#include <algorithm>
#include <numeric>

#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/ring.h"

namespace tessera {
namespace {

// Along each ring, cut before the root (a broadcast) or behind it (a reduce).
Rounds AlongRings(const CollectiveGroup& group, bool reduces) {
  std::vector<std::vector<int>> orders = RingOrders(group);
  for (std::vector<int>& order : orders) {
    std::ranges::rotate(order, std::ranges::find(order, 0) + (reduces ? 1 : 0));
  }
  Rounds out;
  out.chunks = static_cast<int>(orders.size());
  out.owner.resize(orders.size(), 0);
  out.apart = true;
  for (size_t link = 1; link < static_cast<size_t>(group.ranks); ++link) {
    Round& round = out.rounds.emplace_back();
    round.reduce = reduces;
    for (size_t ring = 0; ring < orders.size(); ++ring) {
      round.sends.push_back({.from = orders[ring][link - 1],
                             .to = orders[ring][link],
                             .base = static_cast<int>(ring)});
    }
  }
  return out;
}

}  // namespace

bool RootedApplies(CommKind kind, const CollectiveGroup&) {
  return kind == CommKind::kScatter || kind == CommKind::kBroadcast ||
         kind == CommKind::kGather || kind == CommKind::kReduce;
}

Rounds RootedRounds(CommKind kind, const CollectiveGroup& group) {
  if (kind == CommKind::kBroadcast || kind == CommKind::kReduce) {
    return AlongRings(group, kind == CommKind::kReduce);
  }
  const int n = group.ranks;
  Rounds out;
  out.chunks = n;
  out.owner.resize(static_cast<size_t>(n));
  std::iota(out.owner.begin(), out.owner.end(), 0);
  Round round;
  round.modulus = n;
  for (int rank = 1; rank < n; ++rank) {
    const bool scatters = kind == CommKind::kScatter;
    round.sends.push_back({.from = scatters ? 0 : rank,
                           .to = scatters ? rank : 0,
                           .base = 0,
                           .first = rank,
                           .count = 1});
  }
  out.rounds.push_back(std::move(round));
  return out;
}

}  // namespace tessera
