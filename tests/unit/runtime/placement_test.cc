#include "runtime/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "planner/base/rng.h"
#include "runtime/device/cpu_device.h"

namespace tessera {
namespace {

TEST(Placement, RunOfABlockIsBoxes) {
  // Rows 10..12 and columns 20..23: elements 2 and 3 of row 10, all of row 11,
  // element 0 of row 12.
  const Placement placement{{{10, 13}, {20, 24}}, {2, 9}};
  const std::vector<Box> expected = {
      {{10, 11}, {22, 24}}, {{11, 12}, {20, 24}}, {{12, 13}, {20, 21}}};
  EXPECT_EQ(BoxesOf(placement), expected);
}

TEST(Placement, WholeBlockIsOneBox) {
  const Box block = {{1, 3}, {0, 5}, {2, 4}};
  EXPECT_EQ(BoxesOf(WholeBlock(block)), std::vector<Box>{block});
  EXPECT_EQ(BoxesOf(WholeBlock({})), std::vector<Box>{{}});  // a scalar
  EXPECT_TRUE(BoxesOf({block, {7, 7}}).empty());
}

TEST(Placement, ContiguousOnlyWhereOuterDimensionsAreCut) {
  const Placement whole = WholeBlock({{0, 4}, {0, 6}});
  EXPECT_EQ(ContiguousIn(WholeBlock({{1, 3}, {0, 6}}), whole), 6);
  EXPECT_EQ(ContiguousIn(WholeBlock({{0, 4}, {0, 3}}), whole), std::nullopt);
  EXPECT_EQ(ContiguousIn(WholeBlock({{2, 3}, {1, 3}}), whole), 2 * 6 + 1);
  // A run that begins and ends within rows.
  EXPECT_EQ(ContiguousIn({{{0, 4}, {0, 6}}, {5, 17}}, whole), 5);
  EXPECT_EQ(ContiguousIn(whole, WholeBlock({{0, 3}, {0, 6}})), std::nullopt);
}

// Any run of any block, copied box by box into a buffer of the block, is the
// same elements in the same order.
TEST(Placement, BoxesCoverRunsInOrder) {
  Rng rng(3);
  CpuDevice host;
  for (int trial = 0; trial < 300; ++trial) {
    Box block;
    for (uint32_t d = rng.Below(4); d > 0; --d) {
      const int64_t begin = rng.Below(5);
      block.push_back({begin, begin + 1 + rng.Below(4)});
    }
    const int64_t elements = ElementsOf(block);
    const int64_t begin = rng.Below(static_cast<uint32_t>(elements));
    const int64_t end =
        begin + rng.Below(static_cast<uint32_t>(elements - begin + 1));
    const Placement run{block, {begin, end}};
    std::vector<int32_t> all(static_cast<size_t>(elements));
    std::iota(all.begin(), all.end(), 0);
    std::vector<int32_t> part(static_cast<size_t>(end - begin), -1);
    int64_t covered = 0;
    for (const Box& box : BoxesOf(run)) {
      const BoxCopy copy = CopyOf(box, WholeBlock(block), run, 4);
      host.Copy(reinterpret_cast<std::byte*>(part.data()) + copy.to_offset,
                reinterpret_cast<std::byte*>(all.data()) + copy.from_offset,
                copy.strided);
      covered += ElementsOf(box);
    }
    EXPECT_EQ(covered, end - begin);
    std::vector<int32_t> expected(part.size());
    std::iota(expected.begin(), expected.end(), static_cast<int32_t>(begin));
    EXPECT_EQ(part, expected);
  }
}

TEST(TransferPieces, EqualGroupsPairPositionByPosition) {
  const std::vector<Placement> halves = {WholeBlock({{0, 3}}),
                                         WholeBlock({{3, 5}})};
  const std::vector<Piece> pieces = TransferPieces(halves, halves);
  ASSERT_EQ(pieces.size(), 2u);
  for (int i : {0, 1}) {
    EXPECT_EQ(pieces[static_cast<size_t>(i)].from, i);
    EXPECT_EQ(pieces[static_cast<size_t>(i)].to, i);
  }
}

TEST(TransferPieces, ReplicasShareTheWork) {
  const std::vector<Placement> four(4, WholeBlock({{0, 6}}));
  const std::vector<Placement> two(2, WholeBlock({{0, 6}}));
  // Target 0 takes from source 0 * 4 / 2 = 0, target 1 from 1 * 4 / 2 = 2.
  const std::vector<Piece> pieces = TransferPieces(four, two);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].from, 0);
  EXPECT_EQ(pieces[1].from, 2);
}

TEST(TransferPieces, EveryElementOnce) {
  // Thirds of 7 ([0,2) [2,4) [4,7)) to halves ([0,3) [3,7)): 2 + 1 and 1 + 3.
  const std::vector<Placement> thirds = {
      WholeBlock({{0, 2}}), WholeBlock({{2, 4}}), WholeBlock({{4, 7}})};
  const std::vector<Placement> halves = {WholeBlock({{0, 3}}),
                                         WholeBlock({{3, 7}})};
  std::vector<int> count(7);
  for (const Piece& piece : TransferPieces(thirds, halves)) {
    for (const Box& box : piece.boxes) {
      for (int64_t i = box[0].begin; i < box[0].end; ++i) {
        ++count[static_cast<size_t>(i)];
      }
    }
  }
  EXPECT_EQ(count, std::vector<int>(7, 1));
}

// Of any sources, those that hold nothing included, each element of a target
// comes once, from the first that holds it, counted round from the one at the
// target's place among them.
TEST(TransferPieces, EachElementFromTheFirstThatHoldsIt) {
  Rng rng(5);
  const Box whole = {{0, 7}, {0, 9}};
  const auto random_run = [&]() -> Placement {
    Box block;
    for (const Range& all : whole) {
      const int64_t begin = rng.Below(static_cast<uint32_t>(all.end));
      block.push_back(
          {begin,
           begin + 1 + rng.Below(static_cast<uint32_t>(all.end - begin))});
    }
    const auto elements = static_cast<uint32_t>(ElementsOf(block));
    const int64_t begin = rng.Below(elements);
    return {block,
            {begin,
             begin + rng.Below(elements - static_cast<uint32_t>(begin) + 1)}};
  };
  const auto holds = [](const std::vector<Box>& boxes, int64_t row,
                        int64_t column) {
    return std::ranges::any_of(boxes, [&](const Box& box) {
      return box[0].begin <= row && row < box[0].end &&
             box[1].begin <= column && column < box[1].end;
    });
  };
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<Placement> sources;
    for (uint32_t s = rng.Below(12); s > 0; --s) {
      sources.push_back(random_run());
    }
    sources.insert(
        sources.begin() + rng.Below(static_cast<uint32_t>(sources.size()) + 1),
        WholeBlock(whole));
    std::vector<Placement> targets;
    for (uint32_t t = 1 + rng.Below(4); t > 0; --t) {
      targets.push_back(random_run());
    }
    const std::vector<Piece> pieces = TransferPieces(sources, targets);
    for (size_t t = 0; t < targets.size(); ++t) {
      const size_t first = t * sources.size() / targets.size();
      for (int64_t row = 0; row < whole[0].end; ++row) {
        for (int64_t column = 0; column < whole[1].end; ++column) {
          std::vector<int> expected;
          if (holds(BoxesOf(targets[t]), row, column)) {
            size_t from = first;
            while (!holds(BoxesOf(sources[from]), row, column)) {
              from = (from + 1) % sources.size();
            }
            expected.push_back(static_cast<int>(from));
          }
          std::vector<int> actual;
          for (const Piece& piece : pieces) {
            if (piece.to == static_cast<int>(t) &&
                holds(piece.boxes, row, column)) {
              actual.push_back(piece.from);
            }
          }
          EXPECT_EQ(actual, expected) << trial << ": " << row << ", " << column;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
