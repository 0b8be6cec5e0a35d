#pragma once
// Objective: what the search sees of the cost model, and all it sees.

#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"

namespace tessera {

class Objective {
 public:
  virtual ~Objective() = default;
  // Prices a valid plan. Thread-safe; the same plan gives the same bits.
  virtual Evaluation Evaluate(const Plan& plan) const = 0;
};

}  // namespace tessera
