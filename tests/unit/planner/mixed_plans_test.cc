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

}  // namespace
}  // namespace tessera
