#pragma once
// Which layers of a uniform plan compute what again: the first so many, or all,
// at one level. Functions without state; thread-safe.

#include <optional>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/recompute.h"

namespace tessera {

struct LayersAgain {
  RecomputeLevel level = RecomputeLevel::kNone;
  int layers = 0;  // the first so many; 0: all
  bool operator==(const LayersAgain&) const = default;
};

// Nothing where `plan` computes others again, or those not alike. Layers may
// have the flags of several levels, as those without attention do: of these the
// lowest that all of them have.
std::optional<LayersAgain> LayersAgainOf(const GraphIndex& index,
                                         const Plan& plan);

// Gives `plan` the flags of these layers, and of no others.
void SetLayersAgain(const GraphIndex& index, const LayersAgain& again,
                    Plan& plan);

}  // namespace tessera
