#include "costmodel/memo.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

TEST(Memo, MakesEachOnce) {
  Memo<int> memo;
  int made = 0;
  const auto make = [&] { return ++made; };
  EXPECT_EQ(memo.Get({1, 2}, make), 1);
  EXPECT_EQ(memo.Get({2, 1}, make), 2);
  EXPECT_EQ(memo.Get({1, 2}, make), 1);
}

TEST(Memo, IsEmptiedWhereWeightsWouldExceedTheLimit) {
  Memo<int> memo(5);
  int made = 0;
  const auto get = [&](int64_t key, size_t weight) {
    return memo.Get(
        {key}, [&] { return ++made; }, weight);
  };
  EXPECT_EQ(get(1, 2), 1);
  EXPECT_EQ(get(2, 3), 2);  // 2 + 3 = 5
  EXPECT_EQ(get(1, 2), 1);
  EXPECT_EQ(get(3, 1), 3);  // 6 > 5
  EXPECT_EQ(get(3, 1), 3);
  EXPECT_EQ(get(1, 2), 4);
  EXPECT_EQ(get(4, 9), 5);  // alone, and in the way of all others
  EXPECT_EQ(get(4, 9), 5);
  EXPECT_EQ(get(3, 1), 6);
}

TEST(Memo, KeepsWhereItLies) {
  Memo<std::string> memo;
  const std::string& first =
      memo.Keep({0}, [] { return std::string("first"); });
  for (int64_t key = 1; key < 1000; ++key) {
    memo.Keep({key}, [] { return std::string("other"); });
  }
  EXPECT_EQ(&memo.Keep({0}, [] { return std::string("again"); }), &first);
  EXPECT_EQ(first, "first");
}

}  // namespace
}  // namespace tessera
