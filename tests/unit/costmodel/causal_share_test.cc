// Attention under a causal mask is priced by the rank with the most to do.

#include <gtest/gtest.h>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/simulate/simulator.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using testing::AttentionGraph;

class CausalShareTest : public ::testing::Test {
 protected:
  CausalShareTest()
      : graph_(AttentionGraph(1, 1, 8192, 1024, 64, 16)),
        cluster_(MakeCluster("dgx-a100-80gb:1x4").value()),
        one_(MakeCluster("dgx-a100-80gb:1x1").value()) {}

  // The time of all of a step's attention kernels, less what their launches
  // take, and of the step.
  struct Times {
    double attention = 0;
    double step = 0;
  };
  Times Of(const Cluster& cluster, std::string_view text) const {
    const auto plan =
        PlanFromStrategy(graph_, cluster, ParseStrategy(text).value());
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    const TaskGraph tasks = Lower(graph_, cluster, *plan, {});
    const Evaluator evaluator(graph_, cluster, nullptr, {});
    const auto costs = PriceTasks(evaluator.pricer(), tasks);
    const double launch = cluster.device_types[0].launch_overhead.seconds();
    Times times;
    for (size_t t = 0; t < costs.size(); ++t) {
      if (!tasks.tasks[t].kernel.starts_with("attention")) continue;
      times.attention += costs[t].duration.seconds() - launch;
    }
    times.step = LongestPath(tasks, costs).step_time.seconds();
    EXPECT_EQ(evaluator.Evaluate(*plan).step_time.seconds(), times.step);
    return times;
  }

  const Graph graph_;
  const Cluster cluster_;
  const Cluster one_;
};

// The last of four ranks has 7/16 of the pairs (and half a diagonal's share
// less), 7/4 of the mean; in zigzag order each has a quarter. In a ring the
// last rank is at work in every step, with half a block in the first: 1/2 + 3
// of 8 half blocks, 7/16 as well. In each step a block of queries also costs
// its prologue, about 180 keys of 2,048, four times in a ring: 0.46 and 0.29.
TEST_F(CausalShareTest, ContiguousSplitsCountTheLastRankZigzagTheMean) {
  const double whole = Of(one_, "").attention;
  for (const char* kind : {"gather", "ring"}) {
    const std::string text = std::string("cp=4,cp-kind=") + kind;
    const Times in_order = Of(cluster_, text);
    const Times zigzag = Of(cluster_, text + ",cp-balance=zigzag");
    EXPECT_NEAR(in_order.attention / whole, 7.0 / 16, 0.05) << kind;
    EXPECT_NEAR(zigzag.attention / whole, 1.0 / 4, 0.05) << kind;
    EXPECT_LT(zigzag.step, in_order.step) << kind;
  }
}

}  // namespace
}  // namespace tessera
