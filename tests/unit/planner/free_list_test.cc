#include "planner/base/free_list.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

// Units of 10:  a a b c c c d      then a and c end
//               . . b . . . d      e of 2 takes a's gap, which fits it exactly
//               e e b . . . d      f of 1 has only c's
//               e e b f . . d      b and f end: gaps of 1 + 1 + 2 join
//               e e . . . . d      g of 4 fills them
TEST(FreeList, TakesTheGapThatFitsBestAndJoinsGaps) {
  FreeList room(10);
  const int64_t a = room.Take(20);
  const int64_t b = room.Take(7);  // rounded up
  const int64_t c = room.Take(30);
  const int64_t d = room.Take(10);
  EXPECT_EQ(a, 0);
  EXPECT_EQ(b, 20);
  EXPECT_EQ(c, 30);
  EXPECT_EQ(d, 60);
  room.Give(c, 30);
  room.Give(a, 20);
  EXPECT_EQ(room.Take(20), 0);
  const int64_t f = room.Take(10);
  EXPECT_EQ(f, 30);
  room.Give(b, 7);
  room.Give(f, 10);
  EXPECT_EQ(room.Take(40), 20);
  EXPECT_EQ(room.end(), 70);
}

TEST(FreeList, TheLastGapGrowsAndNothingTakesRoom) {
  FreeList room(1);
  const int64_t a = room.Take(4);
  const int64_t b = room.Take(3);
  room.Give(b, 3);
  EXPECT_EQ(room.Take(5), a + 4);
  EXPECT_EQ(room.end(), 9);
  // Two extents of no bytes are apart all the same.
  EXPECT_NE(room.Take(0), room.Take(0));
}

// [10, 30) and [30, 50) touch, and are apart all the same.
TEST(FreeList, WhatIsAddedIsTakenAndJoinsNothingElse) {
  FreeList room(10);
  EXPECT_EQ(room.TakeGap(1), std::nullopt);
  room.Add(30, 20);
  room.Add(10, 20);
  EXPECT_EQ(room.TakeGap(30), std::nullopt);
  EXPECT_EQ(room.TakeGap(15), 10);  // the lower of two that fit
  EXPECT_EQ(room.TakeGap(10), 30);
  EXPECT_EQ(room.TakeGap(20), std::nullopt);
  // Whichever comes back first.
  room.Give(10, 15);
  room.Give(30, 10);
  EXPECT_EQ(room.TakeGap(30), std::nullopt);
  EXPECT_EQ(room.TakeGap(20), 10);
  EXPECT_EQ(room.TakeGap(20), 30);
  room.Give(30, 20);
  room.Give(10, 20);
  EXPECT_EQ(room.TakeGap(30), std::nullopt);
  EXPECT_EQ(room.end(), 0);
}

}  // namespace
}  // namespace tessera
