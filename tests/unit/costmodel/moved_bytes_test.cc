// What devices send one another in a step, against formulas.

#include <gtest/gtest.h>

#include <limits>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/simulate/simulator.h"
#include "planner/io/importer.h"
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

// Of P parameters of 16 bits the same all-reduce sends 6 * 2 P where the stack
// keeps gradients in their type, and 6 * 4 P where it does not.
TEST(MovedBytes, StacksMayReduceGradientsOfSixteenBits) {
  for (const auto& [dtype, flag] :
       {std::pair(DType::kFloat16, &StackMemory::fp16_gradients),
        std::pair(DType::kBFloat16, &StackMemory::bf16_gradients)}) {
    ImportOptions options;
    options.global_batch = 8;
    options.seq_len = 16;
    options.dtype = dtype;
    const Graph graph =
        Differentiate(ImportModel("zoo:gpt2-tiny", options).value()).value();
    const auto moved = [&](bool in_their_type) {
      Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
      cluster.stack.memory.*flag = in_their_type;
      const Evaluator evaluator(graph, cluster, nullptr, {});
      const Plan plan =
          PlanFromStrategy(graph, cluster, ParseStrategy("dp=4").value())
              .value();
      return evaluator.Explain(plan).moved.value;
    };
    EXPECT_EQ(moved(false) - moved(true), 6 * 2 * ParameterCount(graph))
        << NameOf(dtype);
  }
}

// Parameters of 2 * 2 * 2^48 numbers that are gathered twice and reduced once
// by 4 ranks in each of 2^12 microbatches are 2^50 * 4 * 9 * 2^12 bytes, more
// than an int64 holds.
TEST(MovedBytes, StayBelowTheLargestNumber) {
  const Graph graph = testing::MlpGraph(2, 1 << 14, 1, 1 << 24, 1 << 24, 32);
  const Cluster cluster = MakeCluster("local-cpu:4").value();
  const Plan plan = PlanFromStrategy(graph, cluster,
                                     ParseStrategy("dp=4,zero=3,mbs=1").value())
                        .value();
  EXPECT_EQ(MovedBytes(Pricer(graph, cluster, nullptr),
                       Lower(graph, cluster, plan, {}))
                .value,
            std::numeric_limits<int64_t>::max());
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
