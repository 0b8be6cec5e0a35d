#pragma once
// `tessera explain --which-strategy`: the textbook's decision table for a model
// and a cluster, its answers priced, beside what the search finds.

#include "planner/base/result.h"
#include "tools/inputs.h"
#include "tools/options.h"

namespace tessera {

// Prints it; the exit code. Searches where no plan or strategy is given.
Result<int> ExplainWhichStrategy(const Options& options, const Inputs& inputs);

}  // namespace tessera
