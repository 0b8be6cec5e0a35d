#include "costmodel/collective/algorithms.h"

namespace tessera {

bool NeighbourApplies(CommKind kind, const CollectiveGroup&) {
  return kind == CommKind::kShift;
}

// What a rank has is one chunk.
Rounds NeighbourRounds(CommKind, const CollectiveGroup& group) {
  const int n = group.ranks;
  Rounds out;
  out.owner = {0};
  out.rounds.push_back({});
  for (int rank = 0; rank < n; ++rank) {
    out.rounds[0].sends.push_back({.from = rank, .to = (rank + n - 1) % n});
  }
  return out;
}

}  // namespace tessera
