#include "planner/plan/branches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "planner/base/rng.h"
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

// Of `count` operators, dense layers and sums, on results drawn from the ones
// before them; the second block has
// all but the lookup.
Graph RandomGraph(int count, uint64_t seed) {
  Rng rng(seed, 0);
  GraphBuilder builder("random", 2, 1, DType::kFloat32);
  builder.BeginBlock("embed");
  const TensorId tokens = builder.Input("tokens", {2, 1}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {2, 1}, DType::kInt32);
  const TensorId table = builder.Weight("table", {8, 2}, {.stddev = 1}, true);
  const TensorId weight = builder.Weight("weight", {2, 2}, {.stddev = 1}, true);
  std::vector<TensorId> made = {
      builder.Add1("embedding", "lookup", {tokens, table})};
  builder.BeginBlock("random");
  for (int i = 0; i < count; ++i) {
    const auto draw = [&] {
      return made[rng.Below(static_cast<uint32_t>(made.size()))];
    };
    const std::string name = "node." + std::to_string(i);
    made.push_back(
        rng.Below(2) == 0
            ? builder.Add1("add", name, {draw(), draw()}, "bsh,bsh->bsh")
            : builder.Add1("linear", name, {draw(), weight}, "bsi,oi->bso"));
  }
  TensorId sum = made[0];
  for (size_t i = 1; i < made.size(); ++i) {
    sum = builder.Add1("add", "sum." + std::to_string(i), {sum, made[i]},
                       "bsh,bsh->bsh");
  }
  return testing::FinishWithLoss(
      builder, builder.Add1("linear", "head", {sum, table}, "bsi,vi->bsv"),
      labels);
}

// By the definition: the nodes behind each operand of each join.
std::optional<Branches> PlainBranchesOf(const GraphIndex& index, int block) {
  const Graph& graph = *index.graph;
  std::map<NodeId, std::set<NodeId>> behind;  // itself included
  std::optional<Branches> best;
  int64_t most = 0;
  for (NodeId id : index.nodes_of_block[static_cast<size_t>(block)]) {
    std::vector<std::set<NodeId>> sides;
    for (TensorId operand : graph.node(id).operands) {
      const NodeId producer = index.producer[operand.index()];
      if (producer.valid() && graph.node(producer).block == block) {
        sides.push_back(behind[producer]);
      }
    }
    for (const auto& side : sides) behind[id].insert(side.begin(), side.end());
    behind[id].insert(id);
    if (sides.size() != 2) continue;
    const auto without = [&](size_t one, size_t other, int64_t& layers) {
      std::vector<NodeId> rest;
      for (NodeId node : sides[one]) {
        if (sides[other].contains(node)) continue;
        rest.push_back(node);
        layers += graph.node(node).op->op_class != OpClass::kMemory;
      }
      return rest;
    };
    int64_t left = 0;
    int64_t right = 0;
    Branches branches = {without(0, 1, left), without(1, 0, right)};
    if (std::min(left, right) <= most) continue;
    most = std::min(left, right);
    best = std::move(branches);
  }
  return best;
}

TEST(Branches, AreThoseOfTheDefinition) {
  int found = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    // Few dense layers, or more than a number has bits.
    const Graph graph = RandomGraph(seed % 3 == 0 ? 300 : 12, seed);
    const GraphIndex index(graph);
    const auto branches = BranchesOf(index, 1);
    const auto plain = PlainBranchesOf(index, 1);
    ASSERT_EQ(branches.has_value(), plain.has_value()) << seed;
    if (!plain.has_value()) continue;
    ++found;
    EXPECT_EQ(branches->left, plain->left) << seed;
    EXPECT_EQ(branches->right, plain->right) << seed;
  }
  EXPECT_GT(found, 30);
}

// A chain of thousands of layers beside another.
TEST(Branches, MayBeLong) {
  constexpr size_t kLayers = 5'000;
  GraphBuilder builder("long", 2, 1, DType::kFloat32);
  builder.BeginBlock("all");
  const TensorId tokens = builder.Input("tokens", {2, 1}, DType::kInt32);
  const TensorId labels = builder.Input("labels", {2, 1}, DType::kInt32);
  const TensorId table = builder.Weight("table", {8, 2}, {.stddev = 1}, true);
  const TensorId weight = builder.Weight("weight", {2, 2}, {.stddev = 1}, true);
  const TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  TensorId left = x;
  TensorId right = x;
  for (size_t i = 0; i < kLayers; ++i) {
    const std::string number = std::to_string(i);
    left =
        builder.Add1("linear", "left." + number, {left, weight}, "bsi,oi->bso");
    right = builder.Add1("linear", "right." + number, {right, weight},
                         "bsi,oi->bso");
  }
  const TensorId sum =
      builder.Add1("add", "sum", {left, right}, "bsh,bsh->bsh");
  const Graph graph = testing::FinishWithLoss(
      builder, builder.Add1("linear", "head", {sum, table}, "bsi,vi->bsv"),
      labels);
  const auto branches = BranchesOf(GraphIndex(graph), 0);
  ASSERT_TRUE(branches.has_value());
  EXPECT_EQ(branches->left.size(), kLayers);
  EXPECT_EQ(branches->right.size(), kLayers);
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
