#include "tests/support/searched_plans.h"

#include <cmath>
#include <iterator>

#include "costmodel/evaluate/evaluator.h"
#include "planner/search/mcmc.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

constexpr int64_t kProposals = 200;
constexpr size_t kMostPlans = 6;

// A preset whose devices are slower by 10^2 to 10^7, so that small models have
// a reason to be split, and in half of all cases too small for a whole copy of
// all parameters, gradients and states.
Cluster RandomCluster(const Graph& graph, Rng& rng) {
  static constexpr const char* kPresets[] = {
      "local-cpu:2",       "local-cpu:3",  "local-cpu:4",
      "local-cpu:6",       "dgx-h100:1x4", "dgx-h100:2x2",
      "dgx-a100-80gb:2x4", "dgx-h100:1x8", "p100-edr:2x2"};
  Cluster cluster =
      MakeCluster(kPresets[rng.Below(std::size(kPresets))]).value();
  const double slower = std::pow(10.0, 2 + 5 * rng.Uniform01());
  const bool tight = rng.Below(2) == 0;
  const double share = 0.3 + rng.Uniform01();
  for (DeviceType& type : cluster.device_types) {
    type.peak_fp64 = {type.Peak(DType::kFloat32).value / slower};
    type.memory_bandwidth = {type.memory_bandwidth.value / slower};
    // Parameters, gradients and two moments of 8 bytes each.
    if (!tight) continue;
    const auto whole = static_cast<double>(32 * ParameterCount(graph));
    type.memory = {static_cast<int64_t>(share * whole) + 4096};
  }
  return cluster;
}

}  // namespace

SearchedPlans SearchPlans(uint64_t number, PlanChecker& checker) {
  Rng rng(number, 91);
  SearchedPlans made;
  made.graph = RandomGraphSpec(rng);
  const Graph& graph = checker.ModelOf(made.graph).graph;
  made.cluster = RandomCluster(graph, rng);
  made.optimizer = static_cast<int>(number % 2);
  made.text = "search " + std::to_string(number) + ": " + ToText(made.graph) +
              " on " + made.cluster.name;
  const SearchSpace space(graph, made.cluster);
  const Evaluator evaluator(graph, made.cluster, nullptr,
                            CheckedRun(made.optimizer).training);
  SearchOptions options;
  options.seed = number;
  options.proposals = kProposals;
  options.time_limit = 0;
  options.threads = 1;
  options.candidates = kMostPlans;
  const auto result = Search(space, evaluator, options);
  if (!result) return made;
  for (const FoundPlan& found : result->candidates) {
    if (found.evaluation.feasible()) made.plans.push_back(found.plan);
  }
  return made;
}

}  // namespace tessera
