#include "tools/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>

namespace tessera {
namespace {

TEST(JsonTest, PrintsDoublesSoThatTheyReadBack) {
  for (const double value :
       {0.1, 1.0 / 3, 1e300, 5e-324, -0.0, 2.147579548133, 1e21}) {
    const std::string text = Json(value).ToString();
    EXPECT_EQ(std::strtod(text.c_str(), nullptr), value) << text;
  }
  EXPECT_EQ(Json(std::nan("")).ToString(), "null");
  EXPECT_EQ(Json(std::numeric_limits<double>::infinity()).ToString(), "null");
}

TEST(JsonTest, PrintsWholeNumbersExactly) {
  EXPECT_EQ(Json(std::numeric_limits<int64_t>::min()).ToString(),
            "-9223372036854775808");
  EXPECT_EQ(Json(std::numeric_limits<uint64_t>::max()).ToString(),
            "18446744073709551615");
  EXPECT_EQ(Json(true).ToString(), "true");
}

TEST(JsonTest, KeepsTheOrderOfFields) {
  Json json = Json::Object({{"b", 1}, {"a", Json::Array({1, "x", Json()})}});
  json.Extend(Json::Object({{"c", Json::Object()}}));
  EXPECT_EQ(json.OneLine(), R"({"b": 1, "a": [1, "x", null], "c": {}})");
  EXPECT_EQ(json.ToString(),
            "{\n  \"b\": 1,\n  \"a\": [1, \"x\", null],\n  \"c\": {}\n}");
}

}  // namespace
}  // namespace tessera
