#include "planner/plan/used_part.h"

#include <gtest/gtest.h>

#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// A plan of two devices on the second of each of two hosts of two.
TEST(UsedPart, IsTheDevicesOfThePlanInTheirOrder) {
  const Graph graph = testing::MlpGraph(2, 4, 4, 8, 16, 32);
  const GraphIndex index(graph);
  const Cluster cluster = MakeCluster("titan-rtx-pair:3").value();
  const Cluster pair = MakeCluster("titan-rtx-pair:1").value();
  const Strategy strategy = ParseStrategy("dp=2,zero=1,mbs=1").value();
  const Plan plan = PlanFromStrategy(index, pair, strategy).value();
  Plan spread = plan;
  spread.groups[0].devices = {DeviceId(1), DeviceId(5)};
  spread.cluster_name = cluster.name;

  const auto part = UsedPartOf(cluster, spread);
  ASSERT_TRUE(part.has_value());
  ASSERT_EQ(part->cluster.devices.size(), 2U);
  EXPECT_EQ(part->cluster.devices[0].vertex, cluster.devices[1].vertex);
  EXPECT_EQ(part->cluster.devices[1].vertex, cluster.devices[5].vertex);
  EXPECT_EQ(part->cluster.devices[1].node, 1);
  EXPECT_EQ(part->plan.groups[0].devices, plan.groups[0].devices);
  EXPECT_EQ(StrategyOnPart(index, cluster, spread), strategy);
  EXPECT_EQ(StrategyText(index, cluster, spread),
            ToString(strategy) + " on 2 of 6 devices");

  EXPECT_FALSE(UsedPartOf(pair, plan).has_value());
  EXPECT_EQ(StrategyOnPart(index, pair, plan), strategy);
  EXPECT_EQ(StrategyText(index, pair, plan), ToString(strategy));
}

}  // namespace
}  // namespace tessera
