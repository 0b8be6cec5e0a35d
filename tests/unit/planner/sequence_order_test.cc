#include "planner/plan/sequence_order.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace tessera {
namespace {

// The elements of `elements`, one after another.
std::vector<int64_t> OneByOne(int64_t length, int zigzag, Range elements) {
  std::vector<int64_t> positions;
  for (int64_t i = elements.begin; i < elements.end; ++i) {
    positions.push_back(zigzag > 1 ? ZigzagPosition(length, zigzag, i) : i);
  }
  return positions;
}

int64_t PairsOneByOne(const std::vector<int64_t>& queries,
                      const std::vector<int64_t>& keys,
                      const AttentionMask& mask) {
  int64_t pairs = 0;
  for (int64_t q : queries) {
    for (int64_t k : keys) {
      pairs += (!mask.causal || k <= q) &&
               (mask.window == 0 || std::abs(q - k) < mask.window);
    }
  }
  return pairs;
}

TEST(SequenceOrder, RunsAndPairsAreThoseOfEachElement) {
  constexpr int64_t kLength = 24;
  for (int zigzag : {0, 2, 3, 4}) {
    for (int64_t parts : {1, 2, 3, 4, 5}) {
      for (int64_t i = 0; i < parts; ++i) {
        const Range queries = ShardRange(kLength, parts, i);
        std::vector<int64_t> elements;
        for (Range run : PositionsOf(kLength, zigzag, queries)) {
          for (int64_t p = run.begin; p < run.end; ++p) elements.push_back(p);
        }
        const auto expected = OneByOne(kLength, zigzag, queries);
        // All of a sequence is told as one run.
        EXPECT_TRUE(parts == 1 || elements == expected);
        for (int64_t j = 0; j < parts; ++j) {
          const Range keys = ShardRange(kLength, parts, j);
          for (const AttentionMask mask :
               {AttentionMask{true, 0}, AttentionMask{true, 1},
                AttentionMask{true, 5}, AttentionMask{true, 100},
                AttentionMask{false, 0}, AttentionMask{false, 1},
                AttentionMask{false, 5}}) {
            EXPECT_EQ(
                SeenPairs(PositionsOf(kLength, zigzag, queries),
                          PositionsOf(kLength, zigzag, keys), mask),
                PairsOneByOne(expected, OneByOne(kLength, zigzag, keys), mask))
                << zigzag << " " << parts << " " << i << " " << j << " "
                << mask.causal << " " << mask.window;
          }
        }
      }
    }
  }
}

// Of n ranks over a sequence of length L, shard i has the queries from iL/n on:
// (2i+1)/2 (L/n)^2 + (L/n)/2 pairs, the diagonal included. In zigzag order all
// have as many. Either way they add up to L(L+1)/2.
TEST(SequenceOrder, ZigzagGivesEachRankAnEqualShare) {
  constexpr int64_t kLength = 48;
  constexpr int64_t kAll = kLength * (kLength + 1) / 2;
  for (int ranks : {2, 3, 4, 6, 8, 12}) {
    const int64_t size = kLength / ranks;
    int64_t in_order = 0;
    for (int i = 0; i < ranks; ++i) {
      const Range queries = ShardRange(kLength, ranks, i);
      const int64_t pairs = SeenPairs(queries, Range{0, kLength}, {});
      EXPECT_EQ(pairs, ((2 * i + 1) * size * size + size) / 2);
      in_order += pairs;
      EXPECT_EQ(
          SeenPairs(PositionsOf(kLength, ranks, queries), {{0, kLength}}, {}),
          kAll / ranks);
    }
    EXPECT_EQ(in_order, kAll);
  }
}

}  // namespace
}  // namespace tessera
