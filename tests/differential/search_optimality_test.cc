// The search against the enumeration of all plans, and the bound against both:
// a sample of what tests/fuzz/optimality.cc runs.

#include <gtest/gtest.h>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/evaluate/step_bound.h"
#include "planner/search/mcmc.h"
#include "planner/search/uniform_strategies.h"
#include "tests/support/small_instances.h"

namespace tessera {
namespace {

TEST(SearchOptimality, FindsTheBestOfAllPlansAndNoneBeatsTheBound) {
  constexpr int64_t kMostPlans = 12'000;
  int instances = 0;
  for (uint64_t number = 0; instances < 4; ++number) {
    ASSERT_LT(number, 200u);
    const auto instance = testing::MakeSmallInstance(number);
    const SearchSpace space(instance.graph, instance.cluster);
    const Evaluator evaluator(instance.graph, instance.cluster, nullptr, {});
    const auto best = testing::BestOfAll(space, evaluator, kMostPlans);
    if (!best) continue;
    ++instances;
    const StepBound bound = LowerBound(instance.graph, instance.cluster, {});
    EXPECT_GT(bound.step_time, Duration{}) << instance.name;
    EXPECT_LE(bound.step_time, best->evaluation.step_time) << instance.name;
    SearchOptions options;
    options.proposals = 4'000;
    options.time_limit = 0;
    options.seed = number;
    const auto result = Search(space, evaluator, options);
    ASSERT_TRUE(result.has_value()) << result.error().ToString();
    EXPECT_FALSE(Better(best->evaluation, result->evaluation))
        << instance.name << ": " << result->evaluation.step_time.seconds()
        << " s, the best is " << best->evaluation.step_time.seconds();
    EXPECT_LE(bound.step_time, result->evaluation.step_time) << instance.name;
  }
}

// Uniform plans of instances too large to enumerate: the bound is below each,
// whatever the optimizer.
TEST(StepBound, IsBelowUniformPlans) {
  const std::span<const OptimizerRow> optimizers = Optimizers();
  for (uint64_t number = 0; number < 25; ++number) {
    const auto instance = testing::MakeSmallInstance(number);
    const SearchSpace space(instance.graph, instance.cluster);
    TrainingOptions options;
    options.optimizer = optimizers[number % optimizers.size()].name;
    if (number % 3 == 0) options.clip = 0;
    const Evaluator evaluator(instance.graph, instance.cluster, nullptr,
                              options);
    const StepBound bound =
        LowerBound(instance.graph, instance.cluster, options);
    int priced = 0;
    for (const Strategy& strategy : UniformStrategies(space)) {
      const auto score =
          evaluator.EvaluateUniform(space.index, instance.cluster, strategy);
      if (!score) continue;
      ++priced;
      EXPECT_LE(bound.step_time, score->step_time)
          << instance.name << ", " << options.optimizer << ", "
          << ToString(strategy);
    }
    EXPECT_GT(priced, 0) << instance.name;
  }
}

}  // namespace
}  // namespace tessera
