// Random plans on random small models train as one rank does, cost what their
// simulation says, take the memory that is predicted, and survive their file.
// tessera_plan_fuzz runs many more; a failure here names the case for it.

#include <gtest/gtest.h>

#include "tests/support/plan_check.h"

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

// Training falls: equal runs are not equal because nothing happens.
TEST(RandomModels, LossesFall) {
  PlanChecker checker;
  Rng rng(3);
  for (int i = 0; i < 5; ++i) {
    const GraphSpec spec = RandomGraphSpec(rng);
    const Trained& serial = checker.SerialOf(spec);
    for (size_t step = 1; step < serial.losses.size(); ++step) {
      EXPECT_NE(serial.losses[step], serial.losses[0]) << ToText(spec);
    }
  }
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
