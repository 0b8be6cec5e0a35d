#include <bit>
#include <numeric>

#include "costmodel/collective/algorithms.h"

namespace tessera {
namespace {

// Every rank with the one `distance` apart. In a reduction a rank sends the
// block of `distance` chunks in which the other lies; in a gather its own.
Round Exchange(int n, int distance, bool reduce) {
  Round round;
  round.modulus = n;
  round.reduce = reduce;
  for (int rank = 0; rank < n; ++rank) {
    const int other = rank ^ distance;
    const int in_block = reduce ? other : rank;
    round.sends.push_back({.from = rank,
                           .to = other,
                           .base = 0,
                           .first = in_block - in_block % distance,
                           .count = distance});
  }
  return round;
}

}  // namespace

bool HalvingDoublingApplies(CommKind kind, const CollectiveGroup& group) {
  return RingApplies(kind, group) &&
         std::has_single_bit(static_cast<unsigned>(group.ranks));
}

Rounds HalvingDoublingRounds(CommKind kind, const CollectiveGroup& group) {
  const int n = group.ranks;
  Rounds out;
  out.own_share = 1.0 / n;
  out.chunks = n;
  out.owner.resize(static_cast<size_t>(n));
  std::iota(out.owner.begin(), out.owner.end(), 0);
  if (kind != CommKind::kAllGather) {
    for (int distance = n / 2; distance > 0; distance /= 2) {
      out.rounds.push_back(Exchange(n, distance, true));
    }
  }
  if (kind != CommKind::kReduceScatter) {
    for (int distance = 1; distance < n; distance *= 2) {
      out.rounds.push_back(Exchange(n, distance, false));
    }
  }
  return out;
}

}  // namespace tessera
