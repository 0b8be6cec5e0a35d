// Groups whose devices are of several types, with equal and unequal samples.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <tuple>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/memory/peak_memory.h"
#include "costmodel/simulate/simulator.h"
#include "planner/io/importer.h"
#include "planner/io/json_value.h"
#include "planner/lower/lower.h"
#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// gpt2-medium in fp16, without dropout.
Graph Model(int64_t batch) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = 256;
  options.dtype = DType::kFloat16;
  options.overrides["n_layer"] = ParseJson("{\"layers\": 2}")->Field("layers");
  return Differentiate(
             ImportModel(ExamplePath("models/gpt2-medium/config.json"), options)
                 .value())
      .value();
}

Plan Make(const Graph& graph, const Cluster& cluster, std::string_view text) {
  return PlanFromStrategy(graph, cluster, *ParseStrategy(text)).value();
}

// By kernel, node and pass, the longest of the operators' kernels.
using Costs = std::map<std::tuple<std::string, int, Pass>, int64_t>;
Costs KernelCosts(const Graph& graph, const Cluster& cluster,
                  const Plan& plan) {
  const Pricer pricer(graph, cluster, nullptr);
  const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
  const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
  Costs out;
  for (size_t t = 0; t < tasks.tasks.size(); ++t) {
    const Task& task = tasks.tasks[t];
    if (task.kind != TaskKind::kCompute || !task.node.valid()) continue;
    int64_t& most = out[{std::string(task.kernel), task.node.value, task.pass}];
    most = std::max(most, costs[t].duration.picoseconds);
  }
  return out;
}

// Kernels of a pair take as long as the slower device's alone with its samples.
TEST(UnlikeDevices, TheSlowerOfTheirShardsCounts) {
  const Graph both = Model(8);
  const Cluster pair = *MakeCluster("dgx-a100-80gb:1x1+dgx1-v100-32gb:1x1");
  Plan plan = Make(both, pair, "mbs=4");
  for (const int fast : {4, 6, 7}) {
    plan.groups[0].axes[0].shares = {fast, 8 - fast};
    const Costs together = KernelCosts(both, pair, plan);
    const auto alone = [&](std::string_view name, int samples) {
      const Graph graph = Model(samples);
      const Cluster cluster = *MakeCluster(name);
      return KernelCosts(
          graph, cluster,
          Make(graph, cluster, "mbs=" + std::to_string(samples)));
    };
    const Costs a100 = alone("dgx-a100-80gb:1x1", fast);
    const Costs v100 = alone("dgx1-v100-32gb:1x1", 8 - fast);
    EXPECT_EQ(together.size(), a100.size());
    bool fast_counts = false;
    bool slow_counts = false;
    for (const auto& [kernel, cost] : together) {
      ASSERT_TRUE(a100.contains(kernel) && v100.contains(kernel))
          << std::get<0>(kernel);
      EXPECT_EQ(cost, std::max(a100.at(kernel), v100.at(kernel)))
          << std::get<0>(kernel) << " of " << fast;
      fast_counts |= a100.at(kernel) > v100.at(kernel);
      slow_counts |= v100.at(kernel) > a100.at(kernel);
    }
    EXPECT_EQ(fast_counts, fast > 4);
    EXPECT_TRUE(slow_counts);  // by its launches, at least
  }
}

// What lies on the device that has more need not fit on the smaller one.
TEST(UnlikeDevices, EachHasRoomForItsOwnSamples) {
  const Graph graph = Model(768);
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:1x1+g5.48xlarge:1x1");
  const Evaluator evaluator(graph, cluster, nullptr, {});
  Plan plan = Make(graph, cluster, "mbs=384");
  const auto used = [&](int device) {
    const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
    const DeviceId devices[] = {DeviceId(device)};
    return PeakMemoryOf(tasks, devices)[0].total;
  };
  const Bytes small = cluster.TypeOf(DeviceId(1)).memory;
  ASSERT_GT(used(1), small);
  EXPECT_FALSE(evaluator.Evaluate(plan).feasible());
  plan.groups[0].axes[0].shares = {7, 1};
  ASSERT_GT(used(0), small);
  ASSERT_LT(used(1), small);
  ASSERT_LT(used(0), cluster.TypeOf(DeviceId(0)).memory);
  const Evaluation uneven = evaluator.Evaluate(plan);
  EXPECT_THAT(uneven.violations, ::testing::IsEmpty());
  // Of the fullest device.
  EXPECT_EQ(uneven.memory[0].total, used(0));
  const Evaluation explained = evaluator.Explain(plan);
  ASSERT_EQ(explained.devices.size(), 2u);
  EXPECT_EQ(explained.devices[0].memory.total, used(0));
  EXPECT_EQ(explained.devices[1].memory.total, used(1));
  // The other way round nothing fits.
  plan.groups[0].axes[0].shares = {1, 7};
  const Evaluation wrong = evaluator.Evaluate(plan);
  EXPECT_EQ(wrong.overflow, used(1) - small);
  EXPECT_THAT(wrong.violations,
              ::testing::ElementsAre(HasSubstr("per device")));
}

// Where nothing fits, what is lacking is what the device lacks that lacks most,
// by its own shards.
TEST(UnlikeDevices, LackWhatTheirOwnShardsTake) {
  const Graph graph = Model(64);
  Cluster cluster = *MakeCluster("dgx-a100-80gb:1x4+dgx1-v100-32gb:1x4");
  ASSERT_EQ(cluster.device_types.size(), 2u);
  int smaller_counts = 0;
  for (const std::string_view text :
       {"mbs=8,balance=speed", "mbs=4,zero=1,balance=speed",
        "mbs=8,zero=2,balance=speed", "mbs=4,zero=3,balance=speed",
        "tp=2,mbs=8,balance=speed", "tp=2,mbs=8,zero=3,sp=1,balance=speed",
        "mbs=8,dp-kind=rooted,balance=speed",
        "mbs=8,recompute=full,balance=speed",
        "dp=4,pp=2,mbs=4,order=pp-tp-cp-ep-dp,balance=speed",
        "dp=4,pp=2,mbs=4,zero=2,schedule=zb-h1,order=pp-tp-cp-ep-dp,"
        "balance=speed"}) {
    for (const int64_t less : {1, 1'000, 1'000'000}) {
      cluster.device_types[0].memory = {2'000'000};
      cluster.device_types[1].memory = {2'000'000 - less};
      const Evaluator evaluator(graph, cluster, nullptr, {});
      const Plan plan = Make(graph, cluster, text);
      const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
      Bytes lacking;
      Bytes fullest;
      for (const DeviceSet& set : DeviceSets(plan.groups)) {
        for (const DeviceId device : set.devices) {
          const Bytes used = PeakMemoryOf(tasks, std::array{device})[0].total;
          const Bytes memory = cluster.TypeOf(device).memory;
          ASSERT_GT(used, memory) << text;
          lacking = Max(lacking, used - memory);
        }
      }
      for (const MemoryUse& use : PeakMemory(tasks)) {
        fullest = Max(fullest, use.total);
      }
      const Evaluation priced = evaluator.Evaluate(plan);
      EXPECT_EQ(priced.overflow, lacking) << text << " " << less;
      const bool rooted = text.find("rooted") != std::string_view::npos;
      EXPECT_EQ(evaluator.blocks_lowered() == 0, rooted);  // others fold
      smaller_counts += lacking < fullest - cluster.device_types[1].memory;
    }
  }
  EXPECT_GT(smaller_counts, 10);
}

// The fold and the simulation of the whole step, to the picosecond.
TEST(UnlikeDevices, AreEvaluatedAsTheySimulate) {
  const Graph graph = Model(64);
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:1x4+dgx1-v100-32gb:1x4");
  const Evaluator evaluator(graph, cluster, nullptr, {});
  for (const std::string_view text :
       {"mbs=8,balance=speed", "mbs=8,zero=2,balance=speed",
        "mbs=4,zero=3,balance=speed", "tp=2,mbs=8,balance=speed",
        "pp=2,mbs=4,balance=speed",
        "dp=4,pp=2,mbs=4,order=pp-tp-cp-ep-dp,"
        "balance=speed"}) {
    const Plan plan = Make(graph, cluster, text);
    const TaskGraph tasks = Lower(graph, cluster, plan, TrainingOptions());
    const Timeline exact =
        Simulate(evaluator.pricer(), tasks, {.share_links = false});
    EXPECT_EQ(evaluator.Evaluate(plan).step_time, exact.step_time) << text;
    EXPECT_EQ(evaluator.Evaluate(plan).memory, PeakMemory(tasks)) << text;
  }
  EXPECT_LT(
      evaluator.Evaluate(Make(graph, cluster, "mbs=8,balance=speed")).step_time,
      evaluator.Evaluate(Make(graph, cluster, "mbs=8")).step_time);
}

}  // namespace
}  // namespace tessera
