#pragma once
// A published run as inputs of the planner: the model as a graph, the software,
// the strategy (the machine: published_cluster.h). What its row leaves blank is
// filled in by rules that hold for all rows, each written down as an assumption
// of the row; what cannot be mapped is an error that says so.

#include <span>
#include <string>
#include <vector>

#include "costmodel/validate/published_run.h"
#include "planner/base/result.h"
#include "planner/ir/graph.h"
#include "planner/ir/stack.h"
#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"
#include "planner/plan/strategy.h"

namespace tessera {

// The software of the row: by words of its source, what it says of attention,
// overlap and precision, and the age of its GPU. `stacks`: as the table of
// planner/topology/stacks.h, maybe with other figures.
Stack StackOf(const PublishedRun& run, std::span<const Stack> stacks,
              std::vector<std::string>& assumptions);
Result<Strategy> StrategyOf(const PublishedRun& run,
                            std::vector<std::string>& assumptions);
// Policies that recompute parts of a layer, or some layers: the flags of a plan
// that PlanFromStrategy made of StrategyOf's.
void SetRecomputeOf(const PublishedRun& run, const GraphIndex& index,
                    Plan& plan);
// Differentiated. GPT-2's architecture for GELU and squared ReLU, Llama's for
// gated layers, Mixtral's for experts; without dropout.
Result<Graph> GraphOf(const PublishedRun& run,
                      std::vector<std::string>& assumptions);

// An error where the cluster, with its stack, does not compute in the types
// that the row names.
Result<void> CheckPrecision(const PublishedRun& run, const Cluster& cluster,
                            const Graph& graph);

}  // namespace tessera
