#include "planner/plan/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using testing::AttentionGraph;
using ::testing::HasSubstr;
using testing::MlpGraph;
using testing::MoeGraph;
using ::testing::Not;

std::string AllText(const std::vector<Error>& errors) {
  std::string text;
  for (const Error& error : errors) text += error.ToString() + "\n";
  return text;
}

class ValidateTest : public ::testing::Test {
 protected:
  ValidateTest()
      : graph_(MlpGraph(2, 8, 4, 8, 12, 32)),
        cluster_(*MakeCluster("local-cpu:8")) {}

  Plan Make(std::string_view strategy) const {
    auto plan = PlanFromStrategy(graph_, cluster_, *ParseStrategy(strategy));
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    return *std::move(plan);
  }

  // The errors after `change`, one line each.
  std::string After(std::string_view strategy,
                    const std::function<void(Plan&)>& change) const {
    Plan plan = Make(strategy);
    EXPECT_EQ(AllText(Validate(graph_, cluster_, plan)), "");
    change(plan);
    return AllText(Validate(graph_, cluster_, plan));
  }

  size_t NodeCalled(std::string_view name) const {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (graph_.nodes[i].name == name) return i;
    }
    ADD_FAILURE() << name;
    return 0;
  }
  size_t FactorOf(size_t node, char letter) const {
    return static_cast<size_t>(graph_.nodes[node].rule.FactorOf(letter));
  }

  Graph graph_;
  Cluster cluster_;
};

TEST_F(ValidateTest, AnotherModelIsTheOnlyThingSaid) {
  const std::string text = After("tp=2", [](Plan& plan) {
    plan.graph_fingerprint = "0123456789abcdef";
    plan.microbatches = 0;
  });
  EXPECT_THAT(text, HasSubstr("graph_fingerprint: the plan is for another "
                              "model: its graph is '0123456789abcdef'"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
}

TEST_F(ValidateTest, AnotherNameOfTheClusterIsNoError) {
  EXPECT_EQ(After("", [](Plan& plan) { plan.cluster_name = "elsewhere"; }), "");
}

TEST_F(ValidateTest, DevicesExistAndBelongToOneGroup) {
  EXPECT_THAT(After("pp=2",
                    [](Plan& plan) {
                      plan.cluster_name = "big";
                      plan.groups[1].devices[2] = DeviceId(31);
                    }),
              HasSubstr("groups[1].devices[2]: device 31 does not exist: "
                        "cluster 'local-cpu:8' has 8 devices (the plan was "
                        "made for 'big')"));
  EXPECT_THAT(After("pp=2",
                    [](Plan& plan) {
                      plan.groups[1].devices[0] = plan.groups[1].devices[3];
                    }),
              HasSubstr("groups[1].devices[3]: device 7 is already in group "
                        "'stage1'"));
}

TEST_F(ValidateTest, MeshesFitTheirDevices) {
  EXPECT_THAT(After("", [](Plan& plan) { plan.groups[0].axes.pop_back(); }),
              HasSubstr("groups[0].axes: the mesh has 4 positions for 8 "
                        "devices"));
  // 2^31 * 2^31 would not be told from 0 in 64 bits after a third.
  EXPECT_THAT(After("",
                    [](Plan& plan) {
                      for (MeshAxis& axis : plan.groups[0].axes) {
                        axis.size = INT32_MAX;
                      }
                    }),
              HasSubstr("groups[0].axes: the mesh has more than 2147483647 "
                        "positions"));
  EXPECT_THAT(After("", [](Plan& plan) { plan.groups[0].axes[1].size = 0; }),
              HasSubstr("groups[0].axes[1].size: is 0"));
  EXPECT_THAT(After("", [](Plan& plan) { plan.groups[0].axes.resize(40); }),
              HasSubstr("groups[0].axes: has 40 axes: expected at most 24"));
  EXPECT_THAT(After("",
                    [](Plan& plan) {
                      plan.groups[0].axes[1].name = plan.groups[0].axes[0].name;
                    }),
              HasSubstr("groups[0].axes[1].name: 'dp0' occurs twice"));
  EXPECT_THAT(After("pp=2", [](Plan& plan) { plan.groups[1].name = "stage0"; }),
              HasSubstr("groups[1].name: 'stage0' occurs twice"));
}

TEST_F(ValidateTest, ScheduleAndBatch) {
  EXPECT_THAT(After("pp=2", [](Plan& plan) { plan.schedule = "2f2b"; }),
              HasSubstr("schedule: unknown schedule '2f2b'"));
  EXPECT_THAT(After("", [](Plan& plan) { plan.microbatches = 3; }),
              HasSubstr("microbatches: is 3: expected a divisor of the global "
                        "batch 8"));
  EXPECT_THAT(After("", [](Plan& plan) { plan.microbatches = 0; }),
              HasSubstr("microbatches: is 0: expected at least 1"));
}

TEST_F(ValidateTest, TheLossIsNotComputedTwice) {
  const size_t loss = NodeCalled("loss");
  EXPECT_THAT(
      After("", [&](Plan& plan) { plan.ops[loss].recompute = true; }),
      HasSubstr("'loss' recompute: 'cross_entropy' cannot run twice in a "
                "step"));
}

TEST_F(ValidateTest, ChunksAreInOrderAndTheScheduleRunsThem) {
  const std::string_view chunked = "pp=2,vp=2,schedule=interleaved";
  EXPECT_THAT(After(chunked, [](Plan& plan) { plan.schedule = "1f1b"; }),
              HasSubstr("schedule: 1f1b runs one chunk a stage, not 2 (vp)"));
  EXPECT_THAT(After("pp=2", [](Plan& plan) { plan.schedule = "interleaved"; }),
              HasSubstr("schedule: interleaved needs at least 2 chunks"));
  EXPECT_THAT(
      After(chunked, [](Plan& plan) { plan.ops[0].chunk = -1; }),
      HasSubstr("placements: node 'lookup': chunk -1: expected 0 to 3"));
  // Four blocks, one a position: the second one's chunk is left empty, and the
  // third sends back to it.
  EXPECT_THAT(After(chunked,
                    [&](Plan& plan) {
                      for (OpPlacement& op : plan.ops) {
                        if (op.group == GroupId(1)) op.chunk = 1;
                      }
                    }),
              AllOf(HasSubstr("groups[1]: group 'stage1' has no operator in "
                              "chunk 0"),
                    HasSubstr("from group 1, chunk 1; a pipeline sends to "
                              "later positions only")));
}

TEST_F(ValidateTest, TablesOfActionsAreChecked) {
  const auto with = [&](const std::function<void(StageOrders&)>& change) {
    return After("pp=2,mbs=1,dp=4", [&](Plan& plan) {
      plan.actions = OrdersOf(graph_, plan);
      plan.schedule = "table";
      change(plan.actions);
    });
  };
  EXPECT_EQ(with([](StageOrders&) {}), "");
  EXPECT_THAT(with([](StageOrders& orders) { orders.pop_back(); }),
              HasSubstr("actions: has 1 lists: expected 2"));
  EXPECT_THAT(with([](StageOrders& orders) { orders[1].pop_back(); }),
              HasSubstr("actions[1]: lacks B1"));
  EXPECT_THAT(with([](StageOrders& orders) { orders[0][1] = orders[0][0]; }),
              HasSubstr("actions[0].actions[1] 'F0': occurs twice"));
  // The last stage wants microbatch 1 first, the first returns 0 in between.
  EXPECT_THAT(with([](StageOrders& orders) {
                orders[0] = {{ActionKind::kForward, 0, 0},
                             {ActionKind::kBackward, 0, 0},
                             {ActionKind::kForward, 0, 1},
                             {ActionKind::kBackward, 0, 1}};
                orders[1] = {{ActionKind::kForward, 0, 1},
                             {ActionKind::kBackward, 0, 1},
                             {ActionKind::kForward, 0, 0},
                             {ActionKind::kBackward, 0, 0}};
              }),
              AllOf(HasSubstr("actions[0].actions[1] 'B0': waits forever"),
                    HasSubstr("actions[1].actions[0] 'F1': waits forever")));
  EXPECT_THAT(
      After("pp=2", [&](Plan& plan) { plan.actions = OrdersOf(graph_, plan); }),
      HasSubstr("actions: are for schedule 'table', not '1f1b'"));
}

TEST_F(ValidateTest, EmptyShardsAreRefusedAndRaggedOnesRun) {
  // Eight samples on eight replicas, two microbatches: four samples each.
  EXPECT_THAT(
      After("", [](Plan& plan) { plan.microbatches = 2; }),
      HasSubstr("placements: node 'lookup' factor 'b': an empty shard: its "
                "extent 4 (samples of a microbatch) is split over 8 "
                "ranks"));
  // 12 columns over 8 ranks: 1, 2, 1, 2, …
  const size_t up = NodeCalled("h.0.up");
  EXPECT_EQ(After("",
                  [&](Plan& plan) {
                    plan.ops[up].axes = {};
                    plan.ops[up].axes[FactorOf(up, 'f')] = 7;
                  }),
            "");
  // The sequence has four tokens.
  EXPECT_THAT(After("",
                    [&](Plan& plan) {
                      plan.ops[up].axes = {};
                      plan.ops[up].axes[FactorOf(up, 's')] = 7;
                    }),
              HasSubstr("'h.0.up' factor 's': an empty shard: its extent 4 is "
                        "split over 8 ranks"));
}

TEST_F(ValidateTest, SharesAreOfSamples) {
  const auto with = [](std::vector<int> shares) {
    return [shares](Plan& plan) { plan.groups[0].axes[0].shares = shares; };
  };
  // Eight samples over 2, 2, 2: one more for none.
  EXPECT_THAT(
      After("", with({3, 1})),
      HasSubstr("factor 'b': an empty shard: its extent 8 (samples of a "
                "microbatch) is split over 8 ranks of unequal shares"));
  EXPECT_EQ(After("tp=4", with({3, 1})), "");
  EXPECT_THAT(After("tp=4", with({3, 1, 1})),
              HasSubstr("groups[0].axes[0].shares: has 3 shares: expected 2"));
  EXPECT_THAT(After("tp=4", with({3, 0})),
              HasSubstr("groups[0].axes[0].shares: has 0: expected 1 to"));
  EXPECT_THAT(After("tp=4", with({1 << 21, 1})), HasSubstr("expected 1 to"));
  EXPECT_THAT(After("tp=8", with({3, 1})),
              HasSubstr("with unequal shares: only samples may be"));
}

TEST_F(ValidateTest, TilesAreOfLinearsAndHaveRows) {
  const auto with = [&](std::string_view node, int tiles) {
    return After("tp=4",
                 [&](Plan& plan) { plan.ops[NodeCalled(node)].tiles = tiles; });
  };
  // 12 rows over 4 ranks.
  EXPECT_EQ(with("h.0.up", 3), "");
  EXPECT_THAT(with("h.0.up", 4),
              HasSubstr("placements: node 'h.0.up' tiles: is 4: expected at "
                        "most 3, the rows of the smallest shard of "
                        "'h.0.up.w'"));
  EXPECT_THAT(with("h.0.up", 0), HasSubstr("is 0: expected at least 1"));
  EXPECT_THAT(with("h.0.act", 2),
              HasSubstr("expected 1, since only a linear runs in tiles, no "
                        "'silu'"));
}

TEST_F(ValidateTest, SplitsFollowTheRule) {
  const size_t norm = NodeCalled("h.1.norm");
  EXPECT_THAT(
      After("tp=2",
            [&](Plan& plan) { plan.ops[norm].axes[FactorOf(norm, 'h')] = 4; }),
      HasSubstr("'h.1.norm' factor 'h': cannot be split (rule "
                "'bsh!,h->bsh,bs')"));
  EXPECT_THAT(
      After("tp=2",
            [&](Plan& plan) { plan.ops[norm].axes[FactorOf(norm, 's')] = 1; }),
      HasSubstr("axis 'dp0' already serves another factor"));
  EXPECT_THAT(
      After("tp=2",
            [&](Plan& plan) { plan.ops[norm].axes[FactorOf(norm, 's')] = 8; }),
      HasSubstr("uses axis 3 of a mesh with 3 axes (group 'all')"));
  EXPECT_THAT(After("tp=2", [&](Plan& plan) { plan.ops[norm].axes[7] = 4; }),
              HasSubstr("splits factor 7"));
}

TEST_F(ValidateTest, GroupsExistAndStagesSendForward) {
  const size_t act = NodeCalled("h.0.act");
  // Two groups of one block are one stage.
  EXPECT_THAT(
      After("pp=2", [&](Plan& plan) { plan.ops[act].group = GroupId(1); }), "");
  // So are two that share a device.
  EXPECT_THAT(After("pp=2",
                    [](Plan& plan) {
                      plan.groups[1].devices[0] = plan.groups[0].devices[0];
                      for (OpPlacement& op : plan.ops) {
                        op.group = GroupId(1 - op.group.value);
                      }
                    }),
              "");
  EXPECT_THAT(
      After("pp=2", [&](Plan& plan) { plan.ops[act].group = GroupId(5); }),
      HasSubstr("group 5 does not exist: the plan has 2"));
  EXPECT_THAT(
      After("pp=2",
            [](Plan& plan) { std::swap(plan.groups[0], plan.groups[1]); }),
      "");  // names differ, the order of stages is the same
  EXPECT_THAT(After("pp=2",
                    [](Plan& plan) {
                      for (OpPlacement& op : plan.ops) {
                        op.group = GroupId(1 - op.group.value);
                      }
                    }),
              HasSubstr("a pipeline sends to later stages only"));
  EXPECT_THAT(After("pp=2",
                    [](Plan& plan) {
                      for (OpPlacement& op : plan.ops) op.group = GroupId(0);
                    }),
              HasSubstr("groups[1]: group 'stage1' has no operator"));
}

TEST_F(ValidateTest, WeightsAreCutWhereTheyAreReplicated) {
  EXPECT_THAT(
      After("tp=2,zero=1", [](Plan& plan) { plan.weights[0].zero_stage = 4; }),
      HasSubstr("weights: 'table' zero_stage: is 4: expected 0, 1, "
                "2 or 3"));
  EXPECT_THAT(
      After("tp=2,zero=1", [](Plan& plan) { plan.weights[0].zero_stage = 0; }),
      HasSubstr("weights: 'table' zero_axes: stage 0 cuts nothing"));
  EXPECT_THAT(
      After("tp=2,zero=1", [](Plan& plan) { plan.weights[0].zero_axes = 0; }),
      HasSubstr("weights: 'table' zero_axes: none, though ranks along axis "
                "'dp0' hold the same: expected some, or zero_stage 0"));
  EXPECT_THAT(
      After("tp=2,zero=1", [](Plan& plan) { plan.weights[0].zero_axes = 7; }),
      HasSubstr("axis 'tp0' already shards the weight itself at "
                "'lookup'"));
  EXPECT_THAT(
      After("tp=2,zero=1", [](Plan& plan) { plan.weights[0].zero_axes = 32; }),
      HasSubstr("uses axis 5 of a mesh with 3 axes"));
  EXPECT_THAT(After("", [](Plan& plan) { plan.weights.pop_back(); }),
              HasSubstr("weights: has"));
  EXPECT_THAT(After("", [](Plan& plan) { plan.ops.pop_back(); }),
              HasSubstr("placements: has"));
}

TEST_F(ValidateTest, WhatIsStreamedSplitsTheSequence) {
  const size_t norm = NodeCalled("h.0.norm");
  EXPECT_THAT(After("cp=2", [&](Plan& plan) { plan.ops[norm].streamed = 1; }),
              HasSubstr("'h.0.norm' streamed: 'rms_norm' has no operands that "
                        "can be streamed"));
  const Graph graph = AttentionGraph(1, 8, 8, 8, 2, 32);
  const auto made =
      PlanFromStrategy(graph, cluster_, *ParseStrategy("cp=4,cp-kind=ring"));
  ASSERT_TRUE(made.has_value()) << made.error().ToString();
  size_t attention = 0;
  while (graph.nodes[attention].op->name != "attention") ++attention;
  const AxisSet context = made->ops[attention].streamed;
  EXPECT_EQ(made->groups[0].Size(context), 4);
  Plan plan = *made;
  plan.ops[attention].streamed = made->groups[0].all_axes();
  EXPECT_THAT(AllText(Validate(graph, cluster_, plan)),
              HasSubstr("'h.0.attention' streamed: expected axes that split "
                        "factor 's' of the node"));
  plan.ops[attention].streamed = 64;
  EXPECT_THAT(AllText(Validate(graph, cluster_, plan)),
              HasSubstr("'h.0.attention' streamed: uses axes beyond the 3 of "
                        "group 'all'"));
  // Some of them may stay.
  plan.ops[attention].streamed = context & (~context + 1);
  EXPECT_EQ(AllText(Validate(graph, cluster_, plan)), "");
}

TEST_F(ValidateTest, ZigzagBalancesTheRanksThatSplitSequences) {
  const Graph graph = AttentionGraph(1, 8, 8, 4, 2, 16);
  const auto problem = [&](std::string_view strategy, int ranks) {
    auto plan = PlanFromStrategy(graph, cluster_, *ParseStrategy(strategy));
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    plan->zigzag = ranks;
    return AllText(Validate(graph, cluster_, *plan));
  };
  EXPECT_EQ(problem("cp=2", 2), "");
  EXPECT_EQ(problem("cp=4,cp-kind=ring", 4), "");
  EXPECT_EQ(problem("cp=2", 1),
            "zigzag: is 1: expected 0, or at least 2 ranks\n");
  EXPECT_EQ(problem("cp=2", 3),
            "zigzag: is 3: the order cuts sequences into 6 chunks: expected a "
            "divisor of the sequence length 8\n");
  // 2 * (2^31 - 1).
  EXPECT_THAT(problem("cp=2", 2147483647),
              HasSubstr("cuts sequences into 4294967294 chunks"));
  EXPECT_EQ(problem("cp=4", 2),
            "zigzag: is 2: 'h.0.attention' splits the sequence over 4 ranks, "
            "which that order does not balance: expected 4\n");
  EXPECT_EQ(problem("cp=2", 4),
            "zigzag: is 4: attention splits the sequence over 2 ranks: "
            "expected as many\n");
  for (const char* strategy : {"", "tp=2", "cp=2,cp-kind=ulysses"}) {
    EXPECT_EQ(
        problem(strategy, 2),
        "zigzag: is 2: no causal attention splits its sequence: expected 0\n");
  }
}

TEST_F(ValidateTest, ZigzagNeedsWhatFollowsItsTokens) {
  // As after changes of the model: positions that are no input, and a weight
  // with a row for each position.
  const auto problem = [&](const std::function<void(Graph&)>& change) {
    Graph graph = AttentionGraph(1, 8, 8, 4, 2, 16);
    change(graph);
    auto plan = PlanFromStrategy(graph, cluster_, *ParseStrategy("cp=2"));
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    plan->zigzag = 2;
    return AllText(Validate(graph, cluster_, *plan));
  };
  EXPECT_EQ(problem([](Graph&) {}), "");
  EXPECT_EQ(problem([](Graph& graph) {
              for (Tensor& tensor : graph.tensors) {
                if (tensor.name != "positions") continue;
                tensor.kind = TensorKind::kActivation;
              }
            }),
            "zigzag: is 2: positions 'positions' of 'h.0.attention' are no "
            "input that can be reordered\n");
}

TEST_F(ValidateTest, TiersAreOfResultsThatWaitForBackward) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:1");
  const auto problem = [&](std::string_view name, bool recompute) {
    auto plan = PlanFromStrategy(graph_, cluster, *ParseStrategy(""));
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    OpPlacement& op = plan->ops[NodeCalled(name)];
    op.activation_tier = MemoryTier::kHost;
    op.recompute = recompute;
    return AllText(Validate(graph_, cluster, *plan));
  };
  EXPECT_EQ(problem("h.0.up", false), "");
  EXPECT_THAT(problem("h.0.up", true),
              HasSubstr("'h.0.up' activation_tier: is host: expected device, "
                        "since backward computes the node's results anew"));
  EXPECT_THAT(problem("count", false),
              HasSubstr("'count' activation_tier: is host: expected device, "
                        "since the node's results are not kept"));
  // What the next block reads is kept all the same.
  size_t kept = 0;
  const GraphIndex index(graph_);
  for (const GraphIndex::BlockEdge& edge : index.block_edges) {
    const std::string& name = graph_.node(edge.producer).name;
    if (!CanRecompute(graph_, edge.producer)) continue;
    EXPECT_EQ(problem(name, true), "") << name;
    ++kept;
  }
  EXPECT_GT(kept, 1u);
  // A strategy moves just what it can.
  for (const char* text : {"offload=activations:host",
                           "recompute=full,offload=activations:host"}) {
    const auto plan = PlanFromStrategy(graph_, cluster, *ParseStrategy(text));
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    EXPECT_TRUE(Uses(*plan, MemoryTier::kHost));
    const auto uniform = UniformStrategy(index, cluster, *plan);
    ASSERT_TRUE(uniform.has_value());
    EXPECT_EQ(uniform->activation_tier, MemoryTier::kHost);
  }
}

TEST_F(ValidateTest, GradientsWaitOnTheHostForItsStep) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:1x4");
  const auto problem = [&](std::string_view strategy, MemoryTier gradient,
                           MemoryTier optimizer) {
    auto plan = PlanFromStrategy(graph_, cluster, *ParseStrategy(strategy));
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    plan->weights[0].gradient_tier = gradient;
    plan->weights[0].optimizer_tier = optimizer;
    return AllText(Validate(graph_, cluster, *plan));
  };
  const auto device = MemoryTier::kDevice;
  const auto host = MemoryTier::kHost;
  const auto file = MemoryTier::kFile;
  for (const MemoryTier optimizer : {host, file}) {
    for (const char* strategy : {"dp=4", "dp=4,zero=1", "dp=4,zero=3"}) {
      EXPECT_EQ(problem(strategy, host, optimizer), "");
    }
  }
  EXPECT_THAT(problem("dp=4", host, device),
              HasSubstr("gradient_tier: is host: expected device, since the "
                        "optimizer's state is there"));
  EXPECT_THAT(problem("dp=4", file, host),
              HasSubstr("gradient_tier: is file: expected device or host"));
  // Of a weight that two stages read a strategy leaves it on the device.
  const Graph tied = testing::TwoLayerGraph(8, 4, 16, /*tied=*/true);
  auto plan = PlanFromStrategy(
      tied, cluster,
      *ParseStrategy("pp=2,offload=optimizer:host,gradients:host"));
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan->weights[0].gradient_tier, device);
  plan->weights[0].gradient_tier = host;
  EXPECT_THAT(AllText(Validate(tied, cluster, *plan)),
              HasSubstr("'table' gradient_tier: is host of a weight that "
                        "several groups read: expected device"));
}

TEST_F(ValidateTest, ZigzagNeedsExpertsWithRoomForAll) {
  const auto problem = [&](double capacity) {
    Graph graph = MoeGraph(1, 8, 4, 8, 4, 4, 32);
    for (Node& node : graph.nodes) {
      for (Attribute& a : node.attributes) {
        if (a.name == "capacity") a.value = capacity;
      }
    }
    auto plan = PlanFromStrategy(graph, cluster_, *ParseStrategy("cp=2"));
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    plan->zigzag = 2;
    return AllText(Validate(graph, cluster_, *plan));
  };
  EXPECT_THAT(problem(4), Not(HasSubstr("gives experts' room")));
  EXPECT_THAT(
      problem(3),
      HasSubstr("zigzag: is 2: 'h.0.gate' gives experts' room to tokens "
                "in their order"));
}

TEST_F(ValidateTest, AllProblemsAtOnce) {
  const size_t norm = NodeCalled("h.1.norm");
  const std::string text = After("tp=2,zero=1", [&](Plan& plan) {
    plan.schedule = "none";
    plan.microbatches = 3;
    plan.ops[norm].axes[FactorOf(norm, 'h')] = 4;
    plan.weights[1].zero_stage = 4;
    plan.weights[2].zero_stage = -1;
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5) << text;
}

}  // namespace
}  // namespace tessera
