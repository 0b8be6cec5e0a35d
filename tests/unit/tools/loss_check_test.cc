#include "tools/loss_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera {
namespace {

TEST(LossCheckTest, ComparesTheFirstSteps) {
  const std::vector<double> losses = {5.0, 4.0, 3.0, 9.0};
  const LossCheck check =
      CheckLosses(losses, {5.0, 4.0 + 2e-6, 3.0 - 1e-6}, DType::kFloat32);
  EXPECT_NEAR(check.max_difference, 2e-6, 1e-12);
  EXPECT_TRUE(check.agrees());
  EXPECT_EQ(CheckText(check),
            "max |difference| to one rank of the CPU over the first 3 steps: "
            "2e-06 (at most 1e-05)");
}

TEST(LossCheckTest, ToleranceIsThatOfTheType) {
  const std::vector<double> losses = {5.0};
  const auto agrees = [&](double other, DType dtype) {
    return CheckLosses(losses, {other}, dtype).agrees();
  };
  EXPECT_FALSE(agrees(5.0001, DType::kFloat32));
  EXPECT_FALSE(agrees(5 + 1e-8, DType::kFloat64));
  EXPECT_TRUE(agrees(5 + 1e-10, DType::kFloat64));
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    EXPECT_TRUE(agrees(5.04, dtype));
    EXPECT_FALSE(agrees(5.06, dtype));
  }
  EXPECT_EQ(CheckText(CheckLosses(losses, {5.5}, DType::kBFloat16)),
            "max |difference| to one rank of the CPU over the first step: "
            "0.5 (MORE THAN 0.05)");
}

// A loss that is not a number never agrees, whatever follows it.
TEST(LossCheckTest, NotANumberFails) {
  const std::vector<double> losses = {NAN, 1.0, 1.0};
  EXPECT_FALSE(CheckLosses(losses, {1, 1, 1}, DType::kFloat32).agrees());
  EXPECT_FALSE(CheckLosses(losses, {NAN, 1, 1}, DType::kFloat32).agrees());
  const std::vector<double> later = {1.0, 1.5, NAN};
  EXPECT_FALSE(CheckLosses(later, {1, 1, 1}, DType::kBFloat16).agrees());
}

}  // namespace
}  // namespace tessera
