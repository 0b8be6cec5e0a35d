#include "costmodel/memory/overhead.h"

#include <gtest/gtest.h>

#include <tuple>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/validate/measured_memory.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using testing::MlpGraph;

// Data and tensor parallelism (the latter over two axes), the pipeline, all.
TEST(Overhead, CommunicatorsAreOfDimensions) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const GraphIndex index(graph);
  const auto counts = [&](const char* devices, const char* text) {
    const Plan plan =
        *PlanFromStrategy(index, *MakeCluster(devices), *ParseStrategy(text));
    return CommunicatorsOf(index, plan, DeviceSets(plan.groups));
  };
  EXPECT_EQ(counts("local-cpu:16", "dp=2,tp=4,pp=2,mbs=2"),
            std::vector<int>({4, 4}));
  EXPECT_EQ(counts("local-cpu:8", "dp=2,tp=4"), std::vector<int>({3}));
  EXPECT_EQ(counts("local-cpu:8", "dp=2,tp=2,cp=2"), std::vector<int>({4}));
  EXPECT_EQ(counts("local-cpu:2", "tp=2,sp=1"), std::vector<int>({2}));
  EXPECT_EQ(counts("local-cpu:1", ""), std::vector<int>({0}));
}

// A walk gives axes other roles and leaves their names.
TEST(Overhead, GoesByWhatAxesDoNotByTheirNames) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  Cluster cluster = *MakeCluster("local-cpu:8");
  cluster.stack.memory.communicator = {1'000};
  const Evaluator evaluator(graph, cluster, nullptr, {});
  Plan plan = *PlanFromStrategy(graph, cluster, *ParseStrategy("dp=4,tp=2"));
  const Evaluation named = evaluator.Evaluate(plan);
  EXPECT_EQ(
      named.memory[0].parts[static_cast<size_t>(MemoryCategory::kFramework)],
      Bytes{3'000});
  auto& axes = plan.groups[0].axes;
  ASSERT_EQ(axes.size(), 3u);
  for (const auto& [a, b, c] : {std::tuple("dp0", "tp0", "tp1"),
                                {"tp0", "dp0", "ep0"},
                                {"dp0", "dp1", "dp2"}}) {
    axes[0].name = a;
    axes[1].name = b;
    axes[2].name = c;
    EXPECT_EQ(evaluator.Evaluate(plan).memory, named.memory) << a << b << c;
  }
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
  AddOverhead(stack, {}, DType::kFloat16, /*communicators=*/2, use);
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
  AddOverhead(stack, {}, DType::kBFloat16, /*communicators=*/2, use);
  EXPECT_EQ(use.total, Bytes{2600 + 60 + 70 + 106});
}

TEST(Overhead, TesserasOwnIsNone) {
  MemoryUse use = Peak();
  AddOverhead(Stack(), {}, DType::kFloat16, /*communicators=*/2, use);
  EXPECT_EQ(use, Peak());
}

// One stage on each host, the second the fuller one: the driver's figure is of
// the first.
TEST(MeasuredMemory, TheDriverIsAskedOnTheFirstHost) {
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
  Plan plan;
  plan.groups.resize(2);
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
  run.notes = "mem by nvidia-smi";
  EXPECT_EQ(MeasuredMemoryOf(run).measure, MemoryMeasure::kDevice);
  EXPECT_EQ(MeasuredMemoryOf(run).bytes, Bytes{int64_t{2} << 30});
}

}  // namespace
}  // namespace tessera
