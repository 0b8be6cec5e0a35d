// What devices send one another in a step, against formulas.

#include <gtest/gtest.h>

#include "costmodel/evaluate/evaluator.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

int64_t Moved(const Graph& graph, const std::string& strategy) {
  const Cluster cluster = MakeCluster("local-cpu:4").value();
  const Evaluator evaluator(graph, cluster, nullptr, {.clip = 0});
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value()).value();
  return evaluator.Explain(plan).moved.value;
}

// Of 4 ranks an all-reduce of P numbers of 4 bytes sends 2 * 3 * 4 P, and so do
// a reduce-scatter and an all-gather together. The loss and the number of
// labels are two more.
TEST(MovedBytes, DataParallelismSendsItsGradients) {
  const Graph graph = testing::MlpGraph(2, 8, 4, 8, 16, 32);
  ASSERT_EQ(graph.dtype, DType::kFloat32);
  const int64_t gradients = 6 * 4 * ParameterCount(graph);
  EXPECT_EQ(Moved(graph, "dp=4"), gradients + 2 * 6 * 4);
  EXPECT_EQ(Moved(graph, "dp=4,zero=1"), gradients + 2 * 6 * 4);
}

// Between two stages of one rank each microbatch's activations go one way, and
// their gradients the other: 8 samples of 4 positions of 8 numbers.
TEST(MovedBytes, PipelinesSendActivations) {
  const Graph graph = testing::MlpGraph(2, 8, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  const Evaluator evaluator(graph, cluster, nullptr, {.clip = 0});
  const Plan plan =
      PlanFromStrategy(graph, cluster, ParseStrategy("pp=2,mbs=2").value())
          .value();
  EXPECT_EQ(evaluator.Explain(plan).moved.value, 2 * 8 * 4 * 8 * 4);
}

}  // namespace
}  // namespace tessera
