// The executor on task graphs made by hand: layouts that become others, within
// a group and between groups, and what a step allocates and reports.

#include "runtime/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "planner/base/rng.h"
#include "runtime/collect_values.h"
#include "runtime/comm/thread_world.h"
#include "runtime/device/cpu_device.h"
#include "runtime/float16.h"
#include "runtime/kernels/fill.h"
#include "runtime/train_state.h"
#include "runtime/trainer.h"
#include "tests/support/queue_cpu_device.h"

namespace tessera {
namespace {

LoadInput NoData() {
  return [](const Tensor&, const LocalTensor&, int64_t) -> Result<void> {
    return InvalidInput("no data");
  };
}

DeviceGroup MakeGroup(int first_rank, const std::vector<int>& sizes) {
  DeviceGroup group;
  int ranks = 1;
  for (int size : sizes) {
    group.axes.push_back({"x" + std::to_string(group.axes.size()), size});
    ranks *= size;
  }
  for (int i = 0; i < ranks; ++i) {
    group.devices.push_back(DeviceId(first_rank + i));
  }
  return group;
}

Graph OneTensor(const Shape& shape) {
  Graph graph;
  graph.dtype = DType::kFloat64;
  Tensor tensor;
  tensor.name = "t";
  tensor.shape = shape;
  tensor.dtype = DType::kFloat64;
  graph.tensors.push_back(tensor);
  return graph;
}

ValueId AddValue(TaskGraph& tasks, GroupId group, const Shape& shape,
                 const Layout& layout) {
  Value value;
  value.what = "value";
  value.tensor = TensorId(0);
  value.group = group;
  value.shape = shape;
  value.dtype = DType::kFloat64;
  value.layout = layout;
  value.persistent = true;
  tasks.values.push_back(value);
  return ValueId(tasks.values.size() - 1);
}

// What position `p` holds of a tensor whose element i is i + 1. Partial sums
// are unequal: along a partial axis, coordinate c holds c + 1 times the element
// where `original` is partial too, and nothing but at 0 where it was masked.
// An axis of size n that was summed has 1 + ... + n times the element.
std::vector<double> Expected(const Layout& layout, const Layout& original,
                             const DeviceGroup& group, const Shape& shape,
                             int p) {
  double factor = 1;
  for (size_t a = 0; a < group.axes.size(); ++a) {
    const bool now = layout.partial >> a & 1;
    const bool before = original.partial >> a & 1;
    const int c = group.Coordinate(p, static_cast<int>(a));
    const int n = group.axes[a].size;
    if (now && before) factor *= c + 1;
    if (now && !before) factor *= c == 0 ? 1 : 0;
    if (!now && before) factor *= n * (n + 1) / 2;
  }
  std::vector<double> values;
  const Placement placement = PlacementAt(layout, group, shape, p);
  for (const Box& box : BoxesOf(placement)) {
    std::vector<int64_t> at;
    for (const Range& range : box) at.push_back(range.begin);
    for (;;) {
      int64_t index = 0;
      for (size_t d = 0; d < shape.size(); ++d)
        index = index * shape[d] + at[d];
      values.push_back(factor * static_cast<double>(index + 1));
      size_t d = shape.size();
      while (d > 0 && ++at[d - 1] == box[d - 1].end) {
        --d;
        at[d] = box[d].begin;
      }
      if (d == 0) break;
    }
  }
  return values;
}

std::vector<double> Contents(const RankExecutor& executor, ValueId id) {
  std::vector<double> values(
      static_cast<size_t>(executor.placement(id).elements()));
  if (!values.empty()) {
    std::memcpy(values.data(), executor.data(id), values.size() * 8);
  }
  return values;
}

void SetContents(const RankExecutor& executor, ValueId id,
                 const std::vector<double>& values) {
  ASSERT_EQ(static_cast<int64_t>(values.size()),
            executor.placement(id).elements());
  if (values.empty()) return;
  std::memcpy(executor.data(id), values.data(), values.size() * 8);
}

// Runs one step on every rank; `before` and `after` see each executor.
template <typename Before, typename After>
void RunStep(const TaskGraph& tasks, const Graph& graph, int ranks,
             Before before, After after) {
  auto worlds = MakeThreadWorlds(ranks, {Duration::FromSeconds(30)});
  RunThreads(ranks, [&](int rank) {
    CpuDevice device;
    CommWorld& world = *worlds[static_cast<size_t>(rank)];
    auto executor =
        RankExecutor::Create(tasks, graph, {}, 0, world, device, NoData());
    ASSERT_TRUE(executor.has_value()) << executor.error().ToString();
    before(**executor);
    const auto timeline = (*executor)->Run(tasks);
    ASSERT_TRUE(timeline.has_value()) << timeline.error().ToString();
    after(**executor, *timeline);
    ASSERT_TRUE(world.Flush().has_value());
  });
}

Layout RandomLayout(Rng& rng, const DeviceGroup& group, size_t dims,
                    bool partial) {
  Layout layout;
  for (size_t a = 0; a < group.axes.size(); ++a) {
    const AxisSet axis = AxisSet{1} << a;
    const uint32_t choice = rng.Below(static_cast<uint32_t>(dims) + 2);
    if (choice < dims) {
      layout.dims[choice] |= axis;
    } else if (choice == dims && partial) {
      layout.partial |= axis;
    }
  }
  return layout;
}

// The steps of PlanReshard between random layouts, ragged and empty shards
// included, leave on every rank what its layout says.
TEST(Reshard, AnyLayoutToAnyOther) {
  const std::vector<std::vector<int>> meshes = {
      {2}, {3}, {2, 2}, {3, 2}, {2, 2, 2}};
  Rng rng(17);
  for (int trial = 0; trial < 250; ++trial) {
    const std::vector<int>& mesh =
        meshes[rng.Below(static_cast<uint32_t>(meshes.size()))];
    Shape shape;
    for (uint32_t d = 1 + rng.Below(3); d > 0; --d) {
      shape.push_back(1 + rng.Below(9));
    }
    TaskGraph tasks;
    tasks.groups = {MakeGroup(0, mesh)};
    const DeviceGroup& group = tasks.groups[0];
    const Layout from = RandomLayout(rng, group, shape.size(), true);
    Layout to = RandomLayout(rng, group, shape.size(), false);
    const int flavour = static_cast<int>(rng.Below(4));
    if (flavour == 0) {  // a gradient to ZeRO's shards
      to.dims = from.dims;
      to.flat = group.all_axes() & ~from.sharded();
      to.flat &= rng.Below(8);
    } else if (flavour == 1) {  // a partial sum that stays
      to.partial = from.partial & ~to.sharded() & rng.Below(8);
    }
    const auto steps = PlanReshard(from, to, group);
    SCOPED_TRACE(ToString(from, group, shape.size()) + " -> " +
                 ToString(to, group, shape.size()) + " trial " +
                 std::to_string(trial));
    std::vector<ValueId> values = {AddValue(tasks, GroupId(0), shape, from)};
    for (const ReshardStep& step : steps) {
      values.push_back(AddValue(tasks, GroupId(0), shape, step.to));
      Task task;
      task.kind =
          step.kind == ReshardKind::kSlice ? TaskKind::kSlice : TaskKind::kComm;
      switch (step.kind) {
        case ReshardKind::kAllReduce:
          task.comm = CommKind::kAllReduce;
          break;
        case ReshardKind::kReduceScatter:
          task.comm = CommKind::kReduceScatter;
          break;
        case ReshardKind::kAllGather:
          task.comm = CommKind::kAllGather;
          break;
        default:
          task.comm = CommKind::kRedistribute;
      }
      task.axes = step.axes;
      task.group = GroupId(0);
      task.reads = {values[values.size() - 2]};
      task.writes = {values.back()};
      tasks.tasks.push_back(task);
    }
    const Graph graph = OneTensor(shape);
    RunStep(
        tasks, graph, static_cast<int>(group.devices.size()),
        [&](RankExecutor& executor) {
          SetContents(executor, values[0],
                      Expected(from, from, group, shape,
                               executor.position(GroupId(0))));
        },
        [&](RankExecutor& executor, const Timeline& timeline) {
          const int p = executor.position(GroupId(0));
          EXPECT_EQ(Contents(executor, values.back()),
                    Expected(to, from, group, shape, p))
              << "position " << p;
          EXPECT_EQ(timeline.spans.size(), steps.size());
        });
  }
}

// Several tensors in one collective, small and large, whole and strided.
TEST(Reshard, CoalescedTensorsEqualSingleOnes) {
  for (CommKind kind : {CommKind::kAllReduce, CommKind::kReduceScatter,
                        CommKind::kAllGather, CommKind::kRedistribute}) {
    SCOPED_TRACE(NameOf(kind));
    TaskGraph tasks;
    tasks.groups = {MakeGroup(0, {3})};
    const DeviceGroup& group = tasks.groups[0];
    Task task;
    task.kind = TaskKind::kComm;
    task.comm = kind;
    task.axes = 1;
    task.group = GroupId(0);
    Layout rows, columns, partial, whole, flat;
    rows.dims[0] = 1;
    columns.dims[1] = 1;
    partial.partial = 1;
    flat.flat = 1;
    // The last is 200 * 200 * 8 bytes = 320 kB, which travels alone.
    const std::vector<Shape> shapes = {{5, 4}, {4, 7}, {200, 200}};
    for (size_t i = 0; i < shapes.size(); ++i) {
      Layout from = partial;
      Layout to = whole;
      if (kind == CommKind::kReduceScatter) to = i == 0 ? columns : flat;
      if (kind == CommKind::kAllGather) from = i == 0 ? columns : flat;
      if (kind == CommKind::kRedistribute) {
        from = i == 0 ? columns : rows;
        to = i == 0 ? rows : columns;
      }
      task.reads.push_back(AddValue(tasks, GroupId(0), shapes[i], from));
      task.writes.push_back(AddValue(tasks, GroupId(0), shapes[i], to));
    }
    tasks.tasks = {task};
    RunStep(
        tasks, OneTensor({1}), 3,
        [&](RankExecutor& executor) {
          for (ValueId id : task.reads) {
            const Value& value = tasks.value(id);
            SetContents(executor, id,
                        Expected(value.layout, value.layout, group, value.shape,
                                 executor.position(GroupId(0))));
          }
        },
        [&](RankExecutor& executor, const Timeline&) {
          for (size_t i = 0; i < task.writes.size(); ++i) {
            const Value& from = tasks.value(task.reads[i]);
            const Value& to = tasks.value(task.writes[i]);
            EXPECT_EQ(Contents(executor, task.writes[i]),
                      Expected(to.layout, from.layout, group, to.shape,
                               executor.position(GroupId(0))))
                << "tensor " << i;
          }
        });
  }
}

TEST(Transfer, BetweenUnlikeGroups) {
  Rng rng(29);
  const std::vector<std::vector<int>> meshes = {{1}, {2}, {3}, {2, 2}};
  for (int trial = 0; trial < 120; ++trial) {
    const auto& sender_mesh =
        meshes[rng.Below(static_cast<uint32_t>(meshes.size()))];
    const auto& receiver_mesh =
        meshes[rng.Below(static_cast<uint32_t>(meshes.size()))];
    TaskGraph tasks;
    tasks.groups.push_back(MakeGroup(0, sender_mesh));
    const int senders = static_cast<int>(tasks.groups[0].devices.size());
    tasks.groups.push_back(MakeGroup(senders, receiver_mesh));
    const int receivers = static_cast<int>(tasks.groups[1].devices.size());
    Shape shape;
    for (uint32_t d = 1 + rng.Below(3); d > 0; --d) {
      shape.push_back(1 + rng.Below(9));
    }
    Layout from = RandomLayout(rng, tasks.groups[0], shape.size(), false);
    Layout to = RandomLayout(rng, tasks.groups[1], shape.size(), false);
    if (sender_mesh == receiver_mesh && rng.Below(2) == 0) {
      from = RandomLayout(rng, tasks.groups[0], shape.size(), true);
      to = from;  // position to position, partial sums as they are
    }
    SCOPED_TRACE(ToString(from, tasks.groups[0], shape.size()) + " -> " +
                 ToString(to, tasks.groups[1], shape.size()));
    const ValueId sent = AddValue(tasks, GroupId(0), shape, from);
    const ValueId received = AddValue(tasks, GroupId(1), shape, to);
    Task send;
    send.kind = TaskKind::kSend;
    send.group = GroupId(0);
    send.reads = {sent};
    send.peer = received;
    Task receive;
    receive.kind = TaskKind::kRecv;
    receive.group = GroupId(1);
    receive.writes = {received};
    receive.peer = sent;
    tasks.tasks = {send, receive};
    const Graph graph = OneTensor(shape);
    RunStep(
        tasks, graph, senders + receivers,
        [&](RankExecutor& executor) {
          const int p = executor.position(GroupId(0));
          if (p < 0) return;
          SetContents(executor, sent,
                      Expected(from, from, tasks.groups[0], shape, p));
        },
        [&](RankExecutor& executor, const Timeline&) {
          const int p = executor.position(GroupId(1));
          if (p < 0) return;
          EXPECT_EQ(Contents(executor, received),
                    Expected(to, from, tasks.groups[1], shape, p));
        });
  }
}

// A weight of several pieces on every tier: 20.2 MB, or 5 MB that are drawn as
// 10.1.
TEST(InitialiseState, DrawsWholeWeightsPieceByPiece) {
  const Shape shape = {2800, 901};
  const int64_t elements = 2800 * 901;
  Graph graph = OneTensor(shape);
  graph.tensors[0].init = {.stddev = 0.02};
  for (const DType dtype : {DType::kFloat64, DType::kBFloat16}) {
    const DType drawn_as = Is16Bit(dtype) ? DType::kFloat32 : dtype;
    std::vector<std::byte> drawn(elements * SizeOf(drawn_as));
    LocalTensor whole;
    whole.data = drawn.data();
    whole.dtype = drawn_as;
    whole.shape = shape;
    whole.offset = {0, 0};
    whole.global_shape = shape;
    FillWeight(whole, graph.tensors[0].init, "t", 3);
    std::vector<std::byte> expected = drawn;
    if (Is16Bit(dtype)) {
      expected.resize(elements * SizeOf(dtype));
      Narrow(whole.as<const float>(), elements, dtype, expected.data());
    }
    for (const MemoryTier tier :
         {MemoryTier::kDevice, MemoryTier::kHost, MemoryTier::kFile}) {
      TaskGraph tasks;
      tasks.groups = {MakeGroup(0, {1})};
      const ValueId id = AddValue(tasks, GroupId(0), shape, {});
      tasks.values[0].what = "parameter";
      tasks.values[0].dtype = dtype;
      tasks.values[0].tier = tier;
      auto worlds = MakeThreadWorlds(1);
      CpuDevice device(2);
      const auto executor =
          *RankExecutor::Create(tasks, graph, {}, 0, *worlds[0], device,
                                NoData(), {.directory = ::testing::TempDir()});
      Bytes done;
      StartUp start;
      start.progress = [&](Bytes set, Bytes total) {
        EXPECT_GT(set, done);
        EXPECT_EQ(total.value, elements * SizeOf(dtype));
        done = set;
      };
      ASSERT_TRUE(InitialiseState(graph, 3, *executor, start).has_value());
      EXPECT_EQ(done.value, elements * SizeOf(dtype));
      std::vector<std::byte> found(expected.size());
      ASSERT_TRUE(executor->ReadValue(id, found.data()).has_value());
      EXPECT_TRUE(found == expected) << NameOf(dtype);
    }
  }
}

// 82 MB in five pieces of at most 16 MiB, on every tier and cut in every way,
// come whole and in order, and a rank's device never has more of them than what
// is collected at a time four times: its own, what it sends of that, what rank 0
// receives, and that in order.
TEST(CollectValue, BringsNoMoreThanAPieceToTheDevice) {
  const Shape shape = {10000, 1021};
  const Graph graph = OneTensor(shape);
  Layout rows, columns, flat;
  rows.dims[0] = 1;
  columns.dims[1] = 1;
  flat.flat = 1;
  for (const MemoryTier tier :
       {MemoryTier::kDevice, MemoryTier::kHost, MemoryTier::kFile}) {
    for (const Layout& layout : {Layout(), rows, columns, flat}) {
      TaskGraph tasks;
      tasks.groups = {MakeGroup(0, {2})};
      const ValueId id = AddValue(tasks, GroupId(0), shape, layout);
      tasks.values[0].tier = tier;
      auto worlds = MakeThreadWorlds(2);
      RunThreads(2, [&](int rank) {
        CommWorld& world = *worlds[static_cast<size_t>(rank)];
        CpuDevice device;
        const auto executor =
            *RankExecutor::Create(tasks, graph, {}, 0, world, device, NoData(),
                                  {.directory = ::testing::TempDir()});
        const auto mine =
            Expected(layout, layout, tasks.groups[0], shape, rank);
        ASSERT_TRUE(executor->WriteValue(id, mine.data()));
        const Bytes own = device.account().current().total;
        int64_t next = 0;
        const auto all = world.Group(std::vector{0, 1});
        ASSERT_TRUE(all);
        const auto collected =
            CollectValue(id, *executor, **all, [&](const Box&, auto bytes) {
              std::vector<double> values(bytes.size() / sizeof(double));
              std::memcpy(values.data(), bytes.data(), bytes.size());
              for (const double value : values) {
                if (value != static_cast<double>(++next)) {
                  ADD_FAILURE() << value << " instead of " << next;
                  next = int64_t{1} << 40;
                }
              }
            });
        ASSERT_TRUE(collected) << collected.error().ToString();
        EXPECT_EQ(next, rank == 0 ? 10000 * 1021 : 0);
        EXPECT_LE((device.account().peak().total - own).value, 4 << 24);
      });
    }
  }
}

// A step on one rank: load, two additions, in buffers that live as long as they
// are needed.
class OneRankStep : public ::testing::Test {
 protected:
  OneRankStep() {
    graph_ = OneTensor({4, 8});
    graph_.tensors[0].sample_dim = 0;
    graph_.global_batch = 4;
    tasks_.groups = {MakeGroup(0, {1})};
    input_ = AddValue(tasks_, GroupId(0), {4, 8}, {});
    sum_ = AddValue(tasks_, GroupId(0), {4, 8}, {});
    total_ = AddValue(tasks_, GroupId(0), {4, 8}, {});
    tasks_.values[input_.index()].persistent = false;
    tasks_.values[sum_.index()].persistent = false;
    Task load;
    load.kind = TaskKind::kLoad;
    load.group = GroupId(0);
    load.writes = {input_};
    Task twice;
    twice.kind = TaskKind::kCompute;
    twice.kernel = "sum";
    twice.group = GroupId(0);
    twice.reads = {input_, input_};
    twice.writes = {sum_};
    Task thrice = twice;
    thrice.reads = {sum_, input_};
    thrice.writes = {total_};
    tasks_.tasks = {load, twice, thrice};
  }

  Graph graph_;
  TaskGraph tasks_;
  ValueId input_, sum_, total_;
};

TEST_F(OneRankStep, AllocatesAndFrees) {
  auto worlds = MakeThreadWorlds(1);
  CpuDevice device;
  std::vector<int64_t> steps;
  const LoadInput load = [&](const Tensor&, const LocalTensor& block,
                             int64_t first_sample) -> Result<void> {
    const int64_t step = first_sample / 4;
    steps.push_back(step);
    EXPECT_EQ(block.shape, (Shape{4, 8}));
    for (int64_t i = 0; i < 32; ++i) {
      block.as<double>()[i] = static_cast<double>(i + 100 * step);
    }
    return {};
  };
  {
    auto executor =
        *RankExecutor::Create(tasks_, graph_, {}, 0, *worlds[0], device, load);
    for (int step = 0; step < 3; ++step) {
      const Timeline timeline = *executor->Run(tasks_);
      ASSERT_EQ(timeline.spans.size(), 3u);
      EXPECT_LE(timeline.spans[0].start, timeline.spans[0].end);
      EXPECT_LE(timeline.spans[0].end, timeline.spans[1].start);
      EXPECT_LE(timeline.spans[2].end, timeline.step_time);
      EXPECT_EQ(timeline.spans[1].rank, 0);
      // 3 * (31 + 100 step)
      EXPECT_EQ(Contents(*executor, total_)[31], 93 + 300 * step);
      EXPECT_EQ(executor->data(input_), nullptr);
      EXPECT_EQ(executor->data(sum_), nullptr);
    }
    EXPECT_EQ(executor->step(), 3);
    // The total persists; the last task has the input and the first sum too.
    EXPECT_EQ(device.account().current().total.value, 32 * 8);
    EXPECT_EQ(device.account().peak().total.value, 3 * 32 * 8);
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(device.account().current().total.value, 0);
}

TEST_F(OneRankStep, ErrorsNameTheTask) {
  auto worlds = MakeThreadWorlds(1);
  CpuDevice device;
  auto executor = *RankExecutor::Create(tasks_, graph_, {}, 0, *worlds[0],
                                        device, NoData());
  const auto result = executor->Run(tasks_);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().ToString(), "load value t: no data");
}

// What is enqueued uses the executor, which its owner then destroys.
TEST_F(OneRankStep, NothingOfAFailedStepGoesOn) {
  auto worlds = MakeThreadWorlds(1);
  QueueCpuDevice device(0);
  const auto world = MakeQueueWorld(*worlds[0], device);
  auto executor =
      *RankExecutor::Create(tasks_, graph_, {}, 0, *world, device, NoData());
  const int further = device.MakeQueue(StreamRole::kSendForward).value();
  for (const int queue : {further, 0}) {
    device.UseQueue(queue);
    device.EnqueueOnHost([]() -> Result<void> {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return {};
    });
  }
  const auto result = executor->Run(tasks_);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().ToString(), "load value t: no data");
  EXPECT_TRUE(device.idle());
}

LoadInput Zeros() {
  return [](const Tensor&, const LocalTensor& block, int64_t) -> Result<void> {
    std::fill_n(block.as<double>(), block.elements(), 0);
    return {};
  };
}

class DeviceWithoutTimes : public QueueCpuDevice {
 public:
  DeviceWithoutTimes() : QueueCpuDevice(0) {}
  Result<Duration> Between(int, int) override {
    return Error{ErrorCode::kUnavailable, "no times", ""};
  }
};

TEST_F(OneRankStep, TimesThatCannotBeReadEndTheJob) {
  auto worlds = MakeThreadWorlds(2);
  {
    DeviceWithoutTimes device;
    const auto world = MakeQueueWorld(*worlds[0], device);
    auto executor =
        *RankExecutor::Create(tasks_, graph_, {}, 0, *world, device, Zeros());
    const auto result = executor->Run(tasks_);
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().ToString(), "no times");
  }
  worlds[0].reset();
  const std::vector<int> both = {0, 1};
  const auto peer = worlds[1]->Group(both).value()->Barrier();
  ASSERT_FALSE(peer.has_value());
  EXPECT_EQ(peer.error().message, "rank 0 aborted: no times");
}

// Notes what is asked of it.
class NotingDevice : public QueueCpuDevice {
 public:
  NotingDevice() : QueueCpuDevice(0) {}
  Result<void> Pin(void* data, Bytes size) override {
    pinned.emplace_back(reinterpret_cast<uintptr_t>(data), size.value);
    return {};
  }
  Result<int> MakeQueue(StreamRole role) override {
    ++queues_made;
    return QueueCpuDevice::MakeQueue(role);
  }

  std::vector<std::pair<uintptr_t, int64_t>> pinned;
  int queues_made = 0;
};

// The system pins whole pages.
TEST_F(OneRankStep, WhatIsPinnedSharesNoPage) {
  constexpr int kValues = 20;  // of 256 bytes
  for (int i = 0; i < kValues; ++i) {
    const ValueId id = AddValue(tasks_, GroupId(0), {4, 8}, {});
    tasks_.values[id.index()].tier = MemoryTier::kHost;
  }
  auto worlds = MakeThreadWorlds(1);
  NotingDevice device;
  const auto world = MakeQueueWorld(*worlds[0], device);
  const auto executor =
      *RankExecutor::Create(tasks_, graph_, {}, 0, *world, device, Zeros());
  ASSERT_EQ(device.pinned.size(), size_t{kValues});
  std::set<uintptr_t> pages;
  for (const auto& [data, size] : device.pinned) {
    const uintptr_t last = (data + static_cast<uintptr_t>(size) - 1) / 4096;
    for (uintptr_t page = data / 4096; page <= last; ++page) {
      EXPECT_TRUE(pages.insert(page).second);
    }
  }
}

TEST_F(OneRankStep, TheLossHasTheQueuesOfTheSteps) {
  tasks_.tasks[1].stream = StreamRole::kSendForward;
  tasks_.tasks[1].deps = {TaskId(0)};
  tasks_.tasks[2].deps = {TaskId(1)};
  tasks_.loss = total_;
  auto worlds = MakeThreadWorlds(1);
  NotingDevice device;
  const auto world = MakeQueueWorld(*worlds[0], device);
  auto executor =
      *RankExecutor::Create(tasks_, graph_, {}, 0, *world, device, Zeros());
  EXPECT_EQ(device.queues_made, 1);
  const TaskGraph loss = LossOnly(tasks_);
  ASSERT_EQ(loss.tasks.size(), 3U);
  const auto of_loss = *RankExecutor::CreateForLoss(loss, *executor, Zeros());
  EXPECT_EQ(device.queues_made, 1);
  ASSERT_TRUE(executor->Run(tasks_).has_value());
  ASSERT_TRUE(of_loss->Run(loss).has_value());
}

TEST_F(OneRankStep, UnknownKernelIsAnError) {
  tasks_.tasks[1].kernel = "sun";
  auto worlds = MakeThreadWorlds(1);
  CpuDevice device;
  const auto executor =
      RankExecutor::Create(tasks_, graph_, {}, 0, *worlds[0], device, NoData());
  ASSERT_FALSE(executor.has_value());
  EXPECT_EQ(executor.error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace tessera
