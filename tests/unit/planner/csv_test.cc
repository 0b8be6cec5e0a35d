#include "planner/io/csv.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planner/base/rng.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Csv, ReadsQuotedFields) {
  const auto table = ParseCsv("a,b\r\n\"x, \"\"y\"\"\",2\n\"two\nlines\",\n");
  ASSERT_TRUE(table) << table.error().ToString();
  EXPECT_THAT(table->columns, ElementsAre("a", "b"));
  EXPECT_THAT(table->rows, ElementsAre(ElementsAre("x, \"y\"", "2"),
                                       ElementsAre("two\nlines", "")));
  EXPECT_THAT(table->lines, ElementsAre(2, 3));
  EXPECT_EQ(table->Column("b"), 1);
  EXPECT_EQ(table->Column("c"), -1);
}

TEST(Csv, NamesTheLineOfAMistake) {
  const struct {
    const char* text;
    const char* where;
  } cases[] = {{"a,b\n1\n", "2"},
               {"a,b\n1,2\n1,2,3\n", "3"},
               {"a,b\n\"1,2\n", "2"},
               {"a,b\n\"1\"x,2\n", "2"},
               {"a,a\n1,2\n", "1"}};
  for (const auto& c : cases) {
    const auto table = ParseCsv(c.text);
    ASSERT_FALSE(table) << c.text;
    EXPECT_THAT(table.error().ToString(), HasSubstr(c.where)) << c.text;
  }
}

// Whatever stands in a file, it is a table or an error.
TEST(Csv, SurvivesAnyBytes) {
  Rng rng(7);
  const std::string seed = "a,b,c\n1,\"x\"\"y\",3\n,,\n";
  constexpr std::string_view alphabet("ab,\"\n\r\0\xff 1", 10);
  int tables = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = seed;
    for (int change = 0; change < 4; ++change) {
      const auto at = static_cast<size_t>(rng.Uniform01() *
                                          static_cast<double>(text.size()));
      text[at] = alphabet[static_cast<size_t>(
          rng.Uniform01() * static_cast<double>(alphabet.size()))];
    }
    const auto table = ParseCsv(text);
    if (!table) continue;
    ++tables;
    for (const auto& row : table->rows) {
      ASSERT_EQ(row.size(), table->columns.size()) << text;
    }
  }
  EXPECT_GT(tables, 0);
}

}  // namespace
}  // namespace tessera
