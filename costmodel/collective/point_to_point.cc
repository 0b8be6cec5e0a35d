#include "costmodel/collective/algorithms.h"

namespace tessera {

bool PointToPointApplies(CommKind kind, const CollectiveGroup& group) {
  return kind == CommKind::kSendRecv && group.ranks == 2;
}

Rounds PointToPointRounds(CommKind, const CollectiveGroup&) {
  Rounds out;
  out.owner = {1};
  out.rounds.push_back({});
  out.rounds[0].sends.push_back({.from = 0, .to = 1});
  return out;
}

}  // namespace tessera
