#include "planner/search/adapt.h"

#include <gtest/gtest.h>

#include "planner/plan/strategy.h"
#include "planner/schedule/action_table.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// Microbatches keep their samples as nearly as the batch divides: 8 of 4
// samples are 16 in 64, and 6 in 30 (of 7.5: 10 is farther).
TEST(ForBatch, MicrobatchesKeepTheirSamples) {
  Plan plan;
  plan.microbatches = 8;
  EXPECT_EQ(ForBatch(plan, 32, 32).microbatches, 8);
  EXPECT_EQ(ForBatch(plan, 32, 64).microbatches, 16);
  EXPECT_EQ(ForBatch(plan, 32, 30).microbatches, 6);
  EXPECT_EQ(ForBatch(plan, 32, 1).microbatches, 1);
}

// It is of so many microbatches.
TEST(ForBatch, OtherMicrobatchesHaveNoTable) {
  Plan plan;
  plan.microbatches = 2;
  plan.schedule = "table";
  plan.actions = *ParseActionTable("F0 F1 B0 B1\nF0 B0 F1 B1\n");
  EXPECT_EQ(ForBatch(plan, 8, 8), plan);
  // As many of half as many samples.
  EXPECT_EQ(ForBatch(plan, 4, 2).microbatches, 1);
  const Plan twice = ForBatch(plan, 8, 16);
  EXPECT_EQ(twice.microbatches, 4);
  EXPECT_EQ(twice.schedule, "1f1b");
  EXPECT_TRUE(twice.actions.empty());
  plan.actions = *ParseActionTable(
      "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0\n"
      "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0\n");
  const Plan chunks = ForBatch(plan, 8, 16);
  EXPECT_EQ(chunks.schedule, "interleaved");
  EXPECT_TRUE(chunks.actions.empty());
}

// Stages that no strategy has stay.
TEST(AdaptedPlans, KeepStagesOfTheirOwnForAnotherBatch) {
  const Cluster cluster = *MakeCluster("local-cpu:4");
  const Graph half = testing::MlpGraph(4, 8, 4, 8, 16, 32);
  const SearchSpace of_half(half, cluster);
  Strategy own = *ParseStrategy("dp=2,pp=2,mbs=2");
  own.schedule = "table";
  own.actions = *ParseActionTable("F0 F1 B0 B1\nF0 B0 F1 B1\n");
  Plan plan = *PlanFromStrategy(of_half.index, cluster, own);
  // The last layer of the first stage goes to the second.
  int block = 0;
  while (
      plan.ops[of_half.index.nodes_of_block[static_cast<size_t>(block + 1)][0]
                   .index()]
          .group.value == 0) {
    ++block;
  }
  for (NodeId node : of_half.index.nodes_of_block[static_cast<size_t>(block)]) {
    plan.ops[node.index()].group = GroupId(1);
  }
  ASSERT_TRUE(MakeCanonical(of_half, plan));
  const Graph graph = testing::MlpGraph(4, 16, 4, 8, 16, 32);
  const SearchSpace space(graph, cluster);
  plan.graph_fingerprint = space.index.fingerprint;
  const auto plans = AdaptedPlans(space, ForBatch(plan, 8, 16), 1);
  ASSERT_EQ(plans.size(), 1u);
  EXPECT_TRUE(plans[0].ops == plan.ops);
  EXPECT_EQ(plans[0].schedule, "1f1b");
  EXPECT_EQ(plans[0].microbatches, 4);
}

// Of the cluster's plans those with tp 2 alone, each once: the given one has
// it, too, and is the nearest uniform one.
TEST(AdaptedPlans, AreAllowedAndEachOnce) {
  const Cluster cluster = *MakeCluster("local-cpu:4");
  const Graph graph = testing::MlpGraph(4, 8, 4, 8, 16, 32);
  SearchSpace space(graph, cluster);
  space.constraints =
      Constraints::Make(space.index, cluster, {.fix = {{"h.*=tp:2"}}}).value();
  for (const char* old : {"tp=2,mbs=2", "tp=4,mbs=2"}) {
    SCOPED_TRACE(old);
    const auto plans = AdaptedPlans(
        space, *PlanFromStrategy(space.index, cluster, *ParseStrategy(old)), 8);
    ASSERT_FALSE(plans.empty());
    for (size_t p = 0; p < plans.size(); ++p) {
      EXPECT_TRUE(Allowed(space, plans[p]));
      for (size_t q = 0; q < p; ++q) {
        EXPECT_FALSE(SameUpToNames(plans[p], plans[q]));
      }
    }
  }
}

// A cut over two of eight ranks, on half as many devices, and where two are
// all.
TEST(AdaptedPlans, KeepACutOverFewRanksWhereThereAreMore) {
  const Graph graph = testing::MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster eight = *MakeCluster("local-cpu:8");
  const Plan old = *PlanFromStrategy(
      GraphIndex(graph), eight, *ParseStrategy("mbs=1,zero=3,zero-group=2"));
  for (const auto& [name, group] :
       {std::pair("local-cpu:4", 2), std::pair("local-cpu:2", 0)}) {
    const Cluster cluster = *MakeCluster(name);
    const SearchSpace space(graph, cluster);
    const auto plans = AdaptedPlans(space, old, 1);
    ASSERT_EQ(plans.size(), 1u) << name;
    const auto strategy = UniformStrategy(space.index, cluster, plans[0]);
    ASSERT_TRUE(strategy.has_value()) << name;
    EXPECT_EQ(strategy->zero, 3);
    EXPECT_EQ(strategy->zero_group, group) << name;
  }
}

// Of four layers of equally many parameters one is cut over two ranks: most
// are not cut, over whatever ranks.
TEST(RoughStrategy, IsCutAsMostParametersAre) {
  const Graph graph = testing::MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  const SearchSpace space(graph, cluster);
  Plan plan = *PlanFromStrategy(space.index, cluster, *ParseStrategy("mbs=1"));
  const Plan cut = *PlanFromStrategy(
      space.index, cluster, *ParseStrategy("mbs=1,zero=2,zero-group=2"));
  for (const size_t w : space.weights_of_block[2]) {
    plan.weights[w] = cut.weights[w];
  }
  ASSERT_TRUE(MakeCanonical(space, plan));
  ASSERT_FALSE(UniformStrategy(space.index, cluster, plan).has_value());
  const Strategy rough = RoughStrategy(space.index, plan);
  EXPECT_EQ(rough.zero, 0);
  EXPECT_EQ(rough.zero_group, 0);
  EXPECT_EQ(RoughStrategy(space.index, cut).zero, 2);
  EXPECT_EQ(RoughStrategy(space.index, cut).zero_group, 2);
}

// Three devices do not divide the batch of 8: of the sequence of 6 tokens each
// has 2. A pipeline of three would be as near by its degrees.
TEST(NearestOfItsKind, HasAPipelineOnlyBesideOne) {
  const Cluster cluster = *MakeCluster("local-cpu:3");
  const Graph graph = testing::MlpGraph(4, 8, 6, 8, 16, 32);
  const SearchSpace space(graph, cluster);
  Strategy data;
  data.dp = 3;
  data.mbs = 1;
  data.zero = 3;
  const auto near = NearestOfItsKind(space, data);
  ASSERT_TRUE(near.has_value());
  EXPECT_EQ(near->pp, 1);
  EXPECT_EQ(near->dp, 1);
  EXPECT_EQ(near->mbs, 4);  // nearest to the 3 of all replicas
  EXPECT_EQ(near->zero, near->cp > 1 ? 3 : 0);
  Strategy pipeline = data;
  pipeline.dp = 1;
  pipeline.pp = 2;
  const auto stages = NearestOfItsKind(space, pipeline);
  ASSERT_TRUE(stages.has_value());
  EXPECT_EQ(stages->pp, 3);
}

// Seven ranks have no share of the batch, of one token, or of four columns; nor
// are there seven blocks.
TEST(NearestOfItsKind, IsNoneWhereNoneIsValid) {
  const Cluster cluster = *MakeCluster("local-cpu:7");
  const Graph graph = testing::TwoLayerGraph(8, 4, 6);
  const SearchSpace space(graph, cluster);
  Strategy data;
  data.dp = 7;
  data.mbs = 1;
  EXPECT_FALSE(NearestOfItsKind(space, data).has_value());
  data.dp = 1;
  data.pp = 7;
  EXPECT_FALSE(NearestOfItsKind(space, data).has_value());
}

}  // namespace
}  // namespace tessera
