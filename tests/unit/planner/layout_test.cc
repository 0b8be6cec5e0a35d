#include "planner/plan/layout.h"

#include <gtest/gtest.h>

#include "planner/base/element_count.h"
#include "planner/base/rng.h"

namespace tessera {
namespace {

DeviceGroup Mesh(std::vector<int> sizes) {
  DeviceGroup group;
  int64_t n = 1;
  for (size_t a = 0; a < sizes.size(); ++a) {
    group.axes.push_back({"a" + std::to_string(a), sizes[a]});
    n *= sizes[a];
  }
  for (int64_t d = 0; d < n; ++d) group.devices.push_back(DeviceId(d));
  return group;
}

TEST(ShardRange, DroppingInnerPartsYieldsTheCoarserSplit) {
  // 7 over 2x3: [0,1)[1,2)[2,3) [3,4)[4,5)[5,7): floor(i*7/6).
  for (int64_t n : {5, 6, 7, 13, 50257}) {
    for (int64_t outer : {2, 3}) {
      for (int64_t inner : {2, 3, 5}) {
        for (int64_t i = 0; i < outer; ++i) {
          const Range coarse = ShardRange(n, outer, i);
          EXPECT_EQ(coarse.begin,
                    ShardRange(n, outer * inner, i * inner).begin);
          EXPECT_EQ(coarse.end,
                    ShardRange(n, outer * inner, (i + 1) * inner - 1).end);
        }
      }
    }
  }
}

TEST(ShardRange, SharesAreExactPartsOfWhatOuterAxesLeave) {
  // Parts 3:1 of 16, each in two: 6, 6, 2, 2.
  DeviceGroup group = Mesh({2, 2});
  group.axes[0].shares = {3, 1};
  const Range ranges[] = {{0, 6}, {6, 12}, {12, 14}, {14, 16}};
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(ShardRange(group, 3, 16, i), ranges[i]) << i;
  }
  EXPECT_EQ(ShardRange(group, 1, 16, 1), (Range{12, 16}));
  EXPECT_EQ(ShardRange(group, 2, 16, 1), (Range{8, 16}));
  EXPECT_EQ(LargestShard(group, 3, 16), 6);
  EXPECT_EQ(SmallestShard(group, 3, 16), 2);
  // The inner one instead: 6, 2, 6, 2.
  std::swap(group.axes[0].shares, group.axes[1].shares);
  EXPECT_EQ(ShardRange(group, 3, 16, 1), (Range{6, 8}));
  EXPECT_EQ(ShardRange(group, 3, 16, 2), (Range{8, 14}));
  // As the ranks at the inner coordinate 1 see it.
  const int positions[] = {1, 3};
  const DeviceGroup counted = CountedAt(group, positions);
  EXPECT_EQ(LargestShard(counted, 3, 16), 2);
  // Not whole: parts of 7 begin at 0, 2.6, 3.5 and 6.1.
  EXPECT_EQ(ShardRange(group, 3, 7, 1), (Range{2, 3}));
  EXPECT_EQ(LargestShard(group, 3, 7), 3);
  EXPECT_EQ(SmallestShard(group, 3, 7), 1);
  EXPECT_EQ(LargestShard(counted, 3, 7), 1);
}

// Whatever the shares: shards follow one another, cover all, and are parts of
// the coarser ones; the largest and smallest are those there are.
TEST(ShardRange, UnequalShardsCutTheCoarserOnes) {
  Rng rng(3);
  for (int trial = 0; trial < 300; ++trial) {
    DeviceGroup group = Mesh({2, 3, 2});
    for (MeshAxis& axis : group.axes) {
      if (rng.Below(3) == 0) continue;
      for (int c = 0; c < axis.size; ++c) {
        axis.shares.push_back(1 + static_cast<int>(rng.Below(5)));
      }
    }
    const int64_t extent = 1 + rng.Below(100);
    int64_t largest = 0;
    int64_t smallest = extent;
    int64_t end = 0;
    for (int64_t i = 0; i < 12; ++i) {
      const Range shard = ShardRange(group, 7, extent, i);
      EXPECT_EQ(shard.begin, end);
      end = shard.end;
      largest = std::max(largest, shard.size());
      smallest = std::min(smallest, shard.size());
      const Range coarse = ShardRange(group, 3, extent, i / 2);
      if (i % 2 == 0) {
        EXPECT_EQ(shard.begin, coarse.begin);
      } else {
        EXPECT_EQ(shard.end, coarse.end);
      }
    }
    EXPECT_EQ(end, extent);
    EXPECT_EQ(LargestShard(group, 7, extent), largest);
    EXPECT_EQ(SmallestShard(group, 7, extent), smallest);
  }
}

TEST(Layout, TilesCutEachRanksBlock) {
  // 11 rows over 2 ranks: [0,5) and [5,11); in 3 tiles: 1, 2, 2 and 2, 2, 2.
  const DeviceGroup group = Mesh({2});
  Layout layout;
  layout.dims[1] = 1;
  layout.tile = {1, 0, 3};
  const Shape shape = {4, 11};
  const std::vector<std::vector<Range>> rows = {{{0, 1}, {1, 3}, {3, 5}},
                                                {{5, 7}, {7, 9}, {9, 11}}};
  for (int rank = 0; rank < 2; ++rank) {
    for (int t = 0; t < 3; ++t) {
      layout.tile.index = t;
      EXPECT_EQ(BlockAt(layout, group, shape, rank),
                (std::vector<Range>{
                    {0, 4},
                    rows[static_cast<size_t>(rank)][static_cast<size_t>(t)]}));
    }
  }
  EXPECT_EQ(LargestBlock(layout, group, shape), (Shape{4, 2}));
  // A run of a tile: 8 elements over the other axis of 2.
  const DeviceGroup square = Mesh({2, 2});
  layout.tile.index = 0;
  layout.flat = 2;
  EXPECT_EQ(FlatRunAt(layout, square, shape, 3), (Range{4, 8}));
  EXPECT_EQ(LargestElements(layout, square, shape), 4);
}

TEST(Layout, TheLargestTileMayBeThatOfASmallerShard) {
  // The third of 5 tiles of 2 rows is a row; of 3 rows it is none: [1, 1).
  Layout layout;
  layout.dims[0] = 1;
  layout.tile = {0, 2, 5};
  EXPECT_EQ(LargestExtent(layout, Mesh({2}), {5}, 0), 1);
}

TEST(DeviceGroup, CoordinatesAreRowMajor) {
  const DeviceGroup group = Mesh({2, 3, 2});
  // 9 = 1*6 + 1*2 + 1.
  EXPECT_EQ(group.Coordinate(9, 0), 1);
  EXPECT_EQ(group.Coordinate(9, 1), 1);
  EXPECT_EQ(group.Coordinate(9, 2), 1);
  EXPECT_EQ(group.Coordinate(9, AxisSet{0b101}), 3);
  EXPECT_EQ(Subgroups(group, 0b010),
            (std::vector<std::vector<int>>{
                {0, 2, 4}, {1, 3, 5}, {6, 8, 10}, {7, 9, 11}}));
}

TEST(Layout, TurnedBlocksAreThoseOfRanksFurtherOn) {
  // 7 rows over 3 ranks of the inner axis: [0,2) [2,4) [4,7).
  const DeviceGroup group = Mesh({2, 3});
  Layout layout;
  layout.dims = {0b10, 0b01};
  layout.ring = 0b10;
  layout.turn = 2;
  const Shape shape = {7, 2};
  EXPECT_EQ(BlockAt(layout, group, shape, 0),
            (std::vector<Range>{{4, 7}, {0, 1}}));
  EXPECT_EQ(BlockAt(layout, group, shape, 1),
            (std::vector<Range>{{0, 2}, {0, 1}}));
  EXPECT_EQ(BlockAt(layout, group, shape, 5),
            (std::vector<Range>{{2, 4}, {1, 2}}));
  EXPECT_EQ(ToString(layout, group, 2), "[a1, a0] turned by 2");
}

// What each rank holds of a tensor: a value where `held`.
struct Held {
  std::vector<bool> held;
  std::vector<double> value;
};

// The elements that `layout` puts on the rank at `index`.
std::vector<bool> Mask(const Layout& layout, const DeviceGroup& group,
                       const Shape& shape, int index) {
  const auto block = BlockAt(layout, group, shape, index);
  const Range run = FlatRunAt(layout, group, shape, index);
  std::vector<bool> mask(static_cast<size_t>(ElementCount(shape)));
  int64_t in_block = 0;
  for (int64_t e = 0; e < ElementCount(shape); ++e) {
    int64_t rest = e;
    bool inside = true;
    for (size_t d = shape.size(); d-- > 0;) {
      const int64_t i = rest % shape[d];
      rest /= shape[d];
      inside = inside && i >= block[d].begin && i < block[d].end;
    }
    if (!inside) continue;
    mask[static_cast<size_t>(e)] = in_block >= run.begin && in_block < run.end;
    ++in_block;
  }
  return mask;
}

// Runs the steps by the definition of each kind, on every rank's own data.
void RunStep(const ReshardStep& step, const Layout& from,
             const DeviceGroup& group, const Shape& shape,
             std::vector<Held>& ranks) {
  const std::vector<Held> before = ranks;
  const AxisSet new_partial = step.to.partial & ~from.partial;
  for (const std::vector<int>& members : Subgroups(group, step.axes)) {
    for (int me : members) {
      Held result;
      result.held = Mask(step.to, group, shape, me);
      result.value.assign(result.held.size(), 0);
      for (size_t e = 0; e < result.held.size(); ++e) {
        if (!result.held[e]) continue;
        int found = 0;
        for (int other : members) {
          const Held& h = before[static_cast<size_t>(other)];
          if (!h.held[e]) continue;
          const bool sums = step.kind == ReshardKind::kAllReduce ||
                            step.kind == ReshardKind::kReduceScatter ||
                            step.kind == ReshardKind::kReduce;
          if (sums || found == 0) result.value[e] += h.value[e];
          ++found;
        }
        ASSERT_GT(found, 0) << "element " << e << " is out of reach";
        if (group.Coordinate(me, new_partial) != 0) result.value[e] = 0;
      }
      ranks[static_cast<size_t>(me)] = result;
    }
  }
}

Layout RandomLayout(Rng& rng, const DeviceGroup& group, size_t dims, bool flat,
                    bool partial, bool rooted) {
  Layout layout;
  for (size_t a = 0; a < group.axes.size(); ++a) {
    const AxisSet axis = AxisSet{1} << a;
    if (rooted && rng.Below(4) == 0) {
      layout.rooted |= axis;
      continue;
    }
    const uint32_t choice =
        rng.Below(static_cast<uint32_t>(dims) + 1 + partial + flat);
    if (choice < dims) {
      layout.dims[choice] |= axis;
    } else if (choice == dims + 1 && partial) {
      layout.partial |= axis;
    } else if (choice > dims && flat) {
      layout.flat |= axis;
    }
  }
  return layout;
}

// Every pair of layouts: what PlanReshard does to real data is the layout that
// was asked for. `replicated` ranks start equal; partial ranks start with
// shares that sum to the tensor.
TEST(PlanReshard, MovesTheDataItSays) {
  Rng rng(1);
  const std::vector<std::vector<int>> meshes = {
      {2}, {3}, {2, 2}, {2, 3}, {3, 2}, {2, 2, 2}, {2, 3, 2}};
  for (int round = 0; round < 4000; ++round) {
    const DeviceGroup group =
        Mesh(meshes[rng.Below(static_cast<uint32_t>(meshes.size()))]);
    const Shape shape = {12 + rng.Below(3), 13};
    const bool rooted = round % 2 == 1;
    const Layout from = RandomLayout(rng, group, 2, false, true, rooted);
    Layout to = RandomLayout(rng, group, 2, true, true, rooted);
    // A flat cut is asked for by storage only, which is never partial.
    if (to.flat != 0) to.partial = 0;
    to.partial &= ~from.sharded();  // a shard never becomes partial here
    std::vector<double> truth(static_cast<size_t>(ElementCount(shape)));
    for (double& x : truth) x = rng.Below(1000);
    std::vector<Held> ranks(group.devices.size());
    for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
      Held& h = ranks[static_cast<size_t>(r)];
      h.held = Mask(from, group, shape, r);
      h.value.resize(truth.size());
      const int64_t share = group.Coordinate(r, from.partial);
      const int64_t shares = group.Size(from.partial);
      for (size_t e = 0; e < truth.size(); ++e) {
        // Shares 1, 1, …, and the rest on the last.
        h.value[e] =
            share + 1 < shares ? 1 : truth[e] - static_cast<double>(shares - 1);
      }
    }
    const std::string what = ToString(from, group, 2) + " -> " +
                             ToString(to, group, 2) + " on " +
                             std::to_string(group.devices.size());
    Layout now = from;
    for (const ReshardStep& step : PlanReshard(from, to, group)) {
      RunStep(step, now, group, shape, ranks);
      ASSERT_FALSE(HasFatalFailure()) << what;
      now = step.to;
    }
    ASSERT_EQ(now, to) << what;
    for (const std::vector<int>& members : Subgroups(group, to.partial)) {
      for (size_t e = 0; e < truth.size(); ++e) {
        double sum = 0;
        bool held = false;
        for (int r : members) {
          const Held& h = ranks[static_cast<size_t>(r)];
          held = held || h.held[e];
          if (h.held[e]) sum += h.value[e];
        }
        if (held) {
          ASSERT_EQ(sum, truth[e]) << what << " element " << e;
        }
      }
    }
  }
}

TEST(PlanReshard, OneCollectiveForSeveralAxes) {
  const DeviceGroup group = Mesh({2, 2, 2});
  Layout partial;
  partial.partial = 0b111;
  const auto steps = PlanReshard(partial, Layout(), group);
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].kind, ReshardKind::kAllReduce);
  EXPECT_EQ(steps[0].axes, AxisSet{0b111});
}

TEST(PlanReshard, EachConversionIsItsCollective) {
  const DeviceGroup group = Mesh({4});
  Layout whole;
  Layout rows;
  rows.dims[0] = 1;
  Layout columns;
  columns.dims[1] = 1;
  Layout partial;
  partial.partial = 1;
  Layout flat;
  flat.flat = 1;
  Layout root;
  root.rooted = 1;
  const auto kind = [&](const Layout& a, const Layout& b) {
    const auto steps = PlanReshard(a, b, group);
    EXPECT_EQ(steps.size(), 1u);
    return steps.at(0).kind;
  };
  EXPECT_EQ(kind(rows, whole), ReshardKind::kAllGather);
  EXPECT_EQ(kind(whole, rows), ReshardKind::kSlice);
  EXPECT_EQ(kind(partial, whole), ReshardKind::kAllReduce);
  EXPECT_EQ(kind(partial, rows), ReshardKind::kReduceScatter);
  EXPECT_EQ(kind(rows, columns), ReshardKind::kAllToAll);
  EXPECT_EQ(kind(whole, partial), ReshardKind::kSlice);
  EXPECT_EQ(kind(partial, flat), ReshardKind::kReduceScatter);
  EXPECT_EQ(kind(flat, whole), ReshardKind::kAllGather);
  EXPECT_EQ(kind(whole, flat), ReshardKind::kSlice);
  EXPECT_EQ(kind(root, rows), ReshardKind::kScatter);
  EXPECT_EQ(kind(root, whole), ReshardKind::kBroadcast);
  EXPECT_EQ(kind(rows, root), ReshardKind::kGather);
  EXPECT_EQ(kind(partial, root), ReshardKind::kReduce);
  EXPECT_EQ(kind(whole, root), ReshardKind::kSlice);
}

}  // namespace
}  // namespace tessera
