#include <cmath>
#include <numeric>

#include "costmodel/collective/algorithms.h"

namespace tessera {
namespace {

bool IsExchange(CommKind kind) {
  return kind == CommKind::kAllToAll || kind == CommKind::kRedistribute;
}

// Every rank to every other: the receiver's chunk, or the sender's own.
Round EveryPair(int n, bool receivers_chunk, bool reduce) {
  Round round;
  round.modulus = n;
  round.reduce = reduce;
  for (int from = 0; from < n; ++from) {
    for (int to = 0; to < n; ++to) {
      if (from == to) continue;
      round.sends.push_back({.from = from,
                             .to = to,
                             .base = 0,
                             .first = receivers_chunk ? to : from,
                             .count = 1});
    }
  }
  return round;
}

// More ranks than kMostExact have pairs by the million, all alike: each rank
// sends to kSample others in place of all. They are the same steps ahead of
// every rank, so that all receive alike: of each of so many equal stretches of
// steps one, by the golden ratio's multiples modulo 1, which fill the stretches
// evenly (Weyl's equidistribution), so that whatever hosts and leaves have, as
// many steps as should be lead to each place in them.
constexpr int kMostExact = 1024;
constexpr int kSample = 255;
Round SampledPairs(int n) {
  constexpr double kGolden = 0.6180339887498949;
  std::vector<int> steps;
  for (int i = 0; i < kSample; ++i) {
    const double within = i * kGolden - std::floor(i * kGolden);
    steps.push_back(1 + static_cast<int>((i + within) * (n - 1) / kSample));
  }
  Round round;
  round.modulus = n;
  for (int from = 0; from < n; ++from) {
    for (int i = 0; i < kSample; ++i) {
      const int ahead = steps[static_cast<size_t>(i)];
      round.sends.push_back(
          {.from = from, .to = (from + ahead) % n, .first = i});
    }
  }
  return round;
}

}  // namespace

bool DirectApplies(CommKind kind, const CollectiveGroup& group) {
  return IsExchange(kind) || (RingApplies(kind, group) && group.shared_memory);
}

Rounds DirectRounds(CommKind kind, const CollectiveGroup& group) {
  const int n = group.ranks;
  Rounds out;
  out.chunks = n;
  out.own_share = 1.0 / n;
  out.owner.resize(static_cast<size_t>(n));
  std::iota(out.owner.begin(), out.owner.end(), 0);
  if (IsExchange(kind)) {
    if (n > kMostExact) {
      out.chunks = kSample + 1;
      out.rounds.push_back(SampledPairs(n));
      return out;
    }
    out.rounds.push_back(EveryPair(n, true, false));
    return out;
  }
  if (kind != CommKind::kAllGather) {
    out.rounds.push_back(EveryPair(n, true, true));
  }
  if (kind != CommKind::kReduceScatter) {
    out.rounds.push_back(EveryPair(n, false, false));
  }
  return out;
}

}  // namespace tessera
