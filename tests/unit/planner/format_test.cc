#include "planner/base/format.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(FormatTest, ChoosesUnitsWithThreeDigits) {
  EXPECT_EQ(FormatTime(1.234), "1.23 s");
  EXPECT_EQ(FormatTime(0.0123), "12.3 ms");
  EXPECT_EQ(FormatTime(0.99996), "1.00 s");
  EXPECT_EQ(FormatTime(1.5e-7), "150 ns");
  EXPECT_EQ(FormatTime(0.0), "0 s");
  EXPECT_EQ(FormatBytes({84'100'000'000}), "84.1 GB");
  EXPECT_EQ(FormatBytes({512}), "512 B");
  EXPECT_EQ(FormatBytes({0}), "0 B");
  EXPECT_EQ(FormatCount(1'557'611'200), "1.56 billion");
  EXPECT_EQ(FormatCount(60), "60");
  EXPECT_EQ(FormatRate({2.187e14}), "219 TFLOP/s");
  EXPECT_EQ(FormatPercent(0.417), "41.7 %");
  EXPECT_EQ(FormatNumber(0.125), "0.125");
  EXPECT_EQ(FormatNumber(999), "999");
  EXPECT_EQ(FormatNumber(66123), "66,100");
  EXPECT_EQ(FormatNumber(999.4), "999");
  EXPECT_EQ(FormatNumber(999.6), "1,000");
  EXPECT_EQ(FormatNumber(-999.6), "-1,000");
  EXPECT_EQ(FormatNumber(-1234567), "-1,230,000");
  EXPECT_EQ(FormatNumber(9.99e14), "999,000,000,000,000");
  EXPECT_EQ(FormatNumber(1e15), "1e+15");
}

TEST(FormatTest, WritesSizesExactly) {
  EXPECT_EQ(FormatExactBytes({25'000'000}), "25 MB");
  EXPECT_EQ(FormatExactBytes({25'000'000}, ""), "25MB");
  EXPECT_EQ(FormatExactBytes({1'234}), "1234 B");
  EXPECT_EQ(FormatExactBytes({3'000'000'000'000}), "3 TB");
  EXPECT_EQ(FormatExactBytes({5'000'000'000'000'000}), "5000 TB");
  EXPECT_EQ(FormatExactBytes({0}), "0 B");
}

}  // namespace
}  // namespace tessera
