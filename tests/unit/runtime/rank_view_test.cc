#include "runtime/rank_view.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "planner/base/rng.h"

namespace tessera {
namespace {

// Ranks `first`, `first` + 1, … as a mesh.
DeviceGroup MakeGroup(int first, const std::vector<int>& sizes) {
  DeviceGroup group;
  int ranks = 1;
  for (int size : sizes) {
    group.axes.push_back({"x" + std::to_string(group.axes.size()), size});
    ranks *= size;
  }
  for (int i = 0; i < ranks; ++i) group.devices.emplace_back(first + i);
  return group;
}

Graph OneTensor(const Shape& shape) {
  Graph graph;
  Tensor tensor;
  tensor.name = "t";
  tensor.shape = shape;
  graph.tensors.push_back(tensor);
  return graph;
}

Value ValueOf(const Shape& shape, const Layout& layout) {
  Value value;
  value.what = "value";
  value.tensor = TensorId(0);
  value.group = GroupId(0);
  value.shape = shape;
  value.layout = layout;
  return value;
}

Task Exchange(AxisSet axes, std::vector<ValueId> reads,
              std::vector<ValueId> writes) {
  Task task;
  task.kind = TaskKind::kComm;
  task.axes = axes;
  task.group = GroupId(0);
  task.reads = std::move(reads);
  task.writes = std::move(writes);
  return task;
}

TEST(RankView, KnowsItsPlaceInGroups) {
  TaskGraph tasks;
  tasks.groups = {MakeGroup(0, {2}), MakeGroup(1, {3})};
  const Graph graph;
  const RankView view(tasks, graph, 1);
  EXPECT_EQ(view.position(GroupId(0)), 1);
  EXPECT_EQ(view.position(GroupId(1)), 0);
  EXPECT_EQ(RankView(tasks, graph, 0).position(GroupId(1)), -1);
  EXPECT_EQ(RankView(tasks, graph, 3).position(GroupId(1)), 2);
}

// Of the mesh 2 x 3 of ranks 4 to 9, rank 4 + 3 a + b is at (a, b).
TEST(RankView, SubgroupsDifferInTheirAxesAlone) {
  TaskGraph tasks;
  tasks.groups = {MakeGroup(4, {2, 3})};
  for (const AxisSet axes : {0b00, 0b01, 0b10, 0b11}) {
    tasks.tasks.push_back(Exchange(axes, {}, {}));
  }
  const Graph graph;
  const RankView view(tasks, graph, 8);  // (1, 1)
  const std::vector<std::vector<int>> expected = {
      {4}, {1, 4}, {3, 4, 5}, {0, 1, 2, 3, 4, 5}};
  for (size_t t = 0; t < expected.size(); ++t) {
    EXPECT_EQ(view.Subgroup(tasks.tasks[t]), expected[t]);
    std::vector<int> ranks = expected[t];
    for (int& rank : ranks) rank += 4;
    EXPECT_EQ(view.RanksOfSubgroup(tasks.tasks[t]), ranks);
  }
}

TEST(RankView, WhatIsOnTheStreamOfExchangesHasASubgroup) {
  TaskGraph tasks;
  tasks.groups = {MakeGroup(0, {2, 3})};
  Task task = Exchange(0b10, {}, {});
  task.kind = TaskKind::kSlice;
  task.stream = StreamRole::kComm;
  tasks.tasks = {task};
  const Graph graph;
  EXPECT_EQ(RankView(tasks, graph, 1).Subgroup(task),
            (std::vector<int>{0, 1, 2}));
}

// The ranks that hold different parts hold, together, every element once; and
// the tensor that a rank has is as large as its bytes say.
TEST(RankView, PartsMakeTheWhole) {
  Rng rng(5);
  for (int trial = 0; trial < 100; ++trial) {
    const Shape shape = {1 + rng.Below(7), 1 + rng.Below(7)};
    TaskGraph tasks;
    tasks.groups = {MakeGroup(0, {2, 3})};
    Layout layout;
    AxisSet cut = 0;  // the axes along which parts differ
    for (const AxisSet axis : {0b01, 0b10}) {
      const uint32_t choice = rng.Below(4);
      if (choice < 2) layout.dims[choice] |= axis;
      if (choice == 2) layout.flat |= axis;
      if (choice < 3) cut |= axis;
    }
    tasks.values = {ValueOf(shape, layout)};
    const Graph graph = OneTensor(shape);
    int64_t bytes = 0;
    for (int rank = 0; rank < 6; ++rank) {
      const RankView view(tasks, graph, rank);
      const Bytes here = view.BytesOf(ValueId(0));
      EXPECT_EQ(view.local(ValueId(0)).elements() * 4, here.value);
      EXPECT_EQ(view.placement(ValueId(0)).elements() * 4, here.value);
      EXPECT_EQ(view.IsAlone(ValueId(0)), cut == 0b11);
      bytes += here.value;
    }
    const int64_t copies =
        tasks.groups[0].Size(tasks.groups[0].all_axes() & ~cut);
    EXPECT_EQ(bytes, shape[0] * shape[1] * 4 * copies);
  }
}

// Rank 1 of 2 has samples 2 and 3 of the microbatch, which begins with the
// batch's sample 4.
TEST(RankView, AMicrobatchIsARangeOfSamples) {
  TaskGraph tasks;
  tasks.groups = {MakeGroup(0, {2})};
  Layout rows;
  rows.dims[0] = 1;
  tasks.values = {ValueOf({4, 5}, rows)};
  tasks.values[0].sample_dim = 0;
  tasks.values[0].sample_offset = 4;
  const Graph graph = OneTensor({8, 5});
  const LocalTensor part = RankView(tasks, graph, 1).local(ValueId(0));
  EXPECT_EQ(part.data, nullptr);
  EXPECT_EQ(part.shape, (Shape{2, 5}));
  EXPECT_EQ(part.offset, (Shape{6, 0}));
  EXPECT_EQ(part.global_shape, (Shape{8, 5}));
}

// The root of axis 0 alone, at (0, b), has a sum; what spreads it again is work
// of all, what makes it is the roots'.
TEST(RankView, WhoIsAwayFromTheRootIsIdle) {
  TaskGraph tasks;
  tasks.groups = {MakeGroup(0, {2, 2})};
  Layout at_root;
  at_root.rooted = 0b01;
  tasks.values = {ValueOf({4}, {}), ValueOf({4}, at_root),
                  ValueOf({4}, at_root)};
  Task update;
  update.kind = TaskKind::kCompute;
  update.group = GroupId(0);
  update.reads = {ValueId(1)};
  update.writes = {ValueId(2)};
  tasks.tasks = {update, Exchange(0b01, {ValueId(2)}, {ValueId(0)}),
                 Exchange(0b10, {ValueId(1)}, {ValueId(2)})};
  const Graph graph = OneTensor({4});
  for (int rank = 0; rank < 4; ++rank) {
    const RankView view(tasks, graph, rank);
    const bool away = rank >= 2;
    EXPECT_FALSE(view.IsAbsent(ValueId(0)));
    EXPECT_EQ(view.IsAbsent(ValueId(1)), away);
    EXPECT_EQ(view.IsIdle(tasks.tasks[0]), away);
    EXPECT_FALSE(view.IsIdle(tasks.tasks[1]));
    EXPECT_EQ(view.IsIdle(tasks.tasks[2]), away);
  }
}

}  // namespace
}  // namespace tessera
