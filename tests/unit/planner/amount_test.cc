#include "planner/base/amount.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(Amount, BytesAndBitsDecimalAndBinary) {
  const struct {
    const char* text;
    Dimension dimension;
    double value;
  } kCases[] = {
      {"80GB", Dimension::kBytes, 80e9},
      {"80GiB", Dimension::kBytes, 85899345920.0},  // 80 * 2^30
      {"25GB/s", Dimension::kBandwidth, 25e9},
      {"200Gb/s", Dimension::kBandwidth, 25e9},  // 200e9 / 8
      {"1GiB/s", Dimension::kBandwidth, 1073741824.0},
      {"312TFLOP/s", Dimension::kFlops, 312e12},
      {"5us", Dimension::kTime, 5e-6},
      {"3h", Dimension::kTime, 10800},
      {"2.5USD/h", Dimension::kPrice, 2.5},
      {"0.7kW", Dimension::kPower, 700},
      {"1.3x", Dimension::kFactor, 1.3},
      {"80%", Dimension::kNumber, 0.8},
      {"16", Dimension::kNumber, 16},
      {"dgx-h100:4", Dimension::kText, 0},
  };
  for (const auto& c : kCases) {
    const auto amount = ParseAmount(c.text);
    ASSERT_TRUE(amount) << c.text << amount.error().ToString();
    EXPECT_EQ(amount->dimension, c.dimension) << c.text;
    EXPECT_DOUBLE_EQ(amount->value, c.value) << c.text;
    EXPECT_EQ(amount->text, c.text);
  }
}

TEST(Amount, AWrongUnitNamesTheNearOne) {
  for (const char* text : {"80gb", "80Gb", "1e3GBps", "12q"}) {
    const auto amount = ParseAmount(text);
    ASSERT_FALSE(amount) << text;
    EXPECT_THAT(amount.error().message, HasSubstr("unknown unit")) << text;
    EXPECT_THAT(amount.error().message, HasSubstr("known: %, x, B")) << text;
  }
  for (const char* range : {"1-4", "1..4", "100-200Gb/s"}) {
    EXPECT_THAT(ParseAmount(range).error().message,
                HasSubstr("is no number: a list is written 1,2,3,4"));
  }
  EXPECT_FALSE(ParseAmount(""));
  // In letters the nearest is 'B', or 'KiB'.
  EXPECT_THAT(ParseAmount("1KB").error().message,
              HasSubstr("did you mean 'kB'?"));
  EXPECT_THAT(ParseAmount("1gb/s").error().message,
              HasSubstr("did you mean 'Gb/s'?"));
}

TEST(Amount, AUnitCountsForTheNumbersBeforeIt) {
  const auto amounts = ParseAmounts("100,200GB/s,50,400Gb/s");
  ASSERT_TRUE(amounts);
  std::vector<std::string> texts;
  for (const Amount& amount : *amounts) texts.push_back(amount.text);
  EXPECT_THAT(
      texts, ::testing::ElementsAre("100GB/s", "200GB/s", "50Gb/s", "400Gb/s"));
  // Nothing is behind the last.
  EXPECT_EQ(ParseAmounts("1,2,4")->back().dimension, Dimension::kNumber);
  EXPECT_FALSE(ParseAmounts("1,,2"));
  const auto lists = ParseAmounts("[64,16],[8]");
  ASSERT_TRUE(lists);
  ASSERT_EQ(lists->size(), 2U);
  EXPECT_EQ((*lists)[0].text, "[64,16]");
}

TEST(Amount, CountsOfTokens) {
  EXPECT_DOUBLE_EQ(*ParseCount("300B"), 300e9);
  EXPECT_DOUBLE_EQ(*ParseCount("1.5T"), 1.5e12);
  EXPECT_DOUBLE_EQ(*ParseCount("7e9"), 7e9);
  for (const char* text : {"0", "-1B", "many", "1GB"}) {
    EXPECT_FALSE(ParseCount(text)) << text;
  }
}

}  // namespace
}  // namespace tessera
