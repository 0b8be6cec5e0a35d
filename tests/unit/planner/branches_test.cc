#include "planner/plan/branches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "planner/io/importer.h"
#include "planner/plan/describe.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BranchesTest : public ::testing::Test {
 protected:
  BranchesTest()
      : graph_(testing::BranchesGraph(8, 4, 8, 12, 32)),
        index_(graph_),
        cluster_(*MakeCluster("local-cpu:8")) {}

  Result<Plan> Make(std::string_view strategy) const {
    return PlanFromStrategy(index_, cluster_, *ParseStrategy(strategy));
  }
  std::vector<std::string> NamesOf(const std::vector<NodeId>& nodes) const {
    std::vector<std::string> names;
    for (NodeId id : nodes) names.push_back(graph_.node(id).name);
    return names;
  }

  Graph graph_;
  GraphIndex index_;
  Cluster cluster_;
};

TEST_F(BranchesTest, AreWhatOneOperandOfAJoinNeedsAndTheOtherDoesNot) {
  EXPECT_FALSE(BranchesOf(index_, 0).has_value());
  EXPECT_FALSE(BranchesOf(index_, 2).has_value());
  const auto branches = BranchesOf(index_, 1);
  ASSERT_TRUE(branches.has_value());
  EXPECT_THAT(NamesOf(branches->left),
              ElementsAre("h.left.up", "h.left.act", "h.left.down"));
  EXPECT_THAT(NamesOf(branches->right), ElementsAre("h.right"));
}

// Those of each layer, in equal places.
TEST(Branches, AreOnHalvesInEveryLayer) {
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = 16;
  const Graph graph =
      *Differentiate(*ImportModel(ExamplePath("models/pythia-1b"), options));
  const GraphIndex index(graph);
  const Plan plan = *PlanFromStrategy(index, *MakeCluster("local-cpu:4"),
                                      *ParseStrategy("branches=split"));
  int layers = 0;
  for (int b = 0; b < static_cast<int>(graph.blocks.size()); ++b) {
    const auto branches = BranchesOf(index, b);
    layers += branches.has_value();
    for (NodeId id : index.nodes_of_block[static_cast<size_t>(b)]) {
      const auto is_of = [&](std::vector<NodeId> Branches::*side) {
        return branches.has_value() && std::ranges::find(*branches.*side, id) !=
                                           (*branches.*side).end();
      };
      const int half = is_of(&Branches::left)    ? 1
                       : is_of(&Branches::right) ? 2
                                                 : 0;
      EXPECT_EQ(plan.ops[id.index()].group.value, half) << graph.node(id).name;
    }
  }
  EXPECT_EQ(layers, 16);
}

// Ranks are (dp, dp, tp) of 2 each: the halves are 0-3 and 4-7.
TEST_F(BranchesTest, SplitOnHalvesOfTheirGroup) {
  const Plan plan = *Make("tp=2,branches=split");
  ASSERT_EQ(plan.groups.size(), 3u);
  const auto ranks = [&](size_t g) {
    std::vector<int> list;
    for (DeviceId device : plan.groups[g].devices) list.push_back(device.value);
    return list;
  };
  EXPECT_THAT(ranks(1), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(ranks(2), ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(StagesOf(graph_, plan).count(), 1);
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const std::string& name = graph_.nodes[i].name;
    EXPECT_EQ(plan.ops[i].group.value, name.starts_with("h.left")    ? 1
                                       : name.starts_with("h.right") ? 2
                                                                     : 0)
        << name;
  }
  EXPECT_THAT(Describe(graph_, cluster_, plan), HasSubstr("all.left"));
  const auto merged = MergeBranches(index_, plan, GroupId(0), 0);
  ASSERT_TRUE(merged.has_value());
  EXPECT_EQ(merged->ops, Make("tp=2")->ops);
  EXPECT_FALSE(MergeBranches(index_, plan, GroupId(0), 1).has_value());
}

// Axes of a half are numbered anew, wherever a placement names them.
TEST_F(BranchesTest, KeepTheirRings) {
  Plan plan = *Make("cp=2,dp=4");
  const AxisSet ring = AxisSet{1} << 2;  // (dp, dp, cp)
  const auto left = BranchesOf(index_, 1)->left;
  for (NodeId id : left) plan.ops[id.index()].streamed = ring;
  const auto split = SplitBranches(index_, plan, GroupId(0), 0);
  ASSERT_TRUE(split.has_value());
  for (NodeId id : left) {
    EXPECT_EQ(split->ops[id.index()].streamed, ring >> 1);
  }
  const auto merged = MergeBranches(index_, *split, GroupId(0), 0);
  ASSERT_TRUE(merged.has_value());
  EXPECT_EQ(merged->ops, plan.ops);
}

TEST_F(BranchesTest, NeedAnAxisOfTwoReplicas) {
  EXPECT_THAT(Make("tp=8,branches=split").error().ToString(),
              HasSubstr("needs a dp that 2 divides"));
  const Graph chain = testing::MlpGraph(2, 8, 4, 8, 12, 32);
  EXPECT_THAT(
      PlanFromStrategy(chain, cluster_, *ParseStrategy("branches=split"))
          .error()
          .ToString(),
      HasSubstr("no block has two branches"));
  EXPECT_THAT(
      ParseStrategy("branches=both").error().ToString(),
      HasSubstr("branches: unknown branches 'both'; known: whole, split"));
}

TEST(DeviceSetsTest, AreTheDevicesOfEqualGroups) {
  const std::vector<DeviceGroup> groups = {
      {"all", {DeviceId(2), DeviceId(0), DeviceId(1)}, {{"a", 3}}},
      {"one", {DeviceId(1)}, {}},
      {"far", {DeviceId(5)}, {}}};
  const std::vector<DeviceSet> sets = DeviceSets(groups);
  ASSERT_EQ(sets.size(), 3u);
  EXPECT_EQ(sets[0].name, "all");
  EXPECT_THAT(sets[0].devices, ElementsAre(DeviceId(2), DeviceId(0)));
  EXPECT_EQ(sets[1].name, "all + one");
  EXPECT_THAT(sets[1].devices, ElementsAre(DeviceId(1)));
  EXPECT_THAT(sets[2].devices, ElementsAre(DeviceId(5)));
  EXPECT_THAT(Overlaps(groups),
              ElementsAre(ElementsAre(GroupId(1)), ElementsAre(GroupId(0)),
                          ElementsAre()));
}

}  // namespace
}  // namespace tessera
