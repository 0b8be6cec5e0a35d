#include "costmodel/memory/peak_memory.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

// No tasks yet; group 0 has two devices along one axis.
TaskGraph OfTwoDevices() {
  TaskGraph tasks;
  DeviceGroup group;
  group.devices = {DeviceId(0), DeviceId(1)};
  group.axes = {{"tp", 2}};
  tasks.groups = {group, group};
  tasks.world = GroupId(1);
  return tasks;
}

// A parameter of 100 elements (400 bytes) for the whole step; an input of 10
// (40) of which one task makes an activation of 30, split in two (60), that is
// reduced in place and of which a copy of 5 (20) is made.
//   load     400 + 40
//   compute  400 + 40 + 60 = 500, then the input ends
//   reduce   400 + 60
//   copy     400 + 60 + 20 = 480
TEST(PeakMemory, FollowsLifetimesInIssueOrder) {
  TaskGraph tasks = OfTwoDevices();
  const auto value = [&](Shape shape, MemoryCategory category) {
    Value v;
    v.what = "value";
    v.group = GroupId(0);
    v.shape = std::move(shape);
    v.category = category;
    tasks.values.push_back(v);
    return ValueId(static_cast<int64_t>(tasks.values.size()) - 1);
  };
  const ValueId parameter = value({100}, MemoryCategory::kParameter);
  tasks.values.back().persistent = true;
  const ValueId input = value({10}, MemoryCategory::kActivation);
  const ValueId partial = value({30}, MemoryCategory::kActivation);
  tasks.values.back().layout.dims[0] = 1;
  const ValueId whole = value({30}, MemoryCategory::kCommunication);
  tasks.values.back().alias_of = partial;
  const ValueId message = value({5}, MemoryCategory::kCommunication);
  const auto add = [&](std::vector<ValueId> reads,
                       std::vector<ValueId> writes) {
    Task task;
    task.group = GroupId(0);
    task.reads = std::move(reads);
    task.writes = std::move(writes);
    tasks.tasks.push_back(task);
  };
  add({}, {input});
  add({parameter, input}, {partial});
  add({partial}, {whole});
  add({whole}, {message});
  const std::vector<MemoryUse> peaks = PeakMemory(tasks);
  ASSERT_EQ(peaks.size(), 1u);
  EXPECT_EQ(peaks[0].total, Bytes{500});
  const auto part = [&](MemoryCategory category) {
    return peaks[0].parts[static_cast<size_t>(category)];
  };
  EXPECT_EQ(part(MemoryCategory::kParameter), Bytes{400});
  EXPECT_EQ(part(MemoryCategory::kActivation), Bytes{100});
  EXPECT_EQ(part(MemoryCategory::kCommunication), Bytes{0});
  const auto groups = std::span(tasks.groups).first(tasks.world.index());
  const std::vector<HeldBuffer> held = {
      {Bytes{400}, MemoryCategory::kParameter, parameter},
      {Bytes{60}, MemoryCategory::kActivation, partial},
      {Bytes{40}, MemoryCategory::kActivation, input}};
  EXPECT_EQ(LargestAtPeak(tasks, DeviceSets(groups)[0], 9), held);
  EXPECT_EQ(LargestAtPeak(tasks, DeviceSets(groups)[0], 1),
            (std::vector<HeldBuffer>{held[0]}));
}

// An input of 10 rows of 10 (400 bytes, of each of two ranks 200) is cut by
// columns instead: what a rank sends and what it receives are in flight beside
// it, 400 bytes beside 200 + 200. Later there are 500 bytes of values, but
// nothing beside them.
TEST(PeakMemory, ListsWhatIsStagedAtThePeak) {
  TaskGraph tasks = OfTwoDevices();
  const auto value = [&](Shape shape, int dim) {
    Value v;
    v.what = "value";
    v.group = GroupId(0);
    v.shape = std::move(shape);
    if (dim >= 0) v.layout.dims[static_cast<size_t>(dim)] = 1;
    v.category = MemoryCategory::kActivation;
    tasks.values.push_back(v);
    return ValueId(static_cast<int64_t>(tasks.values.size()) - 1);
  };
  const ValueId rows = value({10, 10}, 0);
  const ValueId columns = value({10, 10}, 1);
  const ValueId other = value({75}, -1);
  Task exchange;
  exchange.kind = TaskKind::kComm;
  exchange.comm = CommKind::kAllToAll;
  exchange.group = GroupId(0);
  exchange.axes = 1;
  exchange.reads = {rows};
  exchange.writes = {columns};
  Task compute;
  compute.group = GroupId(0);
  compute.reads = {columns};
  compute.writes = {other};
  tasks.tasks = {exchange, compute};
  const DeviceSet set =
      DeviceSets(std::span(tasks.groups).first(tasks.world.index()))[0];
  const std::vector<HeldBuffer> held = LargestAtPeak(tasks, set, 9);
  const std::vector<HeldBuffer> expected = {
      {Bytes{400}, MemoryCategory::kCommunication, {}},
      {Bytes{200}, MemoryCategory::kActivation, rows},
      {Bytes{200}, MemoryCategory::kActivation, columns}};
  EXPECT_EQ(held, expected);
  EXPECT_EQ(PeakMemory(tasks)[0].total, Bytes{800});
  EXPECT_EQ(LargestAtPeakText(tasks, Graph{}, set),
            "400 B of messages (communication), 200 B value (activations), "
            "200 B value (activations)");
}

// Seven rows of 10 elements over three ranks are 2, 2 and 3 rows: 80, 80 and
// 120 bytes. To become columns (3, 3, 4 of them), rank 0 sends its 20 elements
// and receives 21, 164 bytes in flight beside its 80 and 84; rank 1 the same;
// rank 2 sends 30 and receives 28: 232 beside 120 and 112.
TEST(PeakMemory, OfEachRankByItsOwnShards) {
  TaskGraph tasks;
  DeviceGroup group;
  group.name = "three";
  group.devices = {DeviceId(0), DeviceId(1), DeviceId(2)};
  group.axes = {{"tp", 3}};
  tasks.groups = {group, group};
  tasks.world = GroupId(1);
  for (size_t dim : {size_t{0}, size_t{1}}) {
    Value value;
    value.group = GroupId(0);
    value.shape = {7, 10};
    value.layout.dims[dim] = 1;
    value.category = MemoryCategory::kActivation;
    tasks.values.push_back(value);
  }
  Task task;
  task.kind = TaskKind::kComm;
  task.comm = CommKind::kAllToAll;
  task.group = GroupId(0);
  task.axes = 1;
  task.reads = {ValueId(0)};
  task.writes = {ValueId(1)};
  tasks.tasks.push_back(task);
  const std::vector<MemoryUse> peaks =
      PeakMemoryOf(tasks, tasks.groups[0].devices);
  EXPECT_EQ(peaks[0].total, Bytes{80 + 84 + 164});
  EXPECT_EQ(peaks[1].total, Bytes{80 + 84 + 164});
  EXPECT_EQ(peaks[2].total, Bytes{120 + 112 + 232});
  EXPECT_EQ(PeakMemory(tasks)[0].total, peaks[2].total);
  const std::vector<DeviceSet> alike = AlikeDevices(tasks);
  ASSERT_EQ(alike.size(), 2u);
  EXPECT_EQ(alike[0].devices,
            (std::vector<DeviceId>{DeviceId(0), DeviceId(1)}));
  EXPECT_EQ(alike[1].devices, (std::vector<DeviceId>{DeviceId(2)}));
  EXPECT_EQ(alike[1].name, "three");
}

// Group 0 is devices 0 and 1 with 40 bytes, group 1 device 1 with 400 more.
TEST(PeakMemory, ADeviceHoldsWhatAllItsGroupsDo) {
  TaskGraph tasks;
  DeviceGroup both;
  both.name = "both";
  both.devices = {DeviceId(0), DeviceId(1)};
  both.axes = {{"dp", 2}};
  DeviceGroup second;
  second.name = "second";
  second.devices = {DeviceId(1)};
  tasks.groups = {both, second, both};
  tasks.world = GroupId(2);
  for (const int64_t elements : {10, 100}) {
    Value v;
    v.group = GroupId(elements == 10 ? 0 : 1);
    v.shape = {elements};
    v.persistent = true;
    tasks.values.push_back(v);
  }
  // The sets of devices {0} and {1}, in this order.
  const std::vector<MemoryUse> peaks = PeakMemory(tasks);
  ASSERT_EQ(peaks.size(), 2u);
  EXPECT_EQ(peaks[0].total, Bytes{40});
  EXPECT_EQ(peaks[1].total, Bytes{440});
}

}  // namespace
}  // namespace tessera
