#include "planner/base/append.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(AppendTo, SeparatesAllButTheFirst) {
  std::string list;
  AppendTo(list, ", ", "a");
  EXPECT_EQ(list, "a");
  AppendTo(list, ", ", "b");
  AppendTo(list, "; ", "");
  EXPECT_EQ(list, "a, b; ");
}

}  // namespace
}  // namespace tessera
