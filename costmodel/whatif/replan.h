#pragma once
// The best plan of a case.

#include "costmodel/whatif/predict.h"
#include "costmodel/whatif/scenario.h"

namespace tessera {

struct ReplanOptions {
  // Of a search (planner/search/mcmc.h), which looks at shared links unless
  // predictions are fast; 0: the best of the plans that it starts from.
  int64_t proposals = 0;
  uint64_t seed = 0;
  double time_limit = 0;  // seconds; 0: none
};

// What `tessera search --prefer fastest` finds with so many proposals, before
// it confirms any: the fastest that fits, else the one that lacks least. The
// case's own strategy and `plan` (null: none) are two more starts; a strategy
// that is none here is an error, or of a case that drops idle keys a note. The
// same case and options give the same plan, unless a time limit ends the
// search. kInfeasible where no plan is valid, or none was priced in time. Once
// predict.watch stops it is the best of what was compared.
Result<Plan> BestPlan(Case& of, const PredictOptions& predict,
                      const ReplanOptions& options, const Plan* plan = nullptr);

}  // namespace tessera
