#include "costmodel/whatif/questions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/jitter.h"
#include "costmodel/whatif/sensitivity.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

Scenario Of(const std::string& model, const std::string& cluster, int64_t batch,
            int64_t seq, const std::string& strategy) {
  Scenario scenario;
  scenario.model = ExamplePath("models/" + model + "/config.json");
  scenario.cluster = cluster;
  scenario.global_batch = batch;
  scenario.seq_len = seq;
  scenario.strategy = strategy;
  return scenario;
}

struct Planned {
  Case made;
  Plan plan;
};
Planned PlannedFor(const Scenario& scenario) {
  ModelCache models;
  Case made = *MakeCase(scenario, models);
  Plan plan = *PlanOf(made);
  return {std::move(made), std::move(plan)};
}

double SecondsOf(const Case& of, const Cluster& cluster, const Plan& plan) {
  return Evaluator(*of.graph, cluster, nullptr, {})
      .Evaluate(plan)
      .step_time.seconds();
}

// Time is homogeneous of degree -1 in all resources together (Euler), on
// devices whose kernels are a roofline.
TEST(Sensitivity, ElasticitiesAddUpToOne) {
  for (const char* cluster : {"local-cpu:4", "local-cpu:1"}) {
    const Planned p = PlannedFor(Of("gpt2-tiny", cluster, 8, 32, "mbs=1"));
    const Sensitivity sensitivity =
        SensitivityOf(*p.made.graph, p.made.cluster, p.plan, nullptr, {});
    double sum = 0;
    for (const Elasticity& e : sensitivity.resources) {
      EXPECT_GE(e.value, -1e-9) << e.resource->name;
      sum += e.value;
    }
    // 1 % steps: their third-order term, and picoseconds.
    EXPECT_NEAR(sum, 1, 2e-3) << cluster;
    EXPECT_NEAR(sensitivity.unexplained, 1 - sum, 1e-12);
  }
}

// All resources twice as good take half of the time, but for what none of them
// scales: of T = A / r + c that is c / T, and T(2) / T(1) = (1 + c / T) / 2.
TEST(Sensitivity, EverythingTwiceAsGoodTakesHalfOfWhatIsExplained) {
  const Planned p = PlannedFor(Of("gpt2-tiny", "local-cpu:4", 8, 32, "tp=2"));
  Cluster twice = p.made.cluster;
  for (const Resource& resource : Resources()) resource.improve(2, twice);
  const double before = SecondsOf(p.made, p.made.cluster, p.plan);
  const Sensitivity sensitivity =
      SensitivityOf(*p.made.graph, p.made.cluster, p.plan, nullptr, {});
  EXPECT_NEAR(SecondsOf(p.made, twice, p.plan) / before,
              (1 + sensitivity.unexplained) / 2, 1e-3);
}

// One slow device of four that work alike: all wait for it, but links are as
// fast as before.
TEST(Degraded, TheSlowestOfAGroupCounts) {
  Scenario scenario = Of("gpt2-tiny", "local-cpu:4", 8, 32, "");
  const Planned all = PlannedFor(scenario);
  const double usual = SecondsOf(all.made, all.made.cluster, all.plan);
  scenario.slow = {{"device3", "2x"}};
  const Planned slow = PlannedFor(scenario);
  const double slower = SecondsOf(slow.made, slow.made.cluster, slow.plan);
  EXPECT_GT(slower, 1.2 * usual);
  EXPECT_LE(slower, 2 * usual);
  scenario.slow = {{"node0", "2x"}};
  const Planned every = PlannedFor(scenario);
  EXPECT_DOUBLE_EQ(SecondsOf(every.made, every.made.cluster, every.plan),
                   slower);
}

TEST(Jitter, IsSeededAndGrowsWithSigma) {
  const Planned p = PlannedFor(Of("gpt2-tiny", "local-cpu:4", 8, 32, "pp=2"));
  const double usual = SecondsOf(p.made, p.made.cluster, p.plan);
  const auto at = [&](double sigma, uint64_t seed) {
    return JitterOf(p.made, p.plan, {}, {sigma, 20, seed});
  };
  EXPECT_EQ(at(0.05, 1).p95, at(0.05, 1).p95);
  EXPECT_NE(at(0.05, 1).p50, at(0.05, 2).p50);
  EXPECT_NEAR(at(1e-9, 1).p50, usual, 1e-6 * usual);
  EXPECT_LE(at(0.05, 1).p50, at(0.05, 1).p95);
  // Two devices of a stage wait for each other: the median is late.
  EXPECT_GT(at(0.05, 1).p50, usual);
  EXPECT_GT(at(0.2, 1).p50, at(0.05, 1).p50);
}

TEST(Fit, WhatFitsAndWhatMakesItFit) {
  ModelCache models;
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=8");
  Fit fit = *FitOf(*MakeCase(scenario, models), {});
  EXPECT_TRUE(fit.fits);
  EXPECT_TRUE(fit.changes.empty());
  // A byte too little of what it needs.
  scenario.settings = {
      {"device.memory", std::to_string(fit.memory.value - 1) + "B"}};
  Fit small = *FitOf(*MakeCase(scenario, models), {});
  EXPECT_FALSE(small.fits);
  EXPECT_EQ(small.memory_needed, fit.memory);
  ASSERT_FALSE(small.changes.empty());
  for (const FitChange& change : small.changes) {
    EXPECT_LT(change.memory, fit.memory) << change.change;
    // One change; each is a strategy that fits.
    EXPECT_EQ(change.change.find(", "), std::string::npos);
    Scenario changed = scenario;
    changed.strategy = change.strategy;
    EXPECT_TRUE(FitOf(*MakeCase(changed, models), {})->fits) << change.change;
  }
  // With just what it needs it fits.
  scenario.settings = {
      {"device.memory", std::to_string(fit.memory_needed.value) + "B"}};
  EXPECT_TRUE(FitOf(*MakeCase(scenario, models), {})->fits);
}

TEST(Scaling, EfficiencyFallsAndTheKneeIsBetween) {
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  ModelCache models;
  const Scenario scenario =
      Of("gpt2-tiny", "dgx-a100-80gb:1", 512, 32, "mbs=1");
  const auto scaling = ScalingOf(
      scenario, {.efficiency = 0.7, .most_devices = 512}, options, models);
  ASSERT_TRUE(scaling);
  ASSERT_GE(scaling->points.size(), 2U);
  EXPECT_DOUBLE_EQ(scaling->points.front().efficiency, 1);
  for (const ScalingPoint& point : scaling->points) {
    if (point.devices <= scaling->devices) {
      EXPECT_GE(point.efficiency, 0.7);
    } else if (scaling->too_many > 0 && point.devices >= scaling->too_many) {
      EXPECT_LT(point.efficiency, 0.7);
    }
  }
  // Whatever the efficiency, it ends where there are no more devices.
  const auto all = ScalingOf(scenario, {.efficiency = 1e-9, .most_devices = 32},
                             options, models);
  EXPECT_EQ(all->devices, 32);
  EXPECT_EQ(all->too_many, 0);
}

// Priced so that the slower cluster costs a tenth per hour: it is the cheapest
// until the days do not suffice.
TEST(Cheapest, TheLeastMoneyWithinTheDays) {
  Scenario scenario = Of("gpt2-tiny", "dgx-a100-80gb:1", 64, 32, "mbs=1");
  scenario.settings = {{"device.price", "2USD/h"}};
  GridOptions options;
  options.predict.fast = true;
  options.predict.run.tokens = 1e9;
  ModelCache models;
  const std::vector<std::string> clusters = {"dgx-a100-80gb:2",
                                             "dgx-a100-80gb:1"};
  const auto any = CheapestOf(scenario, clusters, 0, options, models);
  ASSERT_TRUE(any && any->best);
  const auto& runs = any->offers;
  const double two = runs[0].cell.prediction->run->days;
  const double one = runs[1].cell.prediction->run->days;
  ASSERT_LT(two, one);
  // Half of the devices take less than twice as long.
  EXPECT_EQ(*any->best, 1U);
  EXPECT_DOUBLE_EQ(*runs[1].cell.prediction->run->usd, one * 24 * 8 * 2);
  const auto soon =
      CheapestOf(scenario, clusters, (one + two) / 2, options, models);
  EXPECT_EQ(*soon->best, 0U);
  EXPECT_THAT(soon->offers[1].refused, HasSubstr("too slow"));
  EXPECT_FALSE(CheapestOf(scenario, clusters, two / 2, options, models)->best);
}

}  // namespace
}  // namespace tessera
