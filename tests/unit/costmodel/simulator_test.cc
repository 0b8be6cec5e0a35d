#include "costmodel/simulate/simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planner/schedule/pipeline_schedule.h"

namespace tessera {
namespace {

constexpr Duration kMicrosecond = {1'000'000};

Task Compute(GroupId group, std::vector<TaskId> deps = {}) {
  Task task;
  task.group = group;
  task.kernel = "cast";
  task.deps = std::move(deps);
  return task;
}

TaskGraph Groups(int count) {
  TaskGraph tasks;
  for (int g = 0; g < count; ++g) {
    DeviceGroup group;
    group.name = "stage" + std::to_string(g);
    group.devices = {DeviceId(g)};
    tasks.groups.push_back(group);
  }
  DeviceGroup world;
  for (int g = 0; g < count; ++g) world.devices.push_back(DeviceId(g));
  world.axes = {{"world", count}};
  tasks.world = GroupId(count);
  tasks.groups.push_back(world);
  return tasks;
}

// A pipeline of equal stages, transfers free: one task for each action.
Duration PipelineTime(std::string_view schedule, int stages, int microbatches,
                      Duration forward, Duration backward) {
  TaskGraph tasks = Groups(stages);
  std::vector<TaskCost> costs;
  std::map<std::pair<int, int>, TaskId> forwards;
  std::map<std::pair<int, int>, TaskId> backwards;
  const PipelineShape shape = {stages, 1, microbatches};
  for (const StageAction& step :
       GlobalOrder(OrdersOf(*FindSchedule(schedule).value(), shape), shape)) {
    const TaskId id(static_cast<int64_t>(tasks.tasks.size()));
    const int m = step.action.microbatch;
    std::vector<TaskId> deps;
    if (step.action.kind == ActionKind::kForward) {
      if (step.stage > 0) deps.push_back(forwards.at({step.stage - 1, m}));
      forwards[{step.stage, m}] = id;
      costs.push_back({forward, CostSource::kAnalytical});
    } else {
      deps.push_back(forwards.at({step.stage, m}));
      if (step.stage + 1 < stages) {
        deps.push_back(backwards.at({step.stage + 1, m}));
      }
      backwards[{step.stage, m}] = id;
      costs.push_back({backward, CostSource::kAnalytical});
    }
    tasks.tasks.push_back(Compute(GroupId(step.stage), deps));
  }
  return LongestPath(tasks, costs).step_time;
}

// Four stages, eight microbatches: (8 + 4 - 1) * (1 + 2) us = 33 us.
TEST(LongestPath, OneForwardOneBackward) {
  EXPECT_EQ(PipelineTime("1f1b", 4, 8, kMicrosecond, kMicrosecond * 2),
            kMicrosecond * 33);
  EXPECT_EQ(PipelineTime("gpipe", 4, 8, kMicrosecond, kMicrosecond * 2),
            kMicrosecond * 33);
  EXPECT_EQ(PipelineTime("1f1b", 1, 8, kMicrosecond, kMicrosecond * 2),
            kMicrosecond * 24);
  // Fewer microbatches than stages: (2 + 4 - 1) * 3 = 15.
  EXPECT_EQ(PipelineTime("1f1b", 4, 2, kMicrosecond, kMicrosecond * 2),
            kMicrosecond * 15);
}

// compute:  a 0-1, then c waits for the all-reduce b 1-4: c 4-5
// comm:     b 1-4 behind a; d, without dependencies, behind b: 4-5
// another axes' stream: e 0-1
TEST(LongestPath, StreamsRunInOrder) {
  TaskGraph tasks = Groups(2);
  const auto comm = [](AxisSet axes, std::vector<TaskId> deps) {
    Task task = Compute(GroupId(0), std::move(deps));
    task.kind = TaskKind::kComm;
    task.stream = StreamRole::kComm;
    task.axes = axes;
    return task;
  };
  tasks.tasks = {Compute(GroupId(0)), comm(1, {TaskId(0)}),
                 Compute(GroupId(0), {TaskId(1)}), comm(1, {}), comm(2, {})};
  std::vector<TaskCost> costs(5, {kMicrosecond, CostSource::kAnalytical});
  costs[1].duration = kMicrosecond * 3;
  const Timeline timeline = LongestPath(tasks, costs);
  std::vector<int64_t> starts;
  for (const Span& span : timeline.spans) {
    starts.push_back(span.start.picoseconds / kMicrosecond.picoseconds);
  }
  EXPECT_THAT(starts, ::testing::ElementsAre(0, 1, 4, 4, 0));
  EXPECT_EQ(timeline.step_time, kMicrosecond * 5);
}

// Group 0 has both devices, 1 and 2 one each. On device 0: 0-1, 1-4 (group 1),
// then both at 4-5; on device 1 group 2 computes beside group 1: 1-2.
TEST(LongestPath, ADeviceComputesForOneGroupAtATime) {
  TaskGraph tasks = Groups(2);
  tasks.groups.insert(tasks.groups.begin(), DeviceGroup());
  tasks.groups[0].devices = {DeviceId(0), DeviceId(1)};
  tasks.groups[0].axes = {{"both", 2}};
  tasks.world = GroupId(3);
  tasks.tasks = {Compute(GroupId(0)), Compute(GroupId(1)), Compute(GroupId(2)),
                 Compute(GroupId(0))};
  std::vector<TaskCost> costs(4, {kMicrosecond, CostSource::kAnalytical});
  costs[1].duration = kMicrosecond * 3;
  const Timeline timeline = LongestPath(tasks, costs);
  std::vector<int64_t> starts;
  for (const Span& span : timeline.spans) {
    starts.push_back(span.start.picoseconds / kMicrosecond.picoseconds);
  }
  EXPECT_THAT(starts, ::testing::ElementsAre(0, 1, 1, 4));
  EXPECT_EQ(timeline.step_time, kMicrosecond * 5);
  // Device 0 computes 1 + 3 + 1, device 1 only 1 + 1 + 1.
  EXPECT_EQ(BreakdownOf(tasks, timeline).compute, kMicrosecond * 5);
}

// Devices 0 and 1 on switch a, 2 and 3 on switch b; one cable joins a and b.
// All links carry 1 GB/s without latency.
Cluster Bottleneck() {
  Cluster cluster;
  DeviceType type;
  type.name = "device";
  type.memory = {1'000'000'000};
  type.peak_fp32 = {1e12};
  type.memory_bandwidth = {1e9};
  type.compute_efficiency = 1;
  type.memory_efficiency = 1;
  cluster.device_types = {type};
  cluster.link_types = {{"link", "test", {1e9}, {}}};
  cluster.collective = "/plain";
  for (int d = 0; d < 4; ++d) AddDevice(cluster, 0, 0, std::to_string(d));
  const VertexId a = AddVertex(cluster, VertexKind::kSwitch, "a");
  const VertexId b = AddVertex(cluster, VertexKind::kSwitch, "b");
  for (size_t d = 0; d < 4; ++d) {
    Connect(cluster, cluster.devices[d].vertex, d < 2 ? a : b, 0);
  }
  Connect(cluster, a, b, 0);
  return cluster;
}

// Two sends of 1 GB over the cable, from 0 to 2 and from 1 to 3; the second
// starts behind a copy that takes `delay` (1 GB/s, read and written).
std::vector<double> SendEnds(bool share_links, double delay) {
  const Cluster cluster = Bottleneck();
  const Graph graph;
  const Pricer pricer(graph, cluster, nullptr);
  TaskGraph tasks = Groups(4);
  const auto value = [&](int group, int64_t elements) {
    Value v;
    v.what = "x";
    v.group = GroupId(group);
    v.shape = {elements};
    tasks.values.push_back(v);
    return ValueId(static_cast<int64_t>(tasks.values.size()) - 1);
  };
  const auto elements = static_cast<int64_t>(delay * 1e9 / 8);
  if (elements > 0) {
    Task copy = Compute(GroupId(1));
    copy.kind = TaskKind::kSlice;
    copy.reads = {value(1, elements)};
    copy.writes = {value(1, elements)};
    tasks.tasks.push_back(copy);
  }
  std::vector<size_t> sends;
  for (int from : {0, 1}) {
    Task send = Compute(GroupId(from));
    send.kind = TaskKind::kSend;
    send.stream = StreamRole::kSendForward;
    if (from == 1 && elements > 0) send.deps = {TaskId(0)};
    send.reads = {value(from, 250'000'000)};
    send.peer = value(from + 2, 250'000'000);
    sends.push_back(tasks.tasks.size());
    tasks.tasks.push_back(send);
  }
  const auto timeline = Simulate(pricer, tasks, {.share_links = share_links});
  std::vector<double> ends;
  for (size_t send : sends) {
    ends.push_back(timeline.spans[send].end.seconds());
  }
  return ends;
}

// Alone each takes 1 s (and some microseconds to start, which load no link).
TEST(Simulator, FlowsThatShareALinkHalveEachOther) {
  EXPECT_THAT(SendEnds(false, 0),
              ::testing::Each(::testing::DoubleNear(1, 2e-5)));
  EXPECT_THAT(SendEnds(true, 0),
              ::testing::Each(::testing::DoubleNear(2, 1e-9)));
}

// The first is alone for half a second and has 0.5 GB left, which takes a
// second at half the rate; then the second has half a GB left for itself.
TEST(Simulator, RatesChangeWhenAFlowEnds) {
  EXPECT_THAT(SendEnds(true, 0.5),
              ::testing::ElementsAre(::testing::DoubleNear(1.5, 2e-5),
                                     ::testing::DoubleNear(2.0, 2e-5)));
}

// Apart in time they do not meet: the unshared timeline, to the picosecond.
TEST(Simulator, FlowsApartInTimeAreAlone) {
  EXPECT_EQ(SendEnds(true, 1.5), SendEnds(false, 1.5));
}

// Stage 0:  compute 0-2, optimizer 8-9; all-reduce 1-4, send 3-6.
// Busy with compute 0-2, all-reduce 2-4, send 4-6, idle 6-8, optimizer 8-9,
// idle to the end of stage 1's task at 10.
TEST(Breakdown, CountsWhatHidesNothing) {
  TaskGraph tasks = Groups(2);
  Timeline timeline;
  const auto add = [&](TaskKind kind, CommKind comm, int group, bool optimizer,
                       int start, int end) {
    Task task;
    task.kind = kind;
    task.comm = comm;
    task.group = GroupId(group);
    task.optimizer = optimizer;
    tasks.tasks.push_back(task);
    Span span;
    span.task = TaskId(static_cast<int64_t>(tasks.tasks.size()) - 1);
    span.group = GroupId(group);
    span.start = kMicrosecond * start;
    span.end = kMicrosecond * end;
    timeline.spans.push_back(span);
    timeline.step_time = Max(timeline.step_time, span.end);
  };
  add(TaskKind::kCompute, CommKind::kAllReduce, 0, false, 0, 2);
  add(TaskKind::kComm, CommKind::kAllReduce, 0, false, 1, 4);
  add(TaskKind::kSend, CommKind::kSendRecv, 0, false, 3, 6);
  add(TaskKind::kCompute, CommKind::kAllReduce, 0, true, 8, 9);
  add(TaskKind::kCompute, CommKind::kAllReduce, 1, false, 9, 10);
  const Breakdown b = BreakdownOf(tasks, timeline);
  EXPECT_EQ(b.compute, kMicrosecond * 2);
  EXPECT_EQ(b.optimizer, kMicrosecond);
  EXPECT_EQ(b.all_reduce, kMicrosecond * 2);
  EXPECT_EQ(b.send_recv, kMicrosecond * 2);
  EXPECT_EQ(b.idle, kMicrosecond * 3);
  EXPECT_EQ(b.total(), timeline.step_time);
}

}  // namespace
}  // namespace tessera
