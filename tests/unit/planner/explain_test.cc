#include "planner/search/explain.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "planner/plan/describe.h"
#include "planner/plan/validate.h"
#include "planner/schedule/action_table.h"
#include "planner/search/adapt.h"
#include "planner/search/baselines.h"
#include "planner/search/idle_in_plan.h"
#include "planner/search/textbook.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"
#include "tests/support/uniform_plan.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MlpGraph;
using ::testing::Not;
using testing::ToyObjective;
using testing::Uniform;

Cluster Made(std::string_view spec) {
  auto cluster = MakeCluster(spec);
  TESSERA_CHECK(cluster.has_value()) << cluster.error().ToString();
  return *std::move(cluster);
}

Strategy Parsed(std::string_view text) {
  auto strategy = ParseStrategy(text);
  TESSERA_CHECK(strategy.has_value()) << strategy.error().ToString();
  return *std::move(strategy);
}

TEST(Explain, PricesTheAlternativesOfEachDecision) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:4");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  const Strategy own = Parsed("dp=2,tp=2,mbs=2,zero=1");
  const auto decisions = DecisionsOf(space, objective, own, 1, nullptr);
  ASSERT_FALSE(decisions.empty());
  for (const Decision& decision : decisions) {
    ASSERT_FALSE(decision.alternatives.empty()) << decision.name;
    for (size_t i = 0; i < decision.alternatives.size(); ++i) {
      const Alternative& other = decision.alternatives[i];
      EXPECT_NE(other.choice, decision.chosen);
      EXPECT_EQ(other.score, *objective.EvaluateUniform(space.index, cluster,
                                                        other.strategy));
      if (i > 0) {
        EXPECT_FALSE(Better(other.score, decision.alternatives[i - 1].score));
      }
    }
  }
  // Tensor parallelism of 1 and 4 on 4 devices, each with the best of its
  // microbatches, with and without sequence parallelism.
  const Decision& tensor = decisions[0];
  EXPECT_EQ(tensor.name, "tensor parallelism");
  EXPECT_EQ(tensor.chosen, "tp 2, dp 2");
  ASSERT_EQ(tensor.alternatives.size(), 2u);
  for (const Alternative& other : tensor.alternatives) {
    std::optional<Score> best;
    for (const char* sp : {"0", "1"}) {
      for (const char* mbs : {"1", "2", "4", "8"}) {
        Strategy s = other.strategy;
        s.mbs = std::stoi(mbs);
        s.sp = sp[0] == '1';
        if (s.sp && s.tp == 1) continue;
        const auto score = objective.EvaluateUniform(space.index, cluster, s);
        if (score && (!best || Better(*score, *best))) best = score;
      }
    }
    ASSERT_TRUE(best.has_value());
    EXPECT_EQ(other.score, *best) << other.choice;
  }
}

// Without copies of the weights no key of theirs has an effect: the choice
// stays, without them.
TEST(Explain, PricesAlternativesWithoutReplicas) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:4");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  for (const char* own :
       {"dp=4,mbs=2", "dp=4,mbs=2,bucket=25MB", "dp=4,mbs=2,zero=3,prefetch=2",
        "dp=4,mbs=2,dp-kind=rooted"}) {
    const auto decisions =
        DecisionsOf(space, objective, Parsed(own), 1, nullptr);
    const auto tensor =
        std::ranges::find(decisions, "tensor parallelism", &Decision::name);
    ASSERT_NE(tensor, decisions.end()) << own;
    const auto whole = std::ranges::find(tensor->alternatives, "tp 4, dp 1",
                                         &Alternative::choice);
    ASSERT_NE(whole, tensor->alternatives.end()) << own;
    std::optional<Score> best;
    for (const char* other : {"tp=4", "tp=4,sp=1", "tp=4,sp=1,bucket=25MB"}) {
      for (const char* mbs : {"1", "2", "4", "8"}) {
        const auto score = objective.EvaluateUniform(
            space.index, cluster,
            Parsed(std::string(other) + ",dp=1,mbs=" + mbs));
        if (score && (!best || Better(*score, *best))) best = score;
      }
    }
    EXPECT_EQ(whole->score, *best) << own;
  }
}

// On two nodes replicas of a stage lie within one: ZeRO within nodes is ZeRO.
// What a single sample is shared by is no balance.
TEST(Explain, HasNoOtherWordsForTheSamePlan) {
  const Graph graph = MlpGraph(4, 16, 4, 8, 16, 32);
  const Cluster cluster = Made("dgx-h100:1x4+dgx-a100-80gb:1x4");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  for (const char* own :
       {"pp=2,dp=4,mbs=2,zero=1", "dp=8,mbs=2,zero=1,balance=speed"}) {
    const Plan plan = Uniform(space, own);
    for (const Decision& decision :
         DecisionsOf(space, objective, Parsed(own), 1, nullptr)) {
      for (const Alternative& other : decision.alternatives) {
        const Plan of = Uniform(space, *FlagTextOf(other.strategy));
        EXPECT_FALSE(SameUpToNames(of, plan)) << other.choice;
        EXPECT_FALSE(FirstIdleIn(space.index, cluster, other.strategy, of))
            << ToString(other.strategy);
      }
    }
  }
}

// A table runs one number of stages and of microbatches: other choices have
// the default schedule.
TEST(Explain, PricesAlternativesOfAPlanWithATable) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:4");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  Strategy own = Parsed("dp=2,pp=2,mbs=2");
  own.schedule = "table";
  own.actions = *ParseActionTable("F0 F1 B0 B1\nF0 B0 F1 B1\n");
  ASSERT_TRUE(PlanFromStrategy(space.index, cluster, own).has_value());
  std::map<std::string_view, int> alternatives;
  for (const Decision& decision :
       DecisionsOf(space, objective, own, 1, nullptr)) {
    for (const Alternative& other : decision.alternatives) {
      ++alternatives[decision.name];
      const Strategy& s = other.strategy;
      const bool same_shape = s.pp == 2 && s.mbs * s.dp == 4;
      EXPECT_EQ(s.schedule == "table",
                same_shape && decision.name != "schedule")
          << decision.name << ": " << other.choice;
      EXPECT_EQ(s.schedule == "table", !s.actions.empty());
    }
  }
  // 8 samples over 2 replicas: microbatches of 1 and 4; pipelines of 1 and 4.
  EXPECT_EQ(alternatives["microbatch"], 2);
  EXPECT_EQ(alternatives["pipeline parallelism"], 2);
  EXPECT_GT(alternatives["tensor parallelism"], 0);
  EXPECT_GT(alternatives["ZeRO"], 0);
}

// Twice the batch in as many samples a microbatch: the table is of half as
// many.
TEST(AdaptedPlans, KeepStagesWhoseTableIsOfAnotherShape) {
  const Cluster cluster = Made("local-cpu:4");
  const Graph half = MlpGraph(4, 8, 4, 8, 16, 32);
  Strategy own = Parsed("dp=2,pp=2,mbs=2");
  own.schedule = "table";
  own.actions = *ParseActionTable("F0 F1 B0 B1\nF0 B0 F1 B1\n");
  const Plan plan = *PlanFromStrategy(half, cluster, own);
  const Graph graph = MlpGraph(4, 16, 4, 8, 16, 32);
  const SearchSpace space(graph, cluster);
  const auto plans = AdaptedPlans(space, ForBatch(plan, 8, 16), 1);
  ASSERT_EQ(plans.size(), 1u);
  EXPECT_TRUE(
      SameUpToNames(plans[0], Uniform(space, "dp=2,pp=2,mbs=2,schedule=1f1b")));
}

// On one device nothing is cut, reduced or rooted.
TEST(AdaptedPlans, DropWhatHasNoEffectOnFewerDevices) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster four = Made("local-cpu:4");
  const SearchSpace of_four(graph, four);
  const Cluster one = Made("local-cpu:1");
  const SearchSpace space(graph, one);
  for (const char* old : {"mbs=2", "mbs=2,zero=1", "mbs=2,bucket=25MB",
                          "mbs=2,dp-kind=rooted", "tp=4,sp=1,mbs=2"}) {
    const auto plans = AdaptedPlans(space, Uniform(of_four, old), 1);
    ASSERT_EQ(plans.size(), 1u) << old;
    EXPECT_TRUE(SameUpToNames(plans[0], Uniform(space, "mbs=2"))) << old;
  }
}

TEST(Explain, FindsNeighboursByEveryMoveThatApplies) {
  const Graph graph = MlpGraph(2, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:4");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  const Plan plan = Uniform(space, "dp=2,tp=2,mbs=2");
  const auto neighbours = NeighboursOf(space, objective, plan, 16, 3, nullptr);
  EXPECT_GT(neighbours.size(), 5u);
  for (size_t i = 0; i < neighbours.size(); ++i) {
    const Neighbour& n = neighbours[i];
    EXPECT_TRUE(IsValid(space.index, cluster, n.plan));
    EXPECT_FALSE(SameUpToNames(n.plan, plan)) << n.move->name;
    EXPECT_EQ(n.evaluation, objective.Evaluate(n.plan)) << n.move->name;
    // The toy does not look at buckets or prefetching.
    EXPECT_NE(n.evaluation, objective.Evaluate(plan)) << n.move->name;
    EXPECT_THAT(n.changes, Not(IsEmpty())) << n.move->name;
    if (i > 0) {
      EXPECT_FALSE(Better(n.evaluation, neighbours[i - 1].evaluation));
    }
  }
}

// On one device no ZeRO stage has an effect, or a word.
TEST(Explain, LeavesOutNeighboursThatDifferInNothingWithAName) {
  const Graph graph = MlpGraph(2, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:1");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  const Plan plan = Uniform(space, "mbs=2");
  Plan other = plan;
  for (WeightPlacement& weight : other.weights) weight.zero_stage = 1;
  ASSERT_FALSE(SameUpToNames(other, plan));
  EXPECT_THAT(NamedChanges(space, plan, other), IsEmpty());
  const auto neighbours = NeighboursOf(space, objective, plan, 16, 3, nullptr);
  EXPECT_THAT(neighbours, Not(IsEmpty()));
  for (const Neighbour& n : neighbours) {
    EXPECT_NE(n.move->name, "zero");
    ASSERT_THAT(n.changes, Not(IsEmpty())) << n.move->name;
    EXPECT_NE(n.changes[0].what, "details") << n.move->name;
  }
}

TEST(Explain, NamesPlansAsTheTextbookDoes) {
  const Graph graph = MlpGraph(6, 32, 16, 64, 64, 64);
  const Cluster cluster = Made("dgx-a100-80gb:2");
  const SearchSpace space(graph, cluster);
  const auto name = [&](std::string_view text) {
    return TextbookName(space, Uniform(space, text));
  };
  EXPECT_EQ(name(""), "data parallelism (16)");
  EXPECT_EQ(name("zero=3,zero-group=node"),
            "ZeRO-3 hybrid data parallelism (16)");
  EXPECT_EQ(name("tp=8,zero=1"),
            "ZeRO-1 data parallelism (2) with tensor parallelism (8) inside "
            "the node");
  EXPECT_EQ(name("tp=16,sp=1"),
            "tensor and sequence parallelism (16) across nodes");
  EXPECT_EQ(name("tp=4,pp=2,recompute=full"),
            "data parallelism (2) with tensor parallelism (4) inside the node "
            "and a pipeline of 2 stages, full recomputation");
  EXPECT_THAT(name("tp=4,recompute=full:3"),
              HasSubstr(", full recomputation in 3 of 6 layers"));
  // With data parallelism innermost, tensor parallelism is across nodes.
  EXPECT_THAT(name("tp=4,order=dp-tp-cp-ep-pp"),
              HasSubstr("tensor parallelism (4) across nodes"));
}

// All but for one weight that is not cut and one layer's product on whole
// operands: its degrees, and how these lie on the fabric.
TEST(Explain, NamesPlansThatAreNearlyUniformAsTheirNearest) {
  const Graph graph = MlpGraph(6, 32, 16, 64, 64, 64);
  const Cluster cluster = Made("dgx-a100-80gb:2");
  const SearchSpace space(graph, cluster);
  for (const auto& [text, name] :
       {std::pair("tp=2,mbs=2,zero=1", "tensor parallelism (2) inside"),
        std::pair("tp=2,mbs=2,order=tp-cp-ep-pp-dp,zero=3,zero-group=node",
                  "tensor parallelism (2) inside"),
        std::pair("tp=2,pp=2,mbs=2,order=pp-tp-cp-ep-dp,zero=1",
                  "a pipeline of 2 stages"),
        std::pair("tp=4,mbs=2,sp=1,tiles=2,zero=1,recompute=full:3",
                  "full recomputation in 3 of 6 layers"),
        std::pair("tp=4,mbs=2,order=dp-tp-cp-ep-pp,zero=3",
                  "tensor parallelism (4) across nodes")}) {
    SCOPED_TRACE(text);
    Plan plan = Uniform(space, text);
    const auto uniform = UniformStrategy(space.index, cluster, plan);
    ASSERT_TRUE(uniform.has_value());
    EXPECT_EQ(NearestStrategy(space, plan), uniform);
    EXPECT_THAT(TextbookName(space, plan), Not(HasSubstr("of its own")));
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      if (graph.nodes[i].name == "h.1.up") plan.ops[i].axes = {};
    }
    plan.weights[2].zero_stage = 0;
    ASSERT_TRUE(MakeCanonical(space, plan));
    ASSERT_FALSE(UniformStrategy(space.index, cluster, plan).has_value());
    const auto near = NearestStrategy(space, plan);
    ASSERT_TRUE(near.has_value());
    EXPECT_EQ(ToString(*near), ToString(*uniform));
    EXPECT_THAT(TextbookName(space, plan),
                AllOf(HasSubstr(name),
                      HasSubstr(", with layers or weights of its own")));
  }
}

// Two nodes of eight: 8 ranks are within one, and 4 are no node.
TEST(Explain, SaysOverWhichRanksZeroCuts) {
  const Graph graph = MlpGraph(6, 32, 16, 64, 64, 64);
  const Cluster cluster = Made("dgx-a100-80gb:2");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  Strategy strategy = Parsed("mbs=2,zero=3,zero-group=4");
  strategy.dp = 16;
  const auto decisions =
      DecisionsOf(space, objective, strategy, 1, nullptr, nullptr);
  const auto zero = std::ranges::find(decisions, "ZeRO", &Decision::name);
  ASSERT_NE(zero, decisions.end());
  EXPECT_EQ(zero->chosen, "ZeRO-3 within 4 ranks");
  EXPECT_THAT(zero->alternatives,
              Contains(Field(&Alternative::choice, "ZeRO-3 within nodes")));
}

TEST(Explain, SaysInHowManyLayersWorkIsDoneAgain) {
  const Graph graph = MlpGraph(6, 32, 16, 64, 64, 64);
  const Cluster cluster = Made("local-cpu:4");
  const SearchSpace space(graph, cluster);
  Plan plan = *PlanFromStrategy(space.index, cluster,
                                Parsed("dp=2,tp=2,recompute=full"));
  const auto [first, last] = Layers(space.index);
  ASSERT_GT(last - first, 2);
  // One layer keeps all it makes, another all but one of its results.
  for (NodeId node : space.index.nodes_of_block[static_cast<size_t>(first)]) {
    plan.ops[node.index()].recompute = false;
  }
  EXPECT_THAT(
      TextbookName(space, plan),
      HasSubstr(", full recomputation in " + std::to_string(last - first - 1) +
                " of " + std::to_string(last - first) + " layers, with"));
  const auto& nodes =
      space.index.nodes_of_block[static_cast<size_t>(first + 1)];
  for (size_t i = 1; i < nodes.size(); ++i) {
    plan.ops[nodes[i].index()].recompute = false;
  }
  EXPECT_THAT(TextbookName(space, plan),
              HasSubstr(", partial recomputation in "));
}

TEST(Explain, SaysHowMuchIsOffloaded) {
  const Graph graph = MlpGraph(6, 32, 16, 64, 64, 64);
  const Cluster cluster = Made("dgx-a100-80gb:1");
  const SearchSpace space(graph, cluster);
  Plan plan = *PlanFromStrategy(space.index, cluster,
                                Parsed("dp=8,zero=1,offload=optimizer:host"));
  EXPECT_THAT(TextbookName(space, plan), HasSubstr(", optimizer on the host"));
  const int64_t moved = space.index.weights[0].elements;
  int64_t all = 0;
  for (const auto& weight : space.index.weights) all += weight.elements;
  for (WeightPlacement& weight : plan.weights) {
    weight.optimizer_tier = MemoryTier::kDevice;
  }
  plan.weights[0].optimizer_tier = MemoryTier::kFile;
  EXPECT_THAT(TextbookName(space, plan),
              HasSubstr(", optimizer in files" +
                        ShareText(moved, all, "parameters") + ", with"));
}

// Shares that round to none or to all are neither.
TEST(Describe, SaysOfHowManyParameters) {
  const Graph graph = MlpGraph(6, 32, 16, 64, 64, /*vocabulary=*/2);
  const Cluster cluster = Made("dgx-a100-80gb:1");
  const SearchSpace space(graph, cluster);
  Plan plan = *PlanFromStrategy(space.index, cluster, Parsed("dp=8"));
  size_t smallest = 0;
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (space.index.weights[w].elements <
        space.index.weights[smallest].elements) {
      smallest = w;
    }
  }
  plan.weights[smallest].optimizer_tier = MemoryTier::kHost;
  EXPECT_THAT(Describe(graph, cluster, plan),
              HasSubstr("its step on the host for less than 1% of the "
                        "parameters\n"));
  for (WeightPlacement& weight : plan.weights) {
    weight.optimizer_tier = MemoryTier::kHost;
  }
  EXPECT_THAT(Describe(graph, cluster, plan),
              HasSubstr("its step on the host\n"));
  plan.weights[smallest].optimizer_tier = MemoryTier::kDevice;
  EXPECT_THAT(Describe(graph, cluster, plan),
              HasSubstr("its step on the host for more than 99% of the "
                        "parameters\n"));
}

TEST(ChangesBetween, SaysWhatDiffersAndNothingElse) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:4");
  const SearchSpace space(graph, cluster);
  const auto changes = [&](std::string_view a, std::string_view b) {
    std::vector<std::string> all;
    for (const PlanDifference& c : ChangesBetween(
             space.index, cluster, Uniform(space, a), Uniform(space, b))) {
      all.push_back(c.what + ": " + c.from + " -> " + c.to);
    }
    return all;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(changes("tp=2", "tp=2"), IsEmpty());
  // 8 samples over 2 replicas: 4 microbatches of one each, or 2 of two.
  EXPECT_THAT(changes("tp=2", "tp=2,mbs=2"),
              ElementsAre("microbatches: 4 -> 2"));
  EXPECT_THAT(changes("tp=2", "tp=2,zero=1"),
              ElementsAre("weights: optimizer state whole on every replica -> "
                          "ZeRO-1: optimizer state cut over 2"));
  EXPECT_THAT(changes("pp=2,mbs=2", "pp=2,mbs=2,schedule=gpipe"),
              ElementsAre("schedule: 1f1b -> gpipe"));
  const auto layers = changes("tp=2", "tp=2,recompute=full");
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_THAT(layers[0], HasSubstr("h.0 … h.3 (4): data-parallel 2"));
  EXPECT_THAT(layers[0], HasSubstr("recompute full"));
}

// Whatever is asked, the table has an answer, of approaches that there are.
// On hosts of one device there is nothing to cut within.
TEST(Baselines, HaveHybridZeroOnHostsOfSeveralDevices) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const auto row =
      std::ranges::find(BaselineRows(), "Hybrid ZeRO", &BaselineRow::name);
  ASSERT_NE(row, BaselineRows().end());
  for (const auto& [spec, has] :
       {std::pair("dgx-a100-80gb:2x2", true), {"dgx-a100-80gb:4x1", false}}) {
    const Cluster cluster = Made(spec);
    EXPECT_EQ(row->choices(SearchSpace(graph, cluster)).empty(), !has) << spec;
  }
}

TEST(Textbook, AdvisesInEverySituation) {
  for (const Advice& advice : Advices()) {
    EXPECT_THAT(advice.approaches, Not(IsEmpty())) << advice.situation;
    for (const std::string_view name : advice.approaches) {
      EXPECT_TRUE(FindApproach(name).has_value()) << name;
    }
  }
  std::vector<int> applies(Advices().size());
  for (const auto& [devices, nodes] :
       {std::pair(1, 1), std::pair(8, 1), std::pair(16, 2)}) {
    for (int bits = 0; bits < 32; ++bits) {
      const auto bit = [&](int i) { return (bits >> i & 1) == 1; };
      const Situation situation = {devices, nodes,  bit(0), bit(1),
                                   bit(2),  bit(3), bit(4)};
      ++applies[static_cast<size_t>(&AdviceFor(situation) - Advices().data())];
    }
  }
  EXPECT_THAT(applies, Not(::testing::Contains(0)));
}

TEST(Textbook, SaysWhyAnApproachHasNoPlan) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const auto why = [&](std::string_view name, std::string_view devices) {
    const Cluster cluster = Made(devices);
    const SearchSpace space(graph, cluster);
    const Approach& approach = **FindApproach(name);
    EXPECT_FALSE(BestOf(approach, space, ToyObjective(graph), 1, nullptr))
        << name << " on " << devices;
    return WhyNone(approach, space);
  };
  EXPECT_EQ(why("no split", "local-cpu:4"), "the cluster has 4 devices");
  EXPECT_EQ(why("TP", "local-cpu:1"), "the cluster has one device");
  EXPECT_EQ(why("DDP", "local-cpu:3"),
            "mbs=1 * dp=3 = 3: expected a divisor of the global batch 8");
  EXPECT_EQ(why("ZeRO", "local-cpu:3"), why("DDP", "local-cpu:3"));
  EXPECT_THAT(why("PP+TP+DP", "local-cpu:3"),
              HasSubstr("3 devices have no such degrees"));
  EXPECT_THAT(why("PP+TP+DP+ZeRO-1", "local-cpu:4"),
              HasSubstr("with tp=2, pp=2: zero=1 has no effect"));
}

// The search's own grid goes over nodes of one device; the textbook's does not.
TEST(Textbook, HasTensorRanksWithinNodes) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  for (const auto& [devices, most] :
       {std::pair{"dgx-a100-80gb:8x1", 1}, std::pair{"dgx-a100-80gb:2x4", 4}}) {
    const Cluster cluster = Made(devices);
    const SearchSpace space(graph, cluster);
    int widest = 1;
    for (const Approach& approach : Approaches()) {
      for (const Strategy& s : approach.strategies(space)) {
        widest = std::max(widest, s.tp);
      }
    }
    EXPECT_EQ(widest, most) << devices;
  }
}

// Whether a replica fits has nothing to do with what the devices divide.
TEST(Textbook, KnowsThatAReplicaFitsWithoutAPlanOfReplicas) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:3");
  const SearchSpace space(graph, cluster);
  const auto fits = [&](int64_t elements) {
    const ToyObjective objective(graph, elements);
    return SituationOf(space, objective, false, false, 1, nullptr).fits;
  };
  EXPECT_TRUE(fits(1'000'000));
  EXPECT_FALSE(fits(100));
}

// Where there are experts, ranks that offload may have some each.
TEST(Textbook, OffloadsWithExpertsOnRanksOfTheirOwn) {
  const auto any_split = [](const Graph& graph) {
    const Cluster cluster = Made("dgx-a100-80gb:1x4");
    const SearchSpace space(graph, cluster);
    const auto approach = std::ranges::find(
        Approaches(), "ZeRO with CPU offload", &Approach::name);
    return std::ranges::any_of(approach->strategies(space),
                               [](const Strategy& s) { return s.ep > 1; });
  };
  EXPECT_FALSE(any_split(MlpGraph(2, 16, 4, 8, 16, 32)));
  EXPECT_TRUE(any_split(testing::MoeGraph(2, 16, 4, 8, 16, 4, 32)));
}

TEST(Textbook, PricesTheBestOfAnApproach) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = Made("local-cpu:4");
  const SearchSpace space(graph, cluster);
  const ToyObjective objective(graph);
  for (const Approach& approach : Approaches()) {
    const auto best = BestOf(approach, space, objective, 1, nullptr);
    std::optional<Score> expected;
    for (const Strategy& strategy : approach.strategies(space)) {
      const auto score =
          objective.EvaluateUniform(space.index, cluster, strategy);
      if (score && (!expected || Better(*score, *expected))) expected = score;
    }
    ASSERT_EQ(best.has_value(), expected.has_value()) << approach.name;
    if (best) {
      EXPECT_EQ(best->score, *expected) << approach.name;
    }
  }
  const auto degrees = [&](std::string_view name) {
    return BestOf(**FindApproach(name), space, objective, 1, nullptr)->strategy;
  };
  EXPECT_EQ(degrees("DDP").dp, 4);
  EXPECT_GT(degrees("ZeRO").zero, 0);
  EXPECT_GT(degrees("TP").tp, 1);
  EXPECT_GT(degrees("PP").pp, 1);
}

}  // namespace
}  // namespace tessera
