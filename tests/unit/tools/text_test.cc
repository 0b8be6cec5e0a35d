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

TEST(TextTest, QuotesWordsForAShell) {
  EXPECT_EQ(ShellWord("nodes=1,2"), "nodes=1,2");
  EXPECT_EQ(ShellWord("device_types[*].memory=1x"),
            "'device_types[*].memory=1x'");
  EXPECT_EQ(ShellWord("it's"), "'it'\\''s'");
  EXPECT_EQ(ShellWord(""), "''");
  for (const char* word : {"a b", "~x", "a\\b", "`x`", "#x", "x\n"}) {
    EXPECT_EQ(ShellWord(word), "'" + std::string(word) + "'");
  }
}

}  // namespace
}  // namespace tessera
