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

}  // namespace
}  // namespace tessera
