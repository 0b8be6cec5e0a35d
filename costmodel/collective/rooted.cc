#include <numeric>

#include "costmodel/collective/algorithms.h"

namespace tessera {

bool RootedApplies(CommKind kind, const CollectiveGroup&) {
  return kind == CommKind::kScatter || kind == CommKind::kBroadcast ||
         kind == CommKind::kGather || kind == CommKind::kReduce;
}

Rounds RootedRounds(CommKind kind, const CollectiveGroup& group) {
  const int n = group.ranks;
  Rounds out;
  out.chunks = n;
  out.owner.resize(static_cast<size_t>(n));
  std::iota(out.owner.begin(), out.owner.end(), 0);
  if (kind == CommKind::kScatter || kind == CommKind::kGather) {
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
  for (int link = 1; link < n; ++link) {
    const bool reduces = kind == CommKind::kReduce;
    Round round;
    round.modulus = n;
    round.reduce = reduces;
    round.sends.push_back({.from = reduces ? n - link : link - 1,
                           .to = reduces ? n - link - 1 : link,
                           .base = 0,
                           .first = 0,
                           .count = n});
    out.rounds.push_back(std::move(round));
  }
  return out;
}

}  // namespace tessera
