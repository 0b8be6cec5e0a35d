#include <numeric>
#include <vector>

#include "costmodel/collective/algorithms.h"
#include "costmodel/collective/sampled_steps.h"

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

// The same by a sample of as many sends as all have chunks but one, the rank's
// own.
Round SampledPairs(int n, bool reduce) {
  const std::vector<int> steps = SampledSteps(n);
  Round round;
  round.modulus = n;
  round.reduce = reduce;
  for (int from = 0; from < n; ++from) {
    for (int i = 0; i < kSampledSteps; ++i) {
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
  const bool sampled = n > kMostExactRanks;
  if (sampled) out.chunks = kSampledSteps + 1;
  const auto add = [&](bool receivers_chunk, bool reduce) {
    out.rounds.push_back(sampled ? SampledPairs(n, reduce)
                                 : EveryPair(n, receivers_chunk, reduce));
  };
  if (IsExchange(kind)) {
    add(true, false);
    return out;
  }
  if (kind != CommKind::kAllGather) add(true, true);
  if (kind != CommKind::kReduceScatter) add(false, false);
  return out;
}

}  // namespace tessera
