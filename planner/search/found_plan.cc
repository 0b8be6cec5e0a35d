#include "planner/search/found_plan.h"

namespace tessera {

void PriceShared(const Objective& objective, FoundPlan& found) {
  if (found.shared || !found.evaluation.feasible()) return;
  found.shared = objective.QuickSharedStepTime(found.plan);
}

}  // namespace tessera
