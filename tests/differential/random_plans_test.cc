// Random plans on random small models train as one rank does, cost what their
// simulation says, take the memory that is predicted, and survive their file.
// tessera_plan_fuzz runs many more; a failure here names the case for it.

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "tests/support/plan_check.h"
#include "tests/support/searched_plans.h"

namespace tessera {
namespace {

constexpr int kParts = 5;
constexpr int kPlansPerPart = 70;
constexpr int kModelsPerPart = 14;

class RandomPlans : public ::testing::TestWithParam<int> {};

TEST_P(RandomPlans, AreRight) {
  PlanChecker checker;
  CaseGenerator generator(static_cast<uint64_t>(GetParam()), kModelsPerPart,
                          checker);
  int failures = 0;
  for (int i = 0; i < kPlansPerPart && failures < 3; ++i) {
    const Case c = generator.Next();
    const std::string wrong = checker.Check(c);
    EXPECT_EQ(wrong, "") << "tessera_plan_fuzz --one '" << ToText(c) << "'";
    failures += wrong.empty() ? 0 : 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, RandomPlans, ::testing::Range(0, kParts));

// tessera_plan_fuzz --searched checks many more.
TEST(SearchedPlans, AreRight) {
  constexpr int kSearches = 15;
  PlanChecker checker;
  int plans = 0;
  for (uint64_t number = 0; number < kSearches; ++number) {
    const SearchedPlans searched = SearchPlans(number, checker);
    for (const Plan& plan : searched.plans) {
      EXPECT_EQ(checker.Check(searched.graph, searched.cluster, plan,
                              searched.optimizer, plans),
                "")
          << searched.text;
      ++plans;
    }
  }
  EXPECT_GE(plans, kSearches);
}

// As many plans as all parts check hold every row.
TEST(RandomModels, PlansHoldEveryPlacement) {
  PlanChecker checker;
  CaseGenerator generator(kParts, kParts * kModelsPerPart, checker);
  for (int i = 0; i < kParts * kPlansPerPart; ++i) generator.Next();
  const std::span<const PlacementRow> rows = PlacementRows();
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_GE(generator.coverage().row(i), 1) << rows[i].name;
  }
}

// Checks so many random plans of general models, and gives what they split, an
// operator and a factor of its rule.
std::set<std::string> SplitByPlans(int plans, int layers, int signals) {
  PlanChecker checker;
  Rng rng(5);
  std::set<std::string> split;
  for (int i = 0; i < plans; ++i) {
    Case c;
    c.graph = RandomGraphSpec(rng);
    c.graph.image = 3;
    c.graph.layers = layers;
    c.graph.signals = signals;
    c.plan = RandomPlanSpec(c.graph, rng);
    const auto plan = checker.ValidPlan(c);
    if (!plan) continue;
    const Graph& graph = checker.ModelOf(c.graph).graph;
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      const IndexRule& rule = graph.nodes[n].rule;
      const OpPlacement placed = PlacementOf(graph, *plan, NodeId(n));
      for (size_t f = 0; f < rule.factors.size(); ++f) {
        if (placed.axes[f] == 0) continue;
        split.insert(std::string(graph.nodes[n].op->name) + " " +
                     rule.factors[f].letter);
      }
    }
    EXPECT_EQ(checker.Check(c), "") << ToText(c);
  }
  return split;
}

// Windows over a sequence, with halos.
TEST(RandomModels, SignalsAreSplit) {
  const std::set<std::string> split =
      SplitByPlans(/*plans=*/30, /*layers=*/1, /*signals=*/1);
  for (const char* wanted :
       {"conv2d x", "conv_transpose2d x", "conv_transpose2d n",
        "average_pool x", "resample c", "reshape b"}) {
    EXPECT_TRUE(split.contains(wanted)) << wanted;
  }
}

// Operators whose rules are the node's own, on whichever of their factors.
TEST(RandomModels, GeneralOperatorsAreSplit) {
  const std::set<std::string> split =
      SplitByPlans(/*plans=*/60, /*layers=*/3, /*signals=*/0);
  for (const char* wanted : {"softmax z",
                             "softmax_dx z",
                             "log_softmax z",
                             "causal_mask q",
                             "causal_mask k",
                             "einsum h",
                             "einsum t",
                             "reduce_mean h",
                             "reduce_sum s",
                             "reduce_variance s",
                             "reduce_max b",
                             "subtract h",
                             "divide s",
                             "multiply h",
                             "broadcast_add b",
                             "slice s",
                             "pad b",
                             "concat_channels s",
                             "maximum s",
                             "exp h",
                             "power b",
                             "transpose s",
                             "mean_squared_error h",
                             "mean_squared_error b",
                             "binary_cross_entropy h",
                             "binary_cross_entropy s",
                             "greater s",
                             "where h",
                             "where_dx b",
                             "gather v",
                             "gather_dx v",
                             "scatter_add s",
                             "top_k h",
                             "one_hot v",
                             "normalize h",
                             "less s",
                             "select b",
                             "embedding_bag v",
                             "embedding_bag h",
                             "embedding_bag_dw b",
                             "pairwise_dot h"}) {
    EXPECT_TRUE(split.contains(wanted)) << wanted;
  }
}

// Training falls, of many models on average, as each step has other samples:
// equal runs are not equal because nothing happens.
TEST(RandomModels, LossesFall) {
  PlanChecker checker;
  Rng rng(3);
  double first = 0;
  double last = 0;
  for (int i = 0; i < 20; ++i) {
    const GraphSpec spec = RandomGraphSpec(rng);
    const std::vector<double>& losses = checker.SerialOf(spec).losses;
    ASSERT_GT(losses.size(), 1u);
    EXPECT_TRUE(std::isfinite(losses.back())) << ToText(spec);
    first += losses.front();
    last += losses.back();
  }
  EXPECT_LT(last, first);
}

TEST(Cases, TextGoesBack) {
  Rng rng(5);
  for (int i = 0; i < 50; ++i) {
    Case c;
    c.graph = RandomGraphSpec(rng);
    c.plan = RandomPlanSpec(c.graph, rng);
    const auto back = ParseCase(ToText(c));
    ASSERT_TRUE(back.has_value()) << back.error().ToString();
    EXPECT_EQ(*back, c);
  }
  EXPECT_FALSE(ParseCase("layer=2").has_value());
  EXPECT_FALSE(ParseCase("layers=two").has_value());
}

// A case shrinks to the numbers that make it fail: the first stage cannot go,
// so that a second one of two makes up three ranks.
TEST(Cases, Shrink) {
  Rng rng(6);
  Case c;
  c.graph = RandomGraphSpec(rng);
  c.plan = RandomPlanSpec(c.graph, rng);
  c.graph.batch = 12;
  c.plan.mesh = {232, 3};
  const auto fails = [](const Case& x) {
    return RanksOf(x.plan) >= 3 && x.graph.batch >= 5;
  };
  const Case smallest = Shrink(c, fails);
  EXPECT_EQ(ToText(smallest), "batch=5 mesh1=2");
}

}  // namespace
}  // namespace tessera
