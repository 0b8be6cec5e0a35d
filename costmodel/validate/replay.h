#pragma once
// A published run as inputs of the planner: the model as a graph, the machine
// as a cluster, the strategy. What its row leaves blank is filled in by rules
// that hold for all rows, each written down as an assumption of the row; what
// cannot be mapped is an error that says so.

#include <string>
#include <vector>

#include "costmodel/validate/published_run.h"
#include "planner/base/result.h"
#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/strategy.h"

namespace tessera {

struct Replay {
  Cluster cluster;
  Strategy strategy;
  std::vector<std::string> assumptions;
};

// GPUs by the words of the column, links by the words of theirs (replay.cc has
// the tables); vendors' reference systems where they are blank.
Result<Cluster> ClusterOf(const PublishedRun& run,
                          std::vector<std::string>& assumptions);
Result<Strategy> StrategyOf(const PublishedRun& run,
                            std::vector<std::string>& assumptions);
// Differentiated. GPT-2's architecture for GELU and squared ReLU, Llama's for
// SwiGLU, Mixtral's for experts; without dropout.
Result<Graph> GraphOf(const PublishedRun& run,
                      std::vector<std::string>& assumptions);

}  // namespace tessera
