#include "costmodel/whatif/replan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "costmodel/evaluate/evaluator.h"
#include "planner/plan/stages.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

// The eight GPUs of each host share its one network interface.
TEST(Replan, ASearchLooksAtSharedLinksUnlessItIsToBeFast) {
  Scenario scenario;
  scenario.model = ExamplePath("models/gpt2-large/config.json");
  scenario.cluster = "g5.48xlarge:4";
  scenario.global_batch = 64;
  scenario.seq_len = 1024;
  ModelCache models;
  Case of = MakeCase(scenario, models).value();
  const Evaluator evaluator(*of.graph, of.cluster, nullptr, {});
  const auto shared_step = [&](bool fast) {
    PredictOptions predict;
    predict.fast = fast;
    const Plan plan = BestPlan(of, predict, {.proposals = 100}).value();
    return evaluator.Explain(plan).step_time;
  };
  EXPECT_LT(shared_step(/*fast=*/false), shared_step(/*fast=*/true));
}

// A batch of 7 divides the first seven devices alone.
TEST(Replan, LeavesDevicesOutThatOnlyHinder) {
  Scenario scenario;
  scenario.model = ExamplePath("models/gpt2-tiny/config.json");
  scenario.cluster = "dgx-h100:1x8";
  scenario.global_batch = 7;
  scenario.seq_len = 64;
  ModelCache models;
  Case of = MakeCase(scenario, models).value();
  const Plan plan = BestPlan(of, {}, {}).value();
  EXPECT_LT(World(plan).devices.size(), 8u);
}

// A strategy is one more start; what cannot be laid out is none, and is said.
TEST(Replan, StartsFromTheStrategyOrSaysWhyNot) {
  Scenario scenario;
  scenario.model = ExamplePath("models/gpt2-tiny/config.json");
  scenario.cluster = "dgx-h100:1";
  scenario.global_batch = 64;
  scenario.seq_len = 64;
  scenario.strategy = "tp=3";
  PredictOptions predict;
  predict.fast = true;
  ModelCache models;
  Case one = MakeCase(scenario, models).value();
  const auto none = BestPlan(one, predict, {});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kInfeasible);
  EXPECT_THAT(none.error().message, HasSubstr("does not divide the 8 devices"));

  scenario.drops_idle_keys = true;
  Case of_many = MakeCase(scenario, models).value();
  ASSERT_TRUE(BestPlan(of_many, predict, {}));
  EXPECT_THAT(of_many.notes.back(),
              HasSubstr("the strategy is not compared: tp=3"));

  scenario.strategy = "tp=2";
  Case known = MakeCase(scenario, models).value();
  const size_t notes = known.notes.size();
  const Plan plan = PlanOf(known).value();
  ASSERT_TRUE(BestPlan(known, predict, {}, &plan));
  EXPECT_EQ(known.notes.size(), notes);

  // A plan for other devices.
  scenario.strategy.reset();
  scenario.cluster = "dgx-h100:1x4";
  Case smaller = MakeCase(scenario, models).value();
  ASSERT_TRUE(BestPlan(smaller, predict, {}, &plan));
  EXPECT_THAT(smaller.notes.back(),
              HasSubstr("the plan is not compared: it is for 8 devices"));
}

// Often enough for a reader: of so many proposals how many were made, and the
// best step so far.
TEST(Replan, WhoWaitsHearsHowFarItIs) {
  Scenario scenario;
  scenario.model = ExamplePath("models/gpt2-large/config.json");
  scenario.cluster = "dgx-a100-80gb:2";
  scenario.global_batch = 64;
  scenario.seq_len = 1024;
  ModelCache models;
  Case of = MakeCase(scenario, models).value();
  std::vector<std::string> heard;
  PredictOptions predict;
  predict.fast = true;
  std::atomic<bool> stop = false;
  predict.watch.stop = &stop;
  predict.watch.hears = [&](const std::string& text) {
    heard.push_back(text);
    // Once the chains walk, it is enough.
    if (text.find(": 0 of") == std::string::npos) stop = true;
  };
  ASSERT_TRUE(BestPlan(of, predict, {.proposals = 1'000'000}));
  EXPECT_THAT(heard.back(),
              MatchesRegex("planning for dgx-a100-80gb:2: [1-9][0-9]* of "
                           "1000000 proposals, best step [0-9.]+ m?s"));
}

}  // namespace
}  // namespace tessera
