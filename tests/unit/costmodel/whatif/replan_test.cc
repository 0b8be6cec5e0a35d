#include "costmodel/whatif/replan.h"

#include <gtest/gtest.h>

#include "costmodel/evaluate/evaluator.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

// The eight GPUs of each host share its one network interface.
TEST(Replan, ASearchLooksAtSharedLinksUnlessItIsToBeFast) {
  Scenario scenario;
  scenario.model = ExamplePath("models/gpt2-large/config.json");
  scenario.cluster = "g5.48xlarge:2";
  scenario.global_batch = 64;
  scenario.seq_len = 1024;
  ModelCache models;
  const Case of = MakeCase(scenario, models).value();
  const Evaluator evaluator(*of.graph, of.cluster, nullptr, {});
  const auto shared_step = [&](bool fast) {
    PredictOptions predict;
    predict.fast = fast;
    const Plan plan = BestPlan(of, predict, {.proposals = 100}).value();
    return evaluator.Explain(plan).step_time;
  };
  EXPECT_LT(shared_step(/*fast=*/false), shared_step(/*fast=*/true));
}

}  // namespace
}  // namespace tessera
