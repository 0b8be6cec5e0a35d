#include "runtime/learning_rate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

LearningRate Rate(const std::string& decay) {
  return {.decay = FindDecay(decay).value(),
          .peak = 1,
          .least = 0.1,
          .warmup = 4,
          .steps = 12};
}

TEST(LearningRateTest, WarmsUpLinearly) {
  for (const Decay& decay : Decays()) {
    const LearningRate rate = Rate(std::string(decay.name));
    EXPECT_DOUBLE_EQ(RateAt(rate, 0), 0.25);
    EXPECT_DOUBLE_EQ(RateAt(rate, 2), 0.75);
    EXPECT_DOUBLE_EQ(RateAt(rate, 3), 1);
    EXPECT_DOUBLE_EQ(RateAt(rate, 4), 1) << decay.name;
  }
}

// Half of the decay, from step 4 to 12, has passed at step 8, a quarter at 6.
TEST(LearningRateTest, Decays) {
  EXPECT_DOUBLE_EQ(RateAt(Rate("constant"), 8), 1);
  EXPECT_DOUBLE_EQ(RateAt(Rate("linear"), 8), 0.1 + 0.9 / 2);
  EXPECT_DOUBLE_EQ(RateAt(Rate("linear"), 6), 0.1 + 0.9 * 3 / 4);
  EXPECT_DOUBLE_EQ(RateAt(Rate("cosine"), 8), 0.1 + 0.9 / 2);
  // cos(pi / 4) = 0.70711
  EXPECT_NEAR(RateAt(Rate("cosine"), 6), 0.1 + 0.9 * 0.853553, 1e-6);
  EXPECT_DOUBLE_EQ(RateAt(Rate("step"), 7), 1);
  EXPECT_DOUBLE_EQ(RateAt(Rate("step"), 8), 0.1 + 0.9 * 0.1);
  EXPECT_DOUBLE_EQ(RateAt(Rate("step"), 10), 0.1 + 0.9 * 0.01);
}

TEST(LearningRateTest, StaysAtItsEnd) {
  EXPECT_NEAR(RateAt(Rate("cosine"), 12), 0.1, 1e-15);
  EXPECT_DOUBLE_EQ(RateAt(Rate("linear"), 1000), 0.1);
  // A warm-up as long as the run.
  LearningRate rate = Rate("linear");
  rate.steps = 4;
  EXPECT_DOUBLE_EQ(RateAt(rate, 3), 1);
  EXPECT_DOUBLE_EQ(RateAt(rate, 4), 0.1);
}

TEST(LearningRateTest, UnknownDecay) {
  const auto decay = FindDecay("cosin");
  ASSERT_FALSE(decay.has_value());
  EXPECT_THAT(decay.error().ToString(),
              ::testing::HasSubstr("did you mean 'cosine'"));
}

}  // namespace
}  // namespace tessera
