#include "tools/step_report.h"

#include <gmock/gmock.h>

#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Four devices that differ by a byte, which no number shows, and one by a
// million.
TEST(StepText, TellsDevicesTogetherWhoseMemoryPrintsAlike) {
  const Graph graph = testing::MlpGraph(2, 4, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:4");
  const Plan plan = *PlanFromStrategy(graph, cluster, Strategy());
  Evaluation evaluation;
  evaluation.step_time = {1'000'000};
  const auto add = [&](std::vector<int> devices, int64_t bytes) {
    DeviceMemory& alike = evaluation.devices.emplace_back();
    alike.group = "all";
    for (int device : devices) alike.devices.push_back(DeviceId(device));
    alike.memory.parts[0] = {bytes};
    alike.memory.total = {bytes};
  };
  add({0, 3}, 5'000'000);
  add({1, 2}, 5'000'001);
  std::string text = StepText(graph, cluster, plan, evaluation);
  EXPECT_THAT(text, HasSubstr("all (4 devices)"));
  EXPECT_THAT(text, Not(HasSubstr("all: ")));
  evaluation.devices.clear();
  add({0, 3}, 5'000'000);
  add({2}, 6'000'000);
  add({1}, 5'000'001);
  text = StepText(graph, cluster, plan, evaluation);
  EXPECT_THAT(text, HasSubstr("all: 0, 1, 3"));
  EXPECT_THAT(text, HasSubstr("all: 2 "));
}

// What takes too long to be priced has neither a time nor bytes.
TEST(StepJson, IsNullWithoutAPrice) {
  const Graph graph = testing::MlpGraph(2, 4, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:4");
  const Plan plan = *PlanFromStrategy(graph, cluster, Strategy());
  Evaluation evaluation;
  evaluation.memory.resize(1);
  evaluation.violations = {"too long to be priced"};
  const std::string text = StepJson(graph, cluster, plan, evaluation).OneLine();
  for (const char* field :
       {"\"step_time_s\": null", "\"tokens_per_s\": null", "\"mfu\": null",
        "\"peak_bytes\": null", "\"per_device\": []", "\"breakdown\": null",
        "\"moved_bytes\": null", "\"sources\": null"}) {
    EXPECT_THAT(text, HasSubstr(field));
  }
  evaluation.step_time = {1'000'000};
  const Cluster gpus = *MakeCluster("dgx-a100-80gb:1x4");
  EXPECT_THAT(StepJson(graph, gpus, plan, evaluation).OneLine(),
              Not(HasSubstr("null")));
  // The peak of a host's cores is assumed.
  EXPECT_THAT(StepJson(graph, cluster, plan, evaluation).OneLine(),
              HasSubstr("\"mfu\": null, \"mfu_causal\": null, \"hfu\": null"));
}

// Rates of a device are of those that the plan uses, here of 4 of 8.
TEST(ThroughputOf, CountsTheDevicesInUse) {
  const Graph graph = testing::MlpGraph(2, 4, 4, 8, 16, 32);
  const Cluster few = *MakeCluster("dgx-a100-80gb:1x4");
  const Cluster all = *MakeCluster("dgx-a100-80gb:1");
  const Plan plan = *PlanFromStrategy(graph, few, Strategy());
  const Duration step = Duration::FromSeconds(1);
  const Throughput alone = ThroughputOf(graph, few, plan, step);
  const Throughput among = ThroughputOf(graph, all, plan, step);
  ASSERT_TRUE(alone.mfu.has_value());
  EXPECT_DOUBLE_EQ(*alone.mfu, alone.model_flops / 4 /
                                   few.device_types[0].Peak(graph.dtype).value);
  EXPECT_EQ(among.mfu, alone.mfu);
  EXPECT_EQ(among.tokens_per_s_per_gpu, alone.tokens_per_s / 4);
}

}  // namespace
}  // namespace tessera
