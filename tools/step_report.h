#pragma once
// How the predicted step of a plan is shown.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/ir/cluster.h"
#include "planner/ir/graph.h"
#include "planner/plan/evaluation.h"
#include "planner/plan/plan.h"
#include "tools/json.h"

namespace tessera {

// Rates of a step, by model FLOPs (planner/ir/graph.h) and the devices that the
// plan uses (UtilizationOf).
struct Throughput {
  double tokens_per_s = 0;
  double tokens_per_s_per_gpu = 0;
  double model_flops = 0;
  double model_tflops_per_gpu = 0;
  std::optional<double> mfu;
  std::optional<double> mfu_causal;  // causal attention counted half
  std::optional<double> hfu;         // with recomputed work
};
Throughput ThroughputOf(const Graph& graph, const Cluster& cluster,
                        const Plan& plan, Duration step_time);

// "218 TFLOP/s per device: MFU 70.0 % (causal attention halved: 66.7 %), HFU
// 70.0 %", or "80.4 GFLOP/s per device".
std::string FlopsText(const Throughput& rates);

// Null of a plan without a price (Evaluator: of one that takes too long).
Json StepTimeJson(Duration step_time);

// The fields of `tessera simulate --json`; null what only a price tells, where
// there is none. REQUIRES (both): the evaluation is
// one that Evaluator::Explain made.
Json StepJson(const Graph& graph, const Cluster& cluster, const Plan& plan,
              const Evaluation& evaluation);
// The same in lines for people.
std::string StepText(const Graph& graph, const Cluster& cluster,
                     const Plan& plan, const Evaluation& evaluation);

// The parts of a breakdown, which add up to its total, by the names of their
// JSON fields ("all_reduce", "bubble").
struct BreakdownPart {
  std::string_view name;
  Duration time;
};
std::vector<BreakdownPart> PartsOf(const Breakdown& breakdown);
Json BreakdownJson(const Breakdown& breakdown);

// The same of a device's memory ("parameters", "activations").
struct MemoryPart {
  std::string_view name;
  Bytes bytes;
};
std::vector<MemoryPart> MemoryParts(const MemoryUse& memory);
// With "total".
Json MemoryJson(const MemoryUse& memory);

}  // namespace tessera
