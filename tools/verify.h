#pragma once
// Plans measured on this host.

#include <string>
#include <vector>

#include "planner/base/result.h"
#include "planner/base/units.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "tools/options.h"

namespace tessera {

// What of a search's `arguments` says what is trained, as 'tessera run' takes
// it.
std::vector<std::string> TrainingArguments(
    const std::vector<std::string>& arguments);

// That MeasureStep will have the devices and the data that it needs, as far as
// that can be told before there is a plan.
Result<void> CheckMeasurable(const Options& options, const Graph& graph,
                             const Cluster& cluster);

// The step time that 'tessera run' measures of a few steps of `plan`, made for
// `cluster`: on the CPU where the cluster's devices are, else on GPUs, with the
// flags of `options.arguments` that say what is trained. Errors: what the run
// said, or kInterrupted where it was told to end.
Result<Duration> MeasureStep(const Options& options, const Graph& graph,
                             const Cluster& cluster, const Plan& plan);

}  // namespace tessera
