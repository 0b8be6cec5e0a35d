#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/tree.h"

namespace tessera {
namespace {

constexpr int kTrees = 2;

// The k-th rank of each host sums chunks k * per_rank, k * per_rank + 1, ...,
// or hands them out.
Round InSwitch(const CollectiveGroup& group, int per_rank, bool reduce) {
  Round round;
  round.modulus = per_rank;
  round.reduce = reduce;
  round.in_switch = true;
  for (const std::vector<int>& node : group.nodes) {
    for (size_t k = 0; k < node.size(); ++k) {
      for (int rank : node) {
        round.sends.push_back({.from = reduce ? rank : node[k],
                               .to = reduce ? node[k] : rank,
                               .base = static_cast<int>(k) * per_rank,
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
         group.nodes.size() > 1 && group.nodes[0].size() > 1;
}

Rounds NvlsTreeRounds(CommKind, const CollectiveGroup& group) {
  Rounds out;
  out.chunks = static_cast<int>(group.nodes[0].size()) * kTrees;
  out.whole_pieces = true;
  for (int rank : group.nodes[0]) out.owner.insert(out.owner.end(), 2, rank);
  out.rounds.push_back(InSwitch(group, kTrees, true));
  const auto head = [&](size_t host, int chain) {
    return group.nodes[host][static_cast<size_t>(chain)];
  };
  for (Round& round : TreesAcrossHosts(group, kTrees, head)) {
    out.rounds.push_back(std::move(round));
  }
  out.rounds.push_back(InSwitch(group, kTrees, false));
  return out;
}

}  // namespace tessera
