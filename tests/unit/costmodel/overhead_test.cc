#include "costmodel/memory/overhead.h"

#include <gtest/gtest.h>

#include "costmodel/validate/measured_memory.h"
#include "planner/topology/topologies.h"

namespace tessera {
namespace {

DeviceGroup Group(const char* name, std::vector<MeshAxis> axes) {
  DeviceGroup group;
  group.name = name;
  group.axes = std::move(axes);
  return group;
}

// Data and tensor parallelism (the latter over two axes), the pipeline, all.
TEST(Overhead, CommunicatorsAreOfDimensions) {
  Plan plan;
  plan.groups = {Group("stage0", {{"dp0", 2}, {"tp0", 2}, {"tp1", 2}}),
                 Group("stage1", {{"dp0", 2}, {"tp0", 2}, {"tp1", 2}})};
  EXPECT_EQ(CommunicatorsOf(plan, {"stage0", {GroupId(0)}, {}}), 4);
  plan.groups.pop_back();
  EXPECT_EQ(CommunicatorsOf(plan, {"stage0", {GroupId(0)}, {}}), 3);
  plan.groups = {Group("all", {{"dp0", 1}})};
  EXPECT_EQ(CommunicatorsOf(plan, {"all", {GroupId(0)}, {}}), 0);
}

MemoryUse Peak() {
  MemoryUse use;
  const auto set = [&](MemoryCategory category, int64_t bytes) {
    use.parts[static_cast<size_t>(category)] = {bytes};
    use.total += Bytes{bytes};
  };
  set(MemoryCategory::kParameter, 200);
  set(MemoryCategory::kGradient, 200);
  set(MemoryCategory::kOptimizer, 1200);
  set(MemoryCategory::kActivation, 700);
  set(MemoryCategory::kCommunication, 200);
  set(MemoryCategory::kWorkspace, 100);
  return use;
}

// Two groups without inner dimensions: the pipeline's and the world's
// communicators.
Plan Pipeline() {
  Plan plan;
  plan.groups = {Group("stage0", {}), Group("stage1", {})};
  return plan;
}
const DeviceSet kFirstStage = {"stage0", {GroupId(0)}, {}};

// Two buckets of 30; context 50 and two communicators of 10 each; a tenth of
// 700 + 260 + 100; and of 100 parameters' gradients fp32 copies.
TEST(Overhead, IsWhatTheStackTakes) {
  Stack stack;
  stack.memory.gradient_copies = true;
  stack.memory.zero_bucket = {30};
  stack.memory.context = {50};
  stack.memory.communicator = {10};
  stack.memory.fragmentation = 0.1;
  MemoryUse use = Peak();
  ASSERT_EQ(use.total, Bytes{2600});
  Plan plan = Pipeline();
  AddOverhead(stack, {}, DType::kFloat16, plan, kFirstStage, use);
  const auto part = [&](MemoryCategory category) {
    return use.parts[static_cast<size_t>(category)];
  };
  EXPECT_EQ(part(MemoryCategory::kFramework), Bytes{70});
  EXPECT_EQ(part(MemoryCategory::kCommunication), Bytes{200 + 60});
  EXPECT_EQ(part(MemoryCategory::kAllocator), Bytes{106 + 400});
  EXPECT_EQ(use.total, Bytes{2600 + 60 + 70 + 506});
  EXPECT_EQ(CountedBy(MemoryMeasure::kAllocated, use), Bytes{2660});
  EXPECT_EQ(CountedBy(MemoryMeasure::kReserved, use), Bytes{2660 + 506});
  EXPECT_EQ(CountedBy(MemoryMeasure::kDevice, use), use.total);

  // bf16's gradients are in fp32 as they are.
  use = Peak();
  AddOverhead(stack, {}, DType::kBFloat16, plan, kFirstStage, use);
  EXPECT_EQ(use.total, Bytes{2600 + 60 + 70 + 106});
}

TEST(Overhead, TesserasOwnIsNone) {
  MemoryUse use = Peak();
  AddOverhead(Stack(), {}, DType::kFloat16, Pipeline(), kFirstStage, use);
  EXPECT_EQ(use, Peak());
}

// One stage on each host, the second the fuller one: the driver's figure is of
// the first.
TEST(MeasuredMemory, TheDriverIsAskedOnTheFirstHost) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  Plan plan = Pipeline();
  for (int d = 0; d < 8; ++d) {
    plan.groups[0].devices.push_back(DeviceId(d));
    plan.groups[1].devices.push_back(DeviceId(8 + d));
  }
  Evaluation evaluation;
  evaluation.memory = {Peak(), Peak()};
  evaluation.memory[1].total += Bytes{1};
  EXPECT_EQ(&ReadBy(MemoryMeasure::kDevice, cluster, plan, evaluation),
            &evaluation.memory[0]);
  EXPECT_EQ(&ReadBy(MemoryMeasure::kAllocated, cluster, plan, evaluation),
            &evaluation.memory[1]);
}

TEST(MeasuredMemory, IsByTheWordsOfTheRow) {
  PublishedRun run;
  run.mem_gb = 2;
  run.source = "Qi et al., Zero Bubble Pipeline Parallelism";
  EXPECT_EQ(MeasuredMemoryOf(run).measure, MemoryMeasure::kAllocated);
  EXPECT_EQ(MeasuredMemoryOf(run).bytes, Bytes{2'000'000'000});
  run.source = "bigscience-workshop/bigscience";
  EXPECT_EQ(MeasuredMemoryOf(run).measure, MemoryMeasure::kDevice);
  run.source = "pytorch/torchtitan benchmarks";
  EXPECT_EQ(MeasuredMemoryOf(run).measure, MemoryMeasure::kReserved);
  run.source = "FlagOpen/FlagPerf training";
  EXPECT_EQ(MeasuredMemoryOf(run).measure, MemoryMeasure::kDevice);
  EXPECT_EQ(MeasuredMemoryOf(run).bytes, Bytes{int64_t{2} << 30});
  run.source = "somebody";
  run.notes = "mem=max_memory_reserved GiB worst rank";
  EXPECT_EQ(MeasuredMemoryOf(run).measure, MemoryMeasure::kReserved);
  EXPECT_EQ(MeasuredMemoryOf(run).bytes, Bytes{int64_t{2} << 30});
}

}  // namespace
}  // namespace tessera
