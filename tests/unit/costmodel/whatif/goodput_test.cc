#include "costmodel/whatif/goodput.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

// d = 200 s, M = 10,000 s: Young sqrt(2 * 200 * 10000) = 2000 s. Daly: the
// ratio d / 2M is 0.01, so 2000 * (1 + 0.1 / 3 + 0.01 / 9) - 200 =
// 2000 * 1.0344444 - 200 = 1868.8889 s.
TEST(Goodput, IntervalsOfYoungAndDaly) {
  EXPECT_DOUBLE_EQ(YoungInterval(200, 10000), 2000);
  EXPECT_NEAR(DalyInterval(200, 10000), 1868.8889, 1e-4);
  // A checkpoint that takes as long as two failures are apart: no use.
  EXPECT_DOUBLE_EQ(DalyInterval(300, 100), 100);
}

// Steps of 2 s, a checkpoint of 30 s each 100 steps: 200 of 230 s count.
TEST(Goodput, WithoutFailuresCheckpointsAlone) {
  const Goodput goodput =
      GoodputOf({.step = 2, .checkpoint = 30, .every = 100});
  EXPECT_DOUBLE_EQ(goodput.interval, 200);
  EXPECT_DOUBLE_EQ(goodput.fraction, 200.0 / 230);
  EXPECT_DOUBLE_EQ(goodput.saving, 30.0 / 230);
  EXPECT_DOUBLE_EQ(goodput.seconds_per_step, 2.3);
}

// t = 900, d = 100, M = 1000, R = 0: 900 / (1000 * (e^1 - 1)) = 0.52378.
TEST(Goodput, WithFailuresByDalysModel) {
  const Goodput goodput =
      GoodputOf({.step = 9, .checkpoint = 100, .mtbf = 1000, .every = 100});
  EXPECT_NEAR(goodput.fraction, 0.9 / (std::exp(1.0) - 1), 1e-12);
  // A restart of M seconds costs a factor of e.
  const Goodput restarts = GoodputOf({.step = 9,
                                      .checkpoint = 100,
                                      .restart = 1000,
                                      .mtbf = 1000,
                                      .every = 100});
  EXPECT_NEAR(restarts.fraction, goodput.fraction / std::exp(1.0), 1e-12);
}

// Checkpoints that take no time are written after each step: of 9 s, with
// failures each 1000 s, 9 / (1000 * (e^0.009 - 1)) count, and of that 1 / e
// with a restart of 1000 s.
TEST(Goodput, FailuresCostARestartWithoutCheckpointsToo) {
  const Goodput goodput = GoodputOf({.step = 9, .mtbf = 1000});
  EXPECT_DOUBLE_EQ(goodput.interval, 9);
  EXPECT_NEAR(goodput.fraction, 0.009 / std::expm1(0.009), 1e-12);
  EXPECT_NEAR(GoodputOf({.step = 9, .restart = 1000, .mtbf = 1000}).fraction,
              goodput.fraction / std::exp(1.0), 1e-12);
}

// Daly's interval is a maximum of the model that it approximates.
TEST(Goodput, TheBestIntervalIsTheBest) {
  const GoodputInput best = {.step = 1, .checkpoint = 10, .mtbf = 10000};
  const double fraction = GoodputOf(best).fraction;
  for (const int every : {100, 200, 300, 380, 500, 600, 1000, 3000}) {
    GoodputInput other = best;
    other.every = every;
    EXPECT_LE(GoodputOf(other).fraction, fraction + 1e-6) << every;
  }
}

// 3 s to read the data of a step of 2 s: a second of each three is lost.
TEST(Goodput, DataThatComesTooLateStalls) {
  const Goodput goodput = GoodputOf({.step = 2, .load = 3});
  EXPECT_DOUBLE_EQ(goodput.stall, 1);
  EXPECT_DOUBLE_EQ(goodput.fraction, 2.0 / 3);
  EXPECT_DOUBLE_EQ(goodput.seconds_per_step, 3);
  EXPECT_DOUBLE_EQ(GoodputOf({.step = 2, .load = 2}).stall, 0);
}

// 1e9 tokens at 1e6 a step are 1,000 steps; of 3.6 s each they take an hour:
// 100 USD, and 50 kW for an hour are 50 kWh.
TEST(RunCost, OfTokens) {
  const RunCost run = CostOfRun(1e9, 1e6, 3.6, 100, 50e3);
  EXPECT_DOUBLE_EQ(run.steps, 1000);
  EXPECT_DOUBLE_EQ(run.days, 1.0 / 24);
  EXPECT_DOUBLE_EQ(*run.usd, 100);
  EXPECT_DOUBLE_EQ(*run.kwh, 50);
  EXPECT_FALSE(CostOfRun(1e9, 1e6, 3.6, {}, {}).usd);
}

}  // namespace
}  // namespace tessera
