#include "runtime/step_jobs.h"

#include <gtest/gtest.h>

#include <vector>

#include "runtime/device/cpu_device.h"

namespace tessera {
namespace {

constexpr Bytes kValue{4 * 8 * 4};

// Values of 4 x 8 on one rank, and work that has all tasks, in one stream.
class StepJobsTest : public ::testing::Test {
 protected:
  StepJobsTest() {
    DeviceGroup group;
    group.devices = {DeviceId(0)};
    tasks_.groups = {group};
  }

  ValueId AddValue(bool persistent, MemoryTier tier = MemoryTier::kDevice) {
    Value value;
    value.group = GroupId(0);
    value.shape = {4, 8};
    value.tier = tier;
    value.persistent = persistent;
    tasks_.values.push_back(value);
    return ValueId(tasks_.values.size() - 1);
  }
  void AddTask(TaskKind kind, std::vector<ValueId> reads, ValueId written,
               std::vector<TaskId> deps = {}) {
    Task task;
    task.kind = kind;
    task.group = GroupId(0);
    task.reads = std::move(reads);
    task.writes = {written};
    task.deps = std::move(deps);
    tasks_.tasks.push_back(task);
    work_.emplace_back().task = TaskId(tasks_.tasks.size() - 1);
  }

  TaskGraph tasks_;
  Graph graph_;
  CpuDevice device_;
  std::vector<TaskWork> work_;
};

TEST_F(StepJobsTest, BuffersLiveFromFirstToLastUse) {
  const ValueId a = AddValue(false);
  const ValueId b = AddValue(false);
  const ValueId c = AddValue(true);
  const ValueId loss = AddValue(false);
  tasks_.loss = loss;
  AddTask(TaskKind::kLoad, {}, a);
  AddTask(TaskKind::kCompute, {a, a}, b, {TaskId(0)});
  AddTask(TaskKind::kCompute, {b, c}, c, {TaskId(1)});
  AddTask(TaskKind::kCompute, {a}, loss, {TaskId(2)});
  work_[2].staging = {8};
  const RankView view(tasks_, graph_, 0);
  const StepBuffers buffers(view, device_);
  const std::vector<int> streams = {0, 0, 1, 0};
  const StepJobs planned = PlanJobs(tasks_, buffers, streams, work_);

  using Values = std::vector<ValueId>;
  EXPECT_EQ(work_[0].allocates, Values{a});
  EXPECT_EQ(work_[1].allocates, Values{b});
  EXPECT_EQ(work_[2].allocates, Values{});
  EXPECT_EQ(work_[3].allocates, Values{loss});
  EXPECT_EQ(work_[0].uses, Values{a});
  EXPECT_EQ(work_[1].uses, (Values{a, b}));
  EXPECT_EQ(work_[2].uses, Values{b});
  EXPECT_EQ(work_[3].uses, Values{a});  // the loss stays
  EXPECT_EQ(planned.use_counts[a.index()], 3);
  EXPECT_EQ(planned.use_counts[b.index()], 2);
  EXPECT_EQ(planned.use_counts[c.index()], 0);

  EXPECT_EQ(planned.streams, 2);
  ASSERT_EQ(planned.jobs.size(), 4U);
  EXPECT_EQ(planned.jobs[2].stream, 1);
  EXPECT_EQ(planned.jobs[2].deps, std::vector<int>{1});
  EXPECT_EQ(planned.jobs[1].takes.device, kValue);
  EXPECT_EQ(planned.jobs[2].takes.device, Bytes{8});
  // The third has a, b, and what it stages; the fourth a and the loss.
  EXPECT_EQ(planned.budget.device, kValue + kValue + Bytes{8});
}

// Two values have one place in the file, the second when the first is gone:
// nothing else orders them.
TEST_F(StepJobsTest, WhoComesToAPlaceInTheFileWaits) {
  const ValueId from = AddValue(true);
  const ValueId first = AddValue(false, MemoryTier::kFile);
  const ValueId second = AddValue(false, MemoryTier::kFile);
  const ValueId to = AddValue(true);
  AddTask(TaskKind::kCopy, {from}, first);
  AddTask(TaskKind::kCopy, {first}, to, {TaskId(0)});
  AddTask(TaskKind::kCopy, {from}, second);
  AddTask(TaskKind::kCopy, {second}, to, {TaskId(2)});
  const RankView view(tasks_, graph_, 0);
  StepBuffers buffers(view, device_);
  ASSERT_TRUE(
      buffers.OpenTiers({.directory = ::testing::TempDir()}).has_value());
  ASSERT_EQ(buffers.file_offset(first), buffers.file_offset(second));
  const std::vector<int> streams = {0, 1, 0, 1};
  const StepJobs planned = PlanJobs(tasks_, buffers, streams, work_);
  EXPECT_EQ(planned.jobs[1].deps, std::vector<int>{0});
  EXPECT_EQ(planned.jobs[2].deps, (std::vector<int>{0, 1}));
  EXPECT_EQ(planned.jobs[3].deps, std::vector<int>{2});
  EXPECT_EQ(planned.budget.device, Bytes{});
  EXPECT_EQ(planned.budget.host, Bytes{});
}

}  // namespace
}  // namespace tessera
