#include "planner/search/mixed_plans.h"

#include <gtest/gtest.h>

#include <utility>

#include "planner/plan/axis_roles.h"
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
  const int head = static_cast<int>(graph.blocks.size()) - 1;
  const auto never = [] { return false; };
  for (const auto& [texts, mixes] :
       {std::pair(ConstraintTexts(), true),
        {ConstraintTexts{.forbid = {{"zero1"}}}, true},
        // A head that is split 8 ways has the samples of all 8 replicas, of
        // which each has one at least: the best is not to mix.
        {ConstraintTexts{.max_microbatch = 2}, false},
        // No data parallelism is allowed unless it is mixed.
        {ConstraintTexts{.fix = {{"head=tp:8"}}}, true}}) {
    SearchSpace space(graph, cluster);
    space.constraints = Constraints::Make(space.index, cluster, texts).value();
    const auto mixed = MixedPlans(space, objective, {}, never);
    ASSERT_FALSE(mixed.empty());
    EXPECT_TRUE(Allowed(space, mixed[0].plan));
    // The head's parameters are split, the layers' samples.
    const auto head_roles = RolesOf(space.index, mixed[0].plan, head);
    const auto layer_roles = RolesOf(space.index, mixed[0].plan, 1);
    ASSERT_TRUE(head_roles && layer_roles);
    EXPECT_EQ(head_roles->tensor != 0, mixes);
    EXPECT_EQ(layer_roles->tensor, 0);
  }
}

}  // namespace
}  // namespace tessera
