#include "planner/base/whole_number.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace tessera {
namespace {

template <typename Integer>
class WholeNumber : public ::testing::Test {};
using Integers = ::testing::Types<int, int64_t, uint64_t>;
TYPED_TEST_SUITE(WholeNumber, Integers);

TYPED_TEST(WholeNumber, IsAllOfTheText) {
  constexpr TypeParam kLeast = std::numeric_limits<TypeParam>::min();
  constexpr TypeParam kMost = std::numeric_limits<TypeParam>::max();
  for (const TypeParam number : {kLeast, TypeParam{0}, TypeParam{12}, kMost}) {
    const std::string text = std::to_string(number);
    EXPECT_EQ(ParseWhole<TypeParam>(text), number);
    for (const std::string& wrong :
         {text + " ", " " + text, "+" + text, text + ".0", text + "x"}) {
      EXPECT_EQ(ParseWhole<TypeParam>(wrong), std::nullopt) << wrong;
    }
  }
  for (const char* wrong : {"", "-", "x", "0x1", "1e3"}) {
    EXPECT_EQ(ParseWhole<TypeParam>(wrong), std::nullopt) << wrong;
  }
  // Ten times as much as fits.
  EXPECT_EQ(ParseWhole<TypeParam>(std::to_string(kMost) + "0"), std::nullopt);
  EXPECT_EQ(ParseWhole<TypeParam>("007"), TypeParam{7});
}

TEST(WholeNumberSign, IsForSignedOnes) {
  EXPECT_EQ(ParseWhole<int>("-3"), -3);
  EXPECT_EQ(ParseWhole<uint64_t>("-3"), std::nullopt);
}

}  // namespace
}  // namespace tessera
