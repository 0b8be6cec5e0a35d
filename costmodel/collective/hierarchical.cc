#include <algorithm>
#include <utility>

#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/sampled_steps.h"

namespace tessera {
namespace {

// r rings in each of m hosts of g ranks. Chunk ((k * g) + j) * m + a belongs to
// the rank at position j of ring k in host a.
struct Levels {
  int rings = 0;
  int local = 0;  // g
  int hosts = 0;  // m
};

Levels LevelsOf(const CollectiveGroup& group) {
  size_t rings = group.node_rings[0].size();
  for (const auto& node : group.node_rings) {
    rings = std::min(rings, node.size());
  }
  return {static_cast<int>(rings), static_cast<int>(group.nodes[0].size()),
          static_cast<int>(group.nodes.size())};
}

int RankAt(const CollectiveGroup& group, int host, int ring, int position) {
  return group.node_rings[static_cast<size_t>(host)][static_cast<size_t>(ring)]
                         [static_cast<size_t>(position)];
}

// Rings within every host, over blocks of m chunks.
Round WithinHosts(const CollectiveGroup& group, const Levels& shape,
                  bool reduce) {
  const int g = shape.local;
  const int m = shape.hosts;
  Round round;
  round.repeat = g - 1;
  round.shift = -m;
  round.modulus = g * m;
  round.reduce = reduce;
  for (int a = 0; a < m; ++a) {
    for (int k = 0; k < shape.rings; ++k) {
      for (int p = 0; p < g; ++p) {
        round.sends.push_back({.from = RankAt(group, a, k, p),
                               .to = RankAt(group, a, k, (p + 1) % g),
                               .base = k * g * m,
                               .first = (reduce ? (p + g - 1) % g : p) * m,
                               .count = m});
      }
    }
  }
  return round;
}

// For every ring and position a ring across the hosts, over single chunks.
Round AcrossHosts(const CollectiveGroup& group, const Levels& shape,
                  bool reduce) {
  const int g = shape.local;
  const int m = shape.hosts;
  Round round;
  round.repeat = m - 1;
  round.shift = -1;
  round.modulus = m;
  round.reduce = reduce;
  for (int k = 0; k < shape.rings; ++k) {
    for (int j = 0; j < g; ++j) {
      for (int a = 0; a < m; ++a) {
        round.sends.push_back({.from = RankAt(group, a, k, j),
                               .to = RankAt(group, (a + 1) % m, k, j),
                               .base = (k * g + j) * m,
                               .first = reduce ? (a + m - 1) % m : a,
                               .count = 1});
      }
    }
  }
  return round;
}

// Several ranks on each of several hosts, as many on all.
bool HasTwoLevels(const CollectiveGroup& group) {
  const size_t local = group.nodes[0].size();
  return group.nodes.size() > 1 && local > 1 &&
         std::ranges::all_of(group.nodes, [&](const auto& node) {
           return node.size() == local;
         });
}

}  // namespace

bool HierarchicalApplies(CommKind kind, const CollectiveGroup& group) {
  return RingApplies(kind, group) && HasTwoLevels(group);
}

Rounds HierarchicalRounds(CommKind kind, const CollectiveGroup& group) {
  const Levels shape = LevelsOf(group);
  Rounds out;
  out.chunks = shape.rings * shape.local * shape.hosts;
  out.own_share = 1.0 / group.ranks;
  for (int k = 0; k < shape.rings; ++k) {
    for (int j = 0; j < shape.local; ++j) {
      for (int a = 0; a < shape.hosts; ++a) {
        out.owner.push_back(RankAt(group, a, k, j));
      }
    }
  }
  if (kind != CommKind::kAllGather) {
    out.rounds.push_back(WithinHosts(group, shape, true));
    out.rounds.push_back(AcrossHosts(group, shape, true));
  }
  if (kind != CommKind::kReduceScatter) {
    out.rounds.push_back(AcrossHosts(group, shape, false));
    out.rounds.push_back(WithinHosts(group, shape, false));
  }
  return out;
}

bool HierarchicalExchangeApplies(CommKind kind, const CollectiveGroup& group) {
  return (kind == CommKind::kAllToAll || kind == CommKind::kRedistribute) &&
         HasTwoLevels(group);
}

// Chunk j * m + a is for the rank at index j of host a; where the hosts ahead
// are a sample, for that of the a-th of them, or of its own host.
Rounds HierarchicalExchangeRounds(CommKind, const CollectiveGroup& group) {
  const int g = static_cast<int>(group.nodes[0].size());
  const int hosts = static_cast<int>(group.nodes.size());
  const auto rank = [&](int host, int index) {
    return group.nodes[static_cast<size_t>(host)][static_cast<size_t>(index)];
  };
  const bool sampled =
      group.ranks > kMostExactRanks && hosts > kSampledSteps + 1;
  const std::vector<int> steps =
      sampled ? SampledSteps(hosts) : std::vector<int>();
  const int m = sampled ? kSampledSteps + 1 : hosts;
  Rounds out;
  out.chunks = g * m;
  out.own_share = 1.0 / group.ranks;
  Round within;
  within.modulus = out.chunks;
  Round across = within;
  across.copies = g;
  for (int j = 0; j < g; ++j) {
    for (int a = 0; a < hosts; ++a) {
      out.owner.push_back(rank(a, j));
      for (int to = 0; to < g; ++to) {
        if (to == j) continue;
        within.sends.push_back({.from = rank(a, j),
                                .to = rank(a, to),
                                .first = to * m,
                                .count = m});
      }
      for (int i = 0; i < kSampledSteps && sampled; ++i) {
        const int to = (a + steps[static_cast<size_t>(i)]) % hosts;
        across.sends.push_back(
            {.from = rank(a, j), .to = rank(to, j), .first = j * m + i});
      }
      for (int to = 0; to < hosts && !sampled; ++to) {
        if (to == a) continue;
        across.sends.push_back(
            {.from = rank(a, j), .to = rank(to, j), .first = j * m + to});
      }
    }
  }
  out.rounds = {std::move(within), std::move(across)};
  return out;
}

}  // namespace tessera
