#include "costmodel/collective/tree.h"

#include <algorithm>

#include "costmodel/collective/algorithms.h"

namespace tessera {
namespace {

// Every host's rank `index` of its chain, which begins at its door.
int ChainRank(const CollectiveGroup& group, size_t host, int chain, int index) {
  const std::vector<int>& order = group.node_rings[host][0];
  const int door = group.doors[host][static_cast<size_t>(chain)];
  return order[static_cast<size_t>(door + index) % order.size()];
}

// Within one host a chain that does not close has no other beginning.
int ChainsOf(const CollectiveGroup& group) {
  return group.nodes.size() == 1 ? 1 : static_cast<int>(group.doors[0].size());
}

// The sends along all chains between positions `from` and `to`, on hosts with
// as many ranks.
Round AlongChains(const CollectiveGroup& group, int trees, int from, int to,
                  bool reduce) {
  const int chains = ChainsOf(group);
  Round round;
  round.modulus = trees;
  round.reduce = reduce;
  for (size_t host = 0; host < group.nodes.size(); ++host) {
    if (std::max(from, to) >= std::ssize(group.nodes[host])) continue;
    for (int chain = 0; chain < chains; ++chain) {
      round.sends.push_back({.from = ChainRank(group, host, chain, from),
                             .to = ChainRank(group, host, chain, to),
                             .base = chain * trees,
                             .first = 0,
                             .count = trees});
    }
  }
  return round;
}

Rounds TreeRounds(const CollectiveGroup& group, int trees) {
  const int local = MostRanks(group);
  Rounds out;
  out.chunks = ChainsOf(group) * trees;
  out.whole_pieces = true;
  for (int c = 0; c < out.chunks; ++c) {
    out.owner.push_back(DoorRank(group, 0, c / trees));
  }
  for (int i = local - 1; i > 0; --i) {
    out.rounds.push_back(AlongChains(group, trees, i, i - 1, true));
  }
  for (Round& round : TreesAcrossHosts(group, trees)) {
    out.rounds.push_back(std::move(round));
  }
  for (int i = 0; i + 1 < local; ++i) {
    out.rounds.push_back(AlongChains(group, trees, i, i + 1, false));
  }
  return out;
}

// The parent of host `i` of `hosts` in NCCL's binary tree, where odd hosts are
// leaves; -1 for the root, host 0.
int BinaryParent(int i, int hosts) {
  if (i == 0) return -1;
  const int lowest = i & -i;
  const int up = (i ^ lowest) | (lowest << 1);
  return up < hosts ? up : i ^ lowest;
}

// The same of tree `tree`: the second is the first mirrored, or shifted by one
// where the number of hosts is odd, so that its inner hosts but for host 0 are
// leaves of the first.
int Parent(int tree, int i, int hosts) {
  if (tree == 0) return BinaryParent(i, hosts);
  if (hosts % 2 == 0) {
    const int parent = BinaryParent(hosts - 1 - i, hosts);
    return parent < 0 ? -1 : hosts - 1 - parent;
  }
  const int parent = BinaryParent((i + hosts - 1) % hosts, hosts);
  return parent < 0 ? -1 : (parent + 1) % hosts;
}

}  // namespace

int DoorRank(const CollectiveGroup& group, size_t host, int door) {
  return ChainRank(group, host, door, 0);
}

int MostRanks(const CollectiveGroup& group) {
  int most = 0;
  for (const auto& ranks : group.nodes) {
    most = std::max(most, static_cast<int>(ranks.size()));
  }
  return most;
}

std::vector<Round> TreesAcrossHosts(const CollectiveGroup& group, int trees) {
  const int hosts = static_cast<int>(group.nodes.size());
  const int chains = static_cast<int>(group.doors[0].size());
  std::vector<Round> up;  // by the sender's depth, less one
  for (int tree = 0; tree < trees; ++tree) {
    for (int host = 0; host < hosts; ++host) {
      const int parent = Parent(tree, host, hosts);
      if (parent < 0) continue;
      size_t depth = 0;
      for (int at = parent; at >= 0; at = Parent(tree, at, hosts)) ++depth;
      if (up.size() < depth) up.resize(depth);
      for (int chain = 0; chain < chains; ++chain) {
        up[depth - 1].sends.push_back(
            {.from = DoorRank(group, static_cast<size_t>(host), chain),
             .to = DoorRank(group, static_cast<size_t>(parent), chain),
             .base = chain * trees + tree});
      }
    }
  }
  std::vector<Round> down = up;
  for (Round& round : down) {
    for (Send& send : round.sends) std::swap(send.from, send.to);
  }
  for (Round& round : up) round.reduce = true;
  std::ranges::reverse(up);
  up.insert(up.end(), down.begin(), down.end());
  return up;
}

bool TreeApplies(CommKind kind, const CollectiveGroup& group) {
  return kind == CommKind::kAllReduce &&
         (group.nodes.size() > 1 || group.open_chain);
}

Rounds DoubleTreeRounds(CommKind, const CollectiveGroup& group) {
  return TreeRounds(group, 2);
}

Rounds SingleTreeRounds(CommKind, const CollectiveGroup& group) {
  return TreeRounds(group, 1);
}

}  // namespace tessera
