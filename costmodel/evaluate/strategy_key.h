#pragma once
// StrategyKey: what uniform strategies are remembered by.

#include "costmodel/memo.h"
#include "planner/plan/strategy.h"

namespace tessera {

// Everything that a strategy says of a plan: equal keys, equal strategies.
// REQUIRES: it has no table of actions.
IntKey StrategyKey(const Strategy& strategy);

}  // namespace tessera
