#include "tools/text.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(TextTest, AlignsTables) {
  EXPECT_EQ(FormatTable({{"name", "x"}, {"a", "10"}}),
            "  name   x\n"
            "  a     10\n");
}

TEST(TextTest, WrapsAtSpaces) {
  EXPECT_EQ(Wrap("aa bb cc", 2, 7), "aa bb\n  cc");
  EXPECT_EQ(Wrap("", 2, 7), "");
}

}  // namespace
}  // namespace tessera
