#include "costmodel/validate/accuracy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::DoubleNear;
using testing::Optional;

TEST(KendallTau, CountsPairsThatAgree) {
  // Predicted order a b c, measured a c b: pairs ab and ac agree, bc does not:
  // (2 - 1) / 3.
  const std::vector<PredictedRun> runs = {
      {"g", 1, 10}, {"g", 2, 30}, {"g", 3, 20}};
  EXPECT_THAT(KendallTau(runs), Optional(DoubleNear(1.0 / 3, 1e-12)));
}

TEST(KendallTau, LeavesTiesOutOfEachSide) {
  // Pairs: ab tied in what was predicted, ac and bc agree. 2 / sqrt(2 * 3).
  const std::vector<PredictedRun> runs = {
      {"g", 1, 10}, {"g", 1, 20}, {"g", 3, 30}};
  EXPECT_THAT(KendallTau(runs), Optional(DoubleNear(0.816496580927726, 1e-12)));
}

TEST(KendallTau, IsNothingWhereOneSideSaysNothing) {
  EXPECT_EQ(KendallTau(std::vector<PredictedRun>{{"g", 1, 10}, {"g", 1, 20}}),
            std::nullopt);
}

TEST(Regret, IsWhatThePredictedBestCosts) {
  // The second is predicted best and takes 12 where the best takes 10.
  EXPECT_DOUBLE_EQ(
      RegretOf(std::vector<PredictedRun>{{"g", 2, 10}, {"g", 1, 12}}), 0.2);
  EXPECT_DOUBLE_EQ(
      RegretOf(std::vector<PredictedRun>{{"g", 1, 10}, {"g", 2, 12}}), 0);
}

TEST(Accuracy, IsOfErrorsAndOfGroupsOfAtLeastThree) {
  const std::vector<PredictedRun> runs = {// Errors +10 %, -20 % and none.
                                          {"a", 1.1, 1.0},
                                          {"a", 1.6, 2.0},
                                          {"a", 3.0, 3.0},
                                          // Two runs are no group.
                                          {"b", 1.0, 1.0},
                                          {"b", 2.0, 2.0}};
  const Accuracy accuracy = AccuracyOf(runs);
  EXPECT_EQ(accuracy.runs, 5);
  // Of all five: (10 + 20) / 5, median of 0 0 0 10 20, (10 - 20) / 5.
  EXPECT_THAT(accuracy.mape, Optional(DoubleNear(0.06, 1e-12)));
  EXPECT_THAT(accuracy.median_ape, Optional(DoubleNear(0, 1e-12)));
  EXPECT_THAT(accuracy.bias, Optional(DoubleNear(-0.02, 1e-12)));
  EXPECT_THAT(accuracy.kendall_tau, Optional(DoubleNear(1, 1e-12)));
  EXPECT_THAT(accuracy.median_regret, Optional(DoubleNear(0, 1e-12)));
}

TEST(Accuracy, OfNothingIsNothing) {
  const Accuracy accuracy = AccuracyOf({});
  EXPECT_EQ(accuracy.runs, 0);
  EXPECT_EQ(accuracy.mape, std::nullopt);
  EXPECT_EQ(accuracy.kendall_tau, std::nullopt);
}

}  // namespace
}  // namespace tessera
