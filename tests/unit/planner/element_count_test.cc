#include "planner/base/element_count.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

TEST(ElementCount, OfAllExtents) {
  EXPECT_EQ(ElementCount(std::vector<int64_t>{}), 1);  // a scalar
  EXPECT_EQ(ElementCount(std::vector<int64_t>{3, 5, 7}), 105);
  EXPECT_EQ(ElementCount(std::vector<int64_t>{3, 0}), 0);
}

TEST(ElementCount, MayBeMoreThanAnIntegerHolds) {
  const int64_t many = int64_t{1} << 40;
  EXPECT_EQ(LargeElementCount(std::vector<int64_t>{}), 1);
  EXPECT_EQ(LargeElementCount(std::vector<int64_t>{many, many}), 0x1p80);
}

}  // namespace
}  // namespace tessera
