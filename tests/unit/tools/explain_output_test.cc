#include "tools/explain_output.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(ChangeText, SaysPercentAndFromTenTimesOnHowManyTimes) {
  EXPECT_EQ(ChangeText(1.031, 1), "+3.1 %");
  EXPECT_EQ(ChangeText(0.996, 1), "-0.4 %");
  EXPECT_EQ(ChangeText(1.0004, 1), "equal");
  EXPECT_EQ(ChangeText(9.9, 1), "+890.0 %");
  EXPECT_EQ(ChangeText(3760, 1), "3,760 x");
}

TEST(NothingNearText, NamesTheKindOfThePlan) {
  EXPECT_EQ(NothingNearText(1),
            "decisions: no uniform plan is near, since none without a pipeline "
            "is valid for this cluster and batch");
  EXPECT_EQ(NothingNearText(4),
            "decisions: no uniform plan is near, since none that is a pipeline "
            "is valid for this cluster and batch");
}

}  // namespace
}  // namespace tessera
