#include "costmodel/whatif/band.h"

#include <gtest/gtest.h>

#include "planner/topology/stacks.h"

namespace tessera {
namespace {

// A stack that has no row would be given, in silence, what all have together.
TEST(StepTimeBand, KnowsEveryStack) {
  for (const Stack& stack : Stacks()) {
    const ErrorBand band = StepTimeBand(stack.name);
    EXPECT_NE(band.source.find(stack.name), std::string::npos) << stack.name;
    EXPECT_GT(band.median, 0) << stack.name;
    EXPECT_GE(band.mean, band.median) << stack.name;
  }
  EXPECT_NE(StepTimeBand("tessera").source.find("their own"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
