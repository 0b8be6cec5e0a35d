#pragma once
// What moves between uniform plans share.

#include "planner/plan/strategy.h"
#include "planner/search/draft.h"

namespace tessera {

// Replaces the draft's plan by that of a strategy; false where it has none, or
// one that shows another strategy, from which the way back would start.
bool ReplaceByStrategy(const Strategy& strategy, Draft& draft);

}  // namespace tessera
