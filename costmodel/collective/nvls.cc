#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/tree.h"

namespace tessera {
namespace {

constexpr int kTrees = 2;

// The k-th door of each host sums chunks k * per_rank, k * per_rank + 1, ...,
// or hands them out.
Round InSwitch(const CollectiveGroup& group, int per_rank, bool reduce) {
  Round round;
  round.modulus = per_rank;
  round.reduce = reduce;
  round.in_switch = true;
  for (size_t host = 0; host < group.nodes.size(); ++host) {
    for (int k = 0; k < static_cast<int>(group.doors[host].size()); ++k) {
      const int door = DoorRank(group, host, k);
      for (int rank : group.nodes[host]) {
        round.sends.push_back({.from = reduce ? rank : door,
                               .to = reduce ? door : rank,
                               .base = k * per_rank,
                               .first = 0,
                               .count = per_rank});
      }
    }
  }
  return round;
}

}  // namespace

bool NvlsApplies(CommKind kind, const CollectiveGroup& group) {
  return kind == CommKind::kAllReduce && group.in_switch &&
         group.nodes.size() == 1;
}

Rounds NvlsRounds(CommKind, const CollectiveGroup& group) {
  Rounds out;
  out.chunks = group.ranks;
  out.owner = group.nodes[0];
  out.rounds = {InSwitch(group, 1, true), InSwitch(group, 1, false)};
  return out;
}

bool NvlsTreeApplies(CommKind kind, const CollectiveGroup& group) {
  return TreeApplies(kind, group) && group.in_switch &&
         group.nodes.size() > 1 && MostRanks(group) > 1;
}

Rounds NvlsTreeRounds(CommKind, const CollectiveGroup& group) {
  Rounds out;
  const auto doors = static_cast<int>(group.doors[0].size());
  out.chunks = doors * kTrees;
  out.whole_pieces = true;
  for (int k = 0; k < doors; ++k) {
    out.owner.insert(out.owner.end(), kTrees, DoorRank(group, 0, k));
  }
  out.rounds.push_back(InSwitch(group, kTrees, true));
  for (Round& round : TreesAcrossHosts(group, kTrees)) {
    out.rounds.push_back(std::move(round));
  }
  out.rounds.push_back(InSwitch(group, kTrees, false));
  return out;
}

}  // namespace tessera
