#include "planner/base/divide.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace tessera {
namespace {

TEST(Divide, UpToTheNextWholeNumber) {
  for (int64_t a = 0; a <= 40; ++a) {
    for (int64_t b = 1; b <= 12; ++b) {
      const int64_t quotient = DivideUp(a, b);
      EXPECT_GE(quotient * b, a) << a << " " << b;
      EXPECT_LT((quotient - 1) * b, a) << a << " " << b;
      EXPECT_EQ(RoundUp(a, b), quotient * b);
    }
  }
  static_assert(DivideUp(7u, 2) == 4u);
  static_assert(RoundUp(int64_t{1} << 40, 3) == (int64_t{1} << 40) + 2);
}

}  // namespace
}  // namespace tessera
