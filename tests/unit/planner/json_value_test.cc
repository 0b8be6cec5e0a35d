#include "planner/io/json_value.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

TEST(JsonValueTest, NumbersAreAsTheyWereWritten) {
  for (const std::string number :
       {"0", "-1", "0.1", "-0.02", "1e-05", "50257", "100000", "1000000",
        "9007199254740991", "1e+30", "0.3333333333333333"}) {
    const auto value = ParseJson("{\"key\": " + number + "}");
    ASSERT_TRUE(value.has_value()) << value.error().ToString();
    EXPECT_EQ(value->Field("key").ToString(), number);
  }
}

}  // namespace
}  // namespace tessera
