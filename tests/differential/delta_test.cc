// Plans priced as edits of one another against plans priced as wholes: a sample
// of what tests/fuzz/delta.cc runs.

#include <gtest/gtest.h>

#include "tests/support/delta_walk.h"

namespace tessera {
namespace testing {

void PrintTo(const DeltaCase& c, std::ostream* out) {
  *out << c.model;
}

}  // namespace testing

namespace {

class Delta : public ::testing::TestWithParam<testing::DeltaCase> {};

TEST_P(Delta, IsTheWholeToTheBit) {
  const testing::DeltaWalk walk =
      testing::WalkByDeltas(GetParam(), /*seed=*/7, /*candidates=*/400);
  EXPECT_EQ(walk.candidates, 400);
  EXPECT_GT(walk.accepted, 40);
  EXPECT_EQ(walk.different, 0) << walk.differences[0];
}

INSTANTIATE_TEST_SUITE_P(Zoo, Delta,
                         ::testing::ValuesIn(testing::SmallDeltaCases()));

}  // namespace
}  // namespace tessera
