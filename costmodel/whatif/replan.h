#pragma once
// The best uniform plan of a case: what a person would find by trying.

#include "costmodel/whatif/predict.h"
#include "costmodel/whatif/scenario.h"

namespace tessera {

struct ReplanOptions {
  // Strategies that are compared, at most.
  int budget = 256;
  // Proposals of a search from the best of them (planner/search/mcmc.h), which
  // looks at shared links unless predictions are fast; 0: no search.
  int64_t proposals = 0;
  uint64_t seed = 0;
};

// Of the uniform strategies (planner/search/uniform_strategies.h) with sequence
// parallelism where there is tensor parallelism, 1F1B and microbatches of at
// most 8 samples, evenly `budget` of them, and the case's own strategy where it
// has one; where none fits, the nearest again with recomputation. The result is
// the fastest that fits, else the one that lacks least. The same case and
// options give the same plan. kInfeasible where no plan is valid.
// Once predict.watch stops it is the best of what was compared.
Result<Plan> BestPlan(const Case& of, const PredictOptions& predict,
                      const ReplanOptions& options);

}  // namespace tessera
