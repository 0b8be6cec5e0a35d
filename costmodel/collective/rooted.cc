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

// Along a chain of links that do not close to a ring: from the root both ways,
// or to it (a reduce).
Rounds AlongChain(const CollectiveGroup& group, bool reduces) {
  const std::vector<int> order = RingOrders(group)[0];
  const auto n = static_cast<int>(order.size());
  const auto root =
      static_cast<int>(std::ranges::find(order, 0) - order.begin());
  const auto rank = [&](int place) {
    return order[static_cast<size_t>(place)];
  };
  Rounds out;
  out.owner = {0};
  const int longest = std::max(root, n - 1 - root);
  for (int i = 0; i < longest; ++i) {
    Round& round = out.rounds.emplace_back();
    round.reduce = reduces;
    // So many links away from the root.
    const int away = reduces ? longest - 1 - i : i;
    const auto send = [&](int near, int far) {
      if (far < 0 || far >= n) return;
      round.sends.push_back({.from = rank(reduces ? far : near),
                             .to = rank(reduces ? near : far)});
    };
    send(root + away, root + away + 1);
    send(root - away, root - away - 1);
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
    const bool reduces = kind == CommKind::kReduce;
    return group.open_chain ? AlongChain(group, reduces)
                            : AlongRings(group, reduces);
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
