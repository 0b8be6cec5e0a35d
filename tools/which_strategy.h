#pragma once
// `tessera explain --which-strategy`: the textbook's decision table for a model
// and a cluster, its answers priced, beside what the search finds.

#include "planner/base/result.h"
#include "tools/inputs.h"
#include "tools/options.h"

namespace tessera {

// Bytes a second that enter the host of the first device from others, for each
// of its devices.
double NetworkOfDevice(const Cluster& cluster);

// Prints it; the exit code. Searches where no plan or strategy is given.
Result<int> ExplainWhichStrategy(const Options& options, const Inputs& inputs);

}  // namespace tessera
