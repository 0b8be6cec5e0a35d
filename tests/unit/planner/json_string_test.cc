#include "planner/base/json_string.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(JsonStringTest, EscapesText) {
  EXPECT_EQ(JsonString("a\"b\\c\nd\x01"), "\"a\\\"b\\\\c\\nd\\u0001\"");
  EXPECT_EQ(JsonString("\u2026 \U0001F600"), "\"\u2026 \U0001F600\"");
  // A lone continuation byte, an overlong '/', a surrogate, a cut sequence.
  EXPECT_EQ(JsonString("\x80"), "\"\\ufffd\"");
  EXPECT_EQ(JsonString("\xc0\xaf"), "\"\\ufffd\\ufffd\"");
  EXPECT_EQ(JsonString("\xed\xa0\x80"), "\"\\ufffd\\ufffd\\ufffd\"");
  EXPECT_EQ(JsonString("\xe2\x80"), "\"\\ufffd\\ufffd\"");
}

}  // namespace
}  // namespace tessera
