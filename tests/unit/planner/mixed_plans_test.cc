#include "planner/search/mixed_plans.h"

#include <gtest/gtest.h>

#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// Where all layers but small ones are alike there is nothing to mix.
TEST(MixedPlans, AreNoneOfEqualLayers) {
  const Graph graph = testing::MlpGraph(4, 32, 16, 64, 64, /*vocabulary=*/2);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const SearchSpace space(graph, cluster);
  const testing::ToyObjective objective(graph);
  EXPECT_TRUE(MixedPlans(space, objective, {}, [] { return false; }).empty());
}

// The first data parallelism that is tried is ZeRO-1 in one microbatch. Where
// that is ruled out, or each plan that splits all alike, others are mixed.
TEST(MixedPlans, MixWhatConstraintsAllow) {
  const Graph graph = testing::MlpGraph(4, 32, 16, 64, 64, 1024);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const testing::ToyObjective objective(graph);
  const auto never = [] { return false; };
  for (const ConstraintTexts& texts :
       {ConstraintTexts(), ConstraintTexts{.forbid = {{"zero1"}}},
        ConstraintTexts{.max_microbatch = 2},
        // No data parallelism is allowed unless it is mixed.
        ConstraintTexts{.fix = {{"head=tp:8"}}}}) {
    SearchSpace space(graph, cluster);
    space.constraints = Constraints::Make(space.index, cluster, texts).value();
    const auto mixed = MixedPlans(space, objective, {}, never);
    ASSERT_FALSE(mixed.empty());
    EXPECT_TRUE(Allowed(space, mixed[0].plan));
  }
}

}  // namespace
}  // namespace tessera
