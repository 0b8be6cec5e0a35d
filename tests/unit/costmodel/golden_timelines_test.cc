// Small timelines worked out by hand.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "costmodel/simulate/simulator.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/schedule/pipeline_schedule.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

// Four devices, each with a link of 1 GB/s to one switch, without latency.
Cluster Star() {
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
  const VertexId hub = AddVertex(cluster, VertexKind::kSwitch, "hub");
  for (const Device& device : cluster.devices) {
    Connect(cluster, device.vertex, hub, 0);
  }
  return cluster;
}

// Tasks of the four devices, each a group of its own; the fifth group is all.
class StarTimeline {
 public:
  StarTimeline() {
    DeviceGroup world;
    world.axes = {{"world", 4}};
    for (int d = 0; d < 4; ++d) {
      DeviceGroup group;
      group.devices = {DeviceId(d)};
      tasks_.groups.push_back(group);
      world.devices.push_back(DeviceId(d));
    }
    tasks_.world = GroupId(4);
    tasks_.groups.push_back(world);
  }

  TaskId Send(int from, int to, int64_t bytes, std::vector<TaskId> deps) {
    Task task;
    task.kind = TaskKind::kSend;
    task.stream = StreamRole::kSendForward;
    task.group = GroupId(from);
    task.reads = {AddValue(from, bytes)};
    task.peer = AddValue(to, bytes);
    return Add(std::move(task), std::move(deps));
  }

  TaskId AllReduce(int64_t bytes) {
    Task task;
    task.kind = TaskKind::kComm;
    task.comm = CommKind::kAllReduce;
    task.stream = StreamRole::kComm;
    task.group = tasks_.world;
    task.axes = 1;
    task.reads = {AddValue(4, bytes)};
    task.writes = {AddValue(4, bytes)};
    return Add(std::move(task), {});
  }

  // Ends in seconds.
  std::vector<double> Ends() const {
    const Graph graph;
    const Cluster cluster = Star();
    const Pricer pricer(graph, cluster, nullptr);
    std::vector<double> ends;
    const Timeline timeline = Simulate(pricer, tasks_);
    for (const Span& span : timeline.spans) ends.push_back(span.end.seconds());
    return ends;
  }

 private:
  ValueId AddValue(int group, int64_t bytes) {
    Value value;
    value.what = "x";
    value.group = GroupId(group);
    value.shape = {bytes / 4};
    tasks_.values.push_back(value);
    return ValueId(static_cast<int64_t>(tasks_.values.size()) - 1);
  }
  TaskId Add(Task task, std::vector<TaskId> deps) {
    task.deps = std::move(deps);
    tasks_.tasks.push_back(std::move(task));
    return TaskId(static_cast<int64_t>(tasks_.tasks.size()) - 1);
  }

  TaskGraph tasks_;
};

// A start costs some microseconds, which load no link.
constexpr double kStarts = 2e-4;

// 1 GB takes a second: there 0-1, back 1-2, there 2-3.
TEST(GoldenTimeline, PingPong) {
  StarTimeline star;
  const TaskId ping = star.Send(0, 1, 1'000'000'000, {});
  const TaskId pong = star.Send(1, 0, 1'000'000'000, {ping});
  star.Send(0, 1, 1'000'000'000, {pong});
  EXPECT_THAT(star.Ends(), Pointwise(DoubleNear(kStarts), {1.0, 2.0, 3.0}));
}

// Both ways at once: links carry as much each way.
TEST(GoldenTimeline, BothWaysAtOnce) {
  StarTimeline star;
  star.Send(0, 1, 1'000'000'000, {});
  star.Send(1, 0, 1'000'000'000, {});
  EXPECT_THAT(star.Ends(), Pointwise(DoubleNear(kStarts), {1.0, 1.0}));
}

// Device 2 receives from 0 and from 1: its link is shared until 2 s, when both
// have sent 1 GB; 1 has another GB, alone, until 3 s. What 3 sends to 0
// meanwhile is in nobody's way.
TEST(GoldenTimeline, TwoFlowsOnOneLink) {
  StarTimeline star;
  star.Send(0, 2, 1'000'000'000, {});
  star.Send(1, 2, 2'000'000'000, {});
  star.Send(3, 0, 1'000'000'000, {});
  EXPECT_THAT(star.Ends(), Pointwise(DoubleNear(kStarts), {2.0, 3.0, 1.0}));
}

// A ring of 4 in 2 * 3 rounds; in each every device sends a quarter of the
// 4 GB to the next: 6 s. As one task, and as 24 sends.
TEST(GoldenTimeline, RingAllReduceOnFour) {
  StarTimeline whole;
  whole.AllReduce(4'000'000'000);
  EXPECT_THAT(whole.Ends(), Pointwise(DoubleNear(kStarts), {6.0}));

  StarTimeline sends;
  std::vector<double> expected;
  std::vector<TaskId> last(4);
  for (int round = 0; round < 6; ++round) {
    std::vector<TaskId> now;
    for (int d = 0; d < 4; ++d) {
      std::vector<TaskId> received;
      if (round > 0) received = {last[static_cast<size_t>((d + 3) % 4)]};
      now.push_back(sends.Send(d, (d + 1) % 4, 1'000'000'000, received));
      expected.push_back(round + 1);
    }
    last = now;
  }
  EXPECT_THAT(sends.Ends(), Pointwise(DoubleNear(kStarts), expected));
}

// A pipeline of equal stages whose transfers take no time: one task for each
// action, a unit of time each, or two for whole backwards.
struct PipelineTimeline {
  std::vector<StageAction> actions;
  std::vector<int64_t> starts;  // parallel
  int64_t step = 0;

  // Of one stage, in order.
  std::vector<int64_t> StartsOf(int stage) const {
    std::vector<int64_t> out;
    for (size_t i = 0; i < actions.size(); ++i) {
      if (actions[i].stage == stage) out.push_back(starts[i]);
    }
    return out;
  }
};

PipelineTimeline Pipeline(std::string_view schedule, int stages,
                          int microbatches) {
  const PipelineShape shape = {stages, 1, microbatches};
  PipelineTimeline out;
  out.actions =
      GlobalOrder(OrdersOf(*FindSchedule(schedule).value(), shape), shape);
  TaskGraph tasks;
  tasks.groups.resize(static_cast<size_t>(stages) + 1);
  for (int s = 0; s < stages; ++s) {
    tasks.groups[static_cast<size_t>(s)].devices = {DeviceId(s)};
  }
  tasks.world = GroupId(stages);
  std::vector<TaskCost> costs;
  // By stage and microbatch; of backwards those with the activations'.
  std::map<std::pair<int, int>, TaskId> forwards;
  std::map<std::pair<int, int>, TaskId> backwards;
  for (const auto& [stage, action] : out.actions) {
    const TaskId id(static_cast<int64_t>(tasks.tasks.size()));
    const int m = action.microbatch;
    Task task;
    task.group = GroupId(stage);
    task.kernel = "cast";
    if (action.kind == ActionKind::kForward) {
      if (stage > 0) task.deps = {forwards.at({stage - 1, m})};
      forwards[{stage, m}] = id;
    } else if (action.kind != ActionKind::kBackwardWeight) {
      if (stage + 1 < stages) task.deps = {backwards.at({stage + 1, m})};
      backwards[{stage, m}] = id;
    }
    tasks.tasks.push_back(std::move(task));
    costs.push_back({Duration{action.kind == ActionKind::kBackward ? 2 : 1},
                     CostSource::kAnalytical});
  }
  const Timeline timeline = LongestPath(tasks, costs);
  for (const Span& span : timeline.spans) {
    out.starts.push_back(span.start.picoseconds);
  }
  out.step = timeline.step_time.picoseconds;
  return out;
}

// F takes 1, B 2. (8 + 4 - 1) * 3 = 33. Stage 0 runs F0-F3 at 0-4, has B0 from
// stage 1 at 10 (F0 reaches stage 3 at 3; B0 leaves the stages at 6, 8, 10),
// then one backward and one forward in turn, and at last the backwards as they
// come, every 3. Stage 3 never waits from 3 to 27.
TEST(GoldenTimeline, OneForwardOneBackward) {
  const PipelineTimeline p = Pipeline("1f1b", 4, 8);
  EXPECT_EQ(p.step, 33);
  EXPECT_THAT(p.StartsOf(0), ElementsAre(0, 1, 2, 3, 10, 12, 13, 15, 16, 18, 19,
                                         21, 22, 25, 28, 31));
  EXPECT_THAT(p.StartsOf(3), ElementsAre(3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18,
                                         19, 21, 22, 24, 25));
}

// F, I and W take 1 each: a stage works 24, and the bubble is
// (4 - 1) * (1 + 1 - 1) = 3 where 1F1B's is (4 - 1) * (1 + 2) = 9. I0 leaves
// stages 3, 2 and 1 at 5, 6 and 7, a W nowhere before it. Stage 0 then runs F,
// I and W in turn.
TEST(GoldenTimeline, ZeroBubbleH1) {
  const PipelineTimeline p = Pipeline("zb-h1", 4, 8);
  EXPECT_EQ(p.step, 27);
  const std::vector<int64_t> first = p.StartsOf(0);
  EXPECT_EQ(std::vector<int64_t>(first.begin(), first.begin() + 6),
            (std::vector<int64_t>{0, 1, 2, 3, 7, 8}));
  EXPECT_EQ(first.size(), 24);
  EXPECT_EQ(first.back(), 26);
  // One microbatch fills nothing: F to stage 3 and I back, then W.
  EXPECT_EQ(Pipeline("zb-h1", 4, 1).step, 4 + 4 + 1);
}

// Twice the bandwidth on one link, or on all of a kind, is never slower where
// no two flows share a link at one time; and somewhere it is faster.
TEST(Monotonicity, OfBandwidth) {
  ImportOptions options;
  options.global_batch = 16;
  options.seq_len = 64;
  const Graph graph =
      Differentiate(
          ImportModel(ExamplePath("models/gpt2-tiny/config.json"), options)
              .value())
          .value();
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2x2").value();
  Rng rng(5);
  bool faster = false;
  for (const char* strategy :
       {"tp=2,pp=2,mbs=2", "pp=4,mbs=1,schedule=gpipe", "tp=2,zero=3",
        "zero=2,bucket=100kB", "tp=4,sp=1"}) {
    const Plan plan =
        PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
            .value();
    const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
    const auto step = [&](const Cluster& on, bool share_links) {
      const Pricer pricer(graph, on, nullptr);
      return Simulate(pricer, tasks, {.share_links = share_links}).step_time;
    };
    const Duration before = step(cluster, false);
    ASSERT_EQ(step(cluster, true), before) << strategy;
    const auto links = static_cast<uint32_t>(cluster.links.size());
    for (int trial = 0; trial < 20; ++trial) {
      Cluster wider = cluster;
      Link& link = wider.links[rng.Below(links)];
      const auto type = static_cast<size_t>(link.type);
      if (trial % 2 == 0) {
        wider.link_types[type].bandwidth.value *= 2;
      } else {
        link.type = static_cast<int>(wider.link_types.size());
        wider.link_types.push_back(wider.link_types[type]);
        wider.link_types.back().bandwidth.value *= 2;
      }
      const Duration after = step(wider, true);
      EXPECT_LE(after, before) << strategy;
      faster = faster || after < before;
    }
  }
  EXPECT_TRUE(faster);
}

}  // namespace
}  // namespace tessera
