// SOAP's O: operators of one layer on several device groups, which share
// devices or not, under splits of their own. All train as one rank does.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "costmodel/simulate/simulator.h"
#include "planner/io/graph_io.h"
#include "planner/io/plan_io.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/stages.h"
#include "planner/plan/validate.h"
#include "tests/support/paths.h"
#include "tests/support/small_models.h"
#include "tests/support/tiny_outcome.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 12;
constexpr int64_t kSeqLen = 6;
constexpr int64_t kSteps = 5;

// Attention beside MLP in every block.
std::string TinyNeox(int layers) {
  return R"({"model_type": "gpt_neox", "hidden_size": 16,
             "num_hidden_layers": )" +
         std::to_string(layers) +
         R"(, "num_attention_heads": 4, "intermediate_size": 24,
              "vocab_size": 40, "max_position_embeddings": 8,
              "rotary_pct": 0.5, "use_parallel_residual": true,
              "hidden_act": "gelu", "initializer_range": 0.2})";
}

// An MLP behind a norm whose mean and deviation are nodes of their own.
Graph NormInParts() {
  GraphBuilder builder("norm-in-parts", kBatch, kSeqLen, DType::kFloat64);
  builder.BeginBlock("embed");
  const TensorId tokens =
      builder.Input("tokens", {kBatch, kSeqLen}, DType::kInt32);
  const TensorId labels =
      builder.Input("labels", {kBatch, kSeqLen}, DType::kInt32);
  const TensorId table = builder.Weight("table", {40, 12}, {.stddev = 1}, true);
  TensorId x = builder.Add1("embedding", "lookup", {tokens, table});
  for (int layer = 0; layer < 2; ++layer) {
    const std::string h = "h." + std::to_string(layer);
    builder.BeginBlock(h);
    const TensorId scale =
        builder.Weight(h + ".scale", {12}, {.constant = 1}, false);
    const TensorId shift = builder.Weight(h + ".shift", {12}, {}, false);
    const TensorId up =
        builder.Weight(h + ".up", {20, 12}, {.stddev = 1}, true);
    const TensorId down =
        builder.Weight(h + ".down", {12, 20}, {.stddev = 1}, true);
    const TensorId mean = builder.Add1("row_mean", h + ".mean", {x});
    const TensorId deviation =
        builder.Add1("row_std", h + ".std", {x}, "", {{"epsilon", 1e-5}});
    TensorId y = builder.Add1("normalize", h + ".normalize",
                              {x, mean, deviation, scale, shift});
    y = builder.Add1("linear", h + ".fc", {y, up}, "bsi,fi->bsf");
    y = builder.Add1("silu", h + ".act", {y}, "bsf->bsf");
    y = builder.Add1("linear", h + ".proj", {y, down}, "bsf,of->bso");
    x = builder.Add1("add", h + ".add", {x, y}, "bsh,bsh->bsh");
  }
  builder.BeginBlock("head");
  const TensorId head = builder.Weight("head", {40, 12}, {.stddev = 1}, true);
  const TensorId logits =
      builder.Add1("linear", "logits", {x, head}, "bsi,vi->bsv");
  return testing::FinishWithLoss(builder, logits, labels);
}

Graph GraphNamed(const std::string& name) {
  if (name == "norm_in_parts") return NormInParts();
  return ImportTiny(name == "gpt2" ? TinyGpt2(2, 4) : TinyNeox(2), kBatch,
                    kSeqLen);
}

// `count` ranks in one or two stages of one to three groups each. Every device
// is in some group, every group has some node.
Plan DrawPlan(const GraphIndex& index, int count, Rng& rng) {
  const Graph& graph = *index.graph;
  const auto below = [&](size_t n) {
    return static_cast<size_t>(rng.Below(static_cast<uint32_t>(n)));
  };
  Plan plan;
  plan.graph_fingerprint = index.fingerprint;
  plan.schedule = below(2) == 0 ? "gpipe" : "1f1b";
  const int kMicrobatches[] = {1, 2, 3};
  plan.microbatches = kMicrobatches[below(3)];
  const int stages = count > 1 ? 1 + static_cast<int>(below(2)) : 1;
  std::vector<std::vector<GroupId>> groups_of_stage;
  for (int stage = 0; stage < stages; ++stage) {
    const int begin = stage * count / stages;
    const int end = (stage + 1) * count / stages;
    std::vector<bool> used(static_cast<size_t>(end - begin), false);
    auto& own = groups_of_stage.emplace_back();
    for (size_t left = 1 + below(3); left-- > 0;) {
      DeviceGroup group;
      group.name = "g" + std::to_string(plan.groups.size());
      for (int d = begin; d < end; ++d) {
        const auto at = static_cast<size_t>(d - begin);
        if (below(2) == 0 && !(left == 0 && !used[at])) continue;
        group.devices.push_back(DeviceId(d));
        used[at] = true;
      }
      if (group.devices.empty()) continue;
      // Not in the order of the ranks.
      std::swap(group.devices[below(group.devices.size())], group.devices[0]);
      for (int prime :
           PrimeFactors(static_cast<int64_t>(group.devices.size()))) {
        group.axes.push_back({"a" + std::to_string(group.axes.size()), prime});
      }
      own.push_back(GroupId(static_cast<int64_t>(plan.groups.size())));
      plan.groups.push_back(group);
    }
  }
  plan.ops.resize(index.forward_nodes);
  const size_t blocks = graph.blocks.size();
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const Node& node = graph.nodes[i];
    OpPlacement& placement = plan.ops[i];
    const auto& own = groups_of_stage[static_cast<size_t>(node.block) *
                                      groups_of_stage.size() / blocks];
    placement.group = own[below(own.size())];
    const DeviceGroup& group = plan.groups[placement.group.index()];
    for (size_t a = 0; a < group.axes.size(); ++a) {
      const size_t f = below(node.rule.factors.size() + 1);
      if (f == node.rule.factors.size() || !node.rule.factors[f].splittable) {
        continue;
      }
      const AxisSet axes = placement.axes[f] | AxisSet{1} << a;
      const int64_t extent =
          index.Extent(NodeId(i), f, kBatch / plan.microbatches);
      if (extent >= group.Size(axes)) placement.axes[f] = axes;
    }
  }
  plan.weights.resize(index.weights.size());
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    plan.weights[w].zero_stage =
        HighestZeroStage(index, plan, w, static_cast<int>(below(4)));
  }
  SetZeroAxes(index, plan);
  return plan;
}

Cluster RanksOf(int count) {
  return MakeCluster("local-cpu:" + std::to_string(count)).value();
}

Plan DrawValidPlan(const GraphIndex& index, int count, Rng& rng) {
  const Cluster cluster = RanksOf(count);
  for (int i = 0; i < 1000; ++i) {
    Plan plan = DrawPlan(index, count, rng);
    if (IsValid(index, cluster, plan)) return plan;
  }
  ADD_FAILURE() << "no valid plan";
  return {};
}

TinyRun Training(double learning_rate) {
  TinyRun run;
  run.steps = kSteps;
  run.options.learning_rate = learning_rate;
  run.options.clip = 0.5;  // of gradients that are larger
  return run;
}

Outcome RunTasks(const Graph& graph, const TaskGraph& tasks,
                 double learning_rate = 0.01) {
  return OutcomeOf(graph, tasks, Training(learning_rate));
}

TaskGraph LowerPlan(const Graph& graph, const Plan& plan) {
  return Lower(graph, RanksOf(static_cast<int>(World(plan).devices.size())),
               plan, Training(0).options);
}

class DeviceGroups : public ::testing::TestWithParam<std::string> {};

TEST_P(DeviceGroups, EqualsSerial) {
  const Graph graph = GraphNamed(GetParam());
  const GraphIndex index(graph);
  Rng rng(43);
  const Outcome serial =
      RunTasks(graph, LowerPlan(graph, DrawValidPlan(index, 1, rng)));
  ASSERT_EQ(serial.losses.size(), static_cast<size_t>(kSteps));
  int several = 0;      // plans with a stage of several groups
  int overlapping = 0;  // plans whose groups share devices
  for (int trial = 0; trial < 24; ++trial) {
    SCOPED_TRACE("trial " + std::to_string(trial));
    const Plan plan = DrawValidPlan(index, 1 + trial % 8, rng);
    const auto groups = static_cast<int>(plan.groups.size());
    several += StagesOf(graph, plan).count() < groups;
    const auto overlaps = Overlaps(plan.groups);
    overlapping += std::any_of(overlaps.begin(), overlaps.end(),
                               [](const auto& list) { return !list.empty(); });
    const Outcome outcome = RunTasks(graph, LowerPlan(graph, plan));
    ASSERT_EQ(Difference(outcome, serial), "");
  }
  EXPECT_GT(several, 8);
  EXPECT_GT(overlapping, 8);
}

INSTANTIATE_TEST_SUITE_P(Models, DeviceGroups,
                         ::testing::Values("gpt2", "neox", "norm_in_parts"));

// Ranks of several groups count their squares for each group, once. The test
// must see a group that starts the sum anew.
TEST(DeviceGroupsItself, CatchesALostSumOfSquares) {
  const Graph graph = NormInParts();
  Plan plan;
  plan.graph_fingerprint = Fingerprint(graph);
  plan.groups = {{"both", {DeviceId(0), DeviceId(1)}, {{"a", 2}}},
                 {"first", {DeviceId(0)}, {}}};
  plan.ops.resize(GraphIndex(graph).forward_nodes);
  plan.weights.resize(Weights(graph).size());
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    plan.ops[i].group = GroupId(graph.nodes[i].op->name == "linear" ? 1 : 0);
  }
  TaskGraph tasks = LowerPlan(graph, plan);
  const Outcome right = RunTasks(graph, tasks);
  int sums = 0;
  for (Task& task : tasks.tasks) {
    if (task.kernel != "square_sum" || task.group != GroupId(1)) continue;
    EXPECT_TRUE(task.accumulate);
    if (sums++ == 0) task.accumulate = false;
  }
  ASSERT_GT(sums, 0);
  const Outcome wrong = RunTasks(graph, tasks);
  EXPECT_GT(std::abs(wrong.losses.back() - right.losses.back()), 1e-6);
}

// The plans of examples/plans, in fp32: sums are added in another order.
TEST(ExamplePlans, EqualSerial) {
  for (const auto& [model, file] :
       {std::pair("norm-in-parts", "norm-in-parts"),
        std::pair("parallel-residual", "parallel-residual"),
        std::pair("parallel-residual", "mixed-splits"),
        std::pair("parallel-residual", "unlike-stages")}) {
    SCOPED_TRACE(file);
    const auto forward =
        ReadGraph(ExamplePath("graphs/" + std::string(model) + ".txtpb"));
    ASSERT_TRUE(forward.has_value()) << forward.error().ToString();
    const Graph graph = Differentiate(*forward).value();
    const auto plan =
        ReadPlan(ExamplePath("plans/" + std::string(file) + ".txtpb"), graph);
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    const auto one = PlanFromStrategy(graph, RanksOf(1), Strategy());
    ASSERT_TRUE(one.has_value()) << one.error().ToString();
    const Outcome serial = RunTasks(graph, LowerPlan(graph, *one), 3e-4);
    const Outcome outcome = RunTasks(graph, LowerPlan(graph, *plan), 3e-4);
    ASSERT_EQ(outcome.losses.size(), static_cast<size_t>(kSteps));
    for (size_t i = 0; i < serial.losses.size(); ++i) {
      EXPECT_NEAR(outcome.losses[i], serial.losses[i], 1e-5) << "step " << i;
    }
  }
}

// ---- Time ------------------------------------------------------------------

// The step's time where each kernel of block "h" takes 1 us and all else none.
Duration TimeOfLayer(const Graph& graph, const Plan& plan) {
  const TaskGraph tasks = Lower(graph, RanksOf(2), plan, {});
  std::vector<TaskCost> costs;
  for (const Task& task : tasks.tasks) {
    const bool counts =
        task.kind == TaskKind::kCompute && task.node.valid() &&
        graph.blocks[static_cast<size_t>(graph.node(task.node).block)] == "h";
    costs.push_back({{counts ? 1'000'000 : 0}, CostSource::kAnalytical});
  }
  return LongestPath(tasks, costs).step_time;
}

// The left branch is three operators, the right one; behind them come two
// additions. Their adjoints are 5 (two dense layers of two each, silu) and 2
// kernels; the block's input gets one sum of gradients, the additions none:
//   one after the other  3 + 1 + 2 + 5 + 2 + 1 = 14
//   at the same time     max(3, 1) + 2 + max(5, 2) + 1 = 11
TEST(BranchesTime, IsThatOfTheLongerOneOnGroupsApart) {
  const Graph graph = testing::BranchesGraph(2, 2, 4, 8, 16);
  const auto place = [&](int device_of_right) {
    Plan plan;
    plan.graph_fingerprint = Fingerprint(graph);
    plan.groups = {{"left", {DeviceId(0)}, {}},
                   {"right", {DeviceId(device_of_right)}, {}}};
    plan.ops.resize(GraphIndex(graph).forward_nodes);
    plan.weights.resize(Weights(graph).size());
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      plan.ops[i].group = GroupId(graph.nodes[i].name == "h.right" ? 1 : 0);
    }
    EXPECT_TRUE(Validate(graph, RanksOf(2), plan).empty());
    return plan;
  };
  const Duration kMicrosecond = {1'000'000};
  EXPECT_EQ(TimeOfLayer(graph, place(0)), kMicrosecond * 14);
  EXPECT_EQ(TimeOfLayer(graph, place(1)), kMicrosecond * 11);
}

}  // namespace
}  // namespace tessera
