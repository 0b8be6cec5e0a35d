#include "costmodel/whatif/scenario.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "costmodel/whatif/fabric.h"
#include "costmodel/whatif/grid.h"
#include "planner/io/cluster_io.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Scenario Tiny(std::vector<Setting> settings = {}) {
  Scenario scenario;
  scenario.model = ExamplePath("models/gpt2-tiny/config.json");
  scenario.cluster = "dgx-a100-80gb:2";
  scenario.global_batch = 64;
  scenario.seq_len = 32;
  scenario.strategy = "tp=2,mbs=2";
  scenario.settings = std::move(settings);
  return scenario;
}

Case Made(std::vector<Setting> settings) {
  ModelCache models;
  auto made = MakeCase(Tiny(std::move(settings)), models);
  EXPECT_TRUE(made) << made.error().ToString();
  return *std::move(made);
}

std::string ErrorOf(std::vector<Setting> settings) {
  ModelCache models;
  const auto made = MakeCase(Tiny(std::move(settings)), models);
  return made ? "" : made.error().ToString();
}

TEST(Scenario, SettingsOfClusterModelAndTraining) {
  EXPECT_EQ(Made({{"nodes", "4"}}).cluster.devices.size(), 32U);
  EXPECT_EQ(Made({{"gpus", "4"}}).cluster.devices.size(), 8U);
  EXPECT_EQ(Made({{"cluster", "dgx-h100:1"}}).cluster.name, "dgx-h100:1");
  // Whatever the order, the structure comes first.
  const Case both = Made({{"device.memory", "10GB"}, {"nodes", "1"}});
  EXPECT_EQ(both.cluster.device_types[0].memory.value, 10'000'000'000);
  EXPECT_EQ(both.cluster.num_nodes(), 1);
  EXPECT_EQ(Made({{"batch", "128"}}).graph->global_batch, 128);
  EXPECT_EQ(Made({{"seq", "16"}}).graph->seq_len, 16);
  EXPECT_EQ(Made({{"dtype", "fp32"}}).graph->dtype, DType::kFloat32);
  const size_t blocks = Made({}).graph->blocks.size();
  EXPECT_EQ(Made({{"model.layers", "7"}}).graph->blocks.size(),
            Made({{"model.n_layer", "6"}}).graph->blocks.size() + 1);
  EXPECT_NE(Made({{"model.layers", "7"}}).graph->blocks.size(), blocks);
  EXPECT_EQ(Made({{"strategy.tp", "4"}}).strategy, "mbs=2,tp=4");
}

TEST(Scenario, FabricByClassInBitsOrBytesOrTimes) {
  for (const char* value : {"200Gb/s", "25GB/s"}) {
    const Case made = Made({{"fabric.inter.bandwidth", value}});
    EXPECT_DOUBLE_EQ(
        ReferenceLink(made.cluster, LinkClass::kInter)->bandwidth.value, 25e9);
  }
  const Case base = Made({});
  const Case twice = Made({{"fabric.intra.latency", "2x"}});
  EXPECT_EQ(
      ReferenceLink(twice.cluster, LinkClass::kIntra)->latency.picoseconds,
      2 * ReferenceLink(base.cluster, LinkClass::kIntra)->latency.picoseconds);
  const Case alone = Made({{"nodes", "1"}, {"fabric.inter.latency", "2x"}});
  EXPECT_THAT(alone.notes, ElementsAre(HasSubstr("no such links")));
}

TEST(Scenario, WrongSettingsAreErrors) {
  EXPECT_THAT(ErrorOf({{"device.memroy", "1GB"}}),
              HasSubstr("did you mean 'device.memory'?"));
  EXPECT_THAT(ErrorOf({{"fabric.inner.bandwidth", "1GB/s"}}),
              HasSubstr("did you mean 'fabric.inter.bandwidth'?"));
  EXPECT_THAT(ErrorOf({{"fabric.inter.bandwidth", "100GB"}}),
              HasSubstr("not a bandwidth such as"));
  EXPECT_THAT(ErrorOf({{"nodes", "1.5"}}), HasSubstr("not a whole number"));
  EXPECT_THAT(ErrorOf({{"model.n_lair", "1"}}),
              HasSubstr("did you mean 'n_layer'?"));
  EXPECT_THAT(ErrorOf({{"dtype", "bf17"}}), HasSubstr("dtype"));
}

TEST(Scenario, DpFollowsTheDevices) {
  for (const int nodes : {1, 2, 4}) {
    Case made = Made({{"nodes", std::to_string(nodes)}});
    const auto plan = PlanOf(made);
    ASSERT_TRUE(plan);
    const auto strategy = UniformStrategy(*made.index, made.cluster, *plan);
    ASSERT_TRUE(strategy);
    EXPECT_EQ(strategy->tp, 2);
    EXPECT_EQ(strategy->dp, 4 * nodes);
  }
}

// Of 4 nodes 3 remain, 24 devices: dp 12 of 2 samples does not divide 64, dp 11
// to 9 do not either, dp 8 does and takes 16 devices.
TEST(Scenario, WhatIsLeftOfAFailureStandsBy) {
  Scenario scenario = Tiny({{"nodes", "4"}});
  scenario.failed = {"node3.gpu1"};
  ModelCache models;
  Case made = *MakeCase(scenario, models);
  EXPECT_EQ(made.cluster.devices.size(), 24U);
  ASSERT_TRUE(PlanOf(made));
  EXPECT_EQ(made.cluster.devices.size(), 16U);
  EXPECT_THAT(made.notes.back(), HasSubstr("8 devices stand by"));
}

TEST(Scenario, StrategiesAsFlags) {
  for (const char* text :
       {"tp=2,pp=2,mbs=4,zero=1,sp=1",
        "pp=2,mbs=1,recompute=full,schedule=gpipe", "tp=4"}) {
    const Strategy strategy = *ParseStrategy(text);
    const auto flag = FlagTextOf(strategy);
    ASSERT_TRUE(flag) << text;
    EXPECT_EQ(*ParseStrategy(*flag), strategy) << text;
  }
  EXPECT_FALSE(FlagTextOf(*ParseStrategy("zero=1,bucket=25MB")));
  EXPECT_EQ(WithStrategyKey("offload=optimizer:host,activations:host,tp=2",
                            "tp", "4"),
            "offload=optimizer:host,activations:host,tp=4");
}

TEST(Grid, AllCombinationsOnAnyThreads) {
  const std::vector<Axis> axes = {*ParseAxis("nodes=1,2"),
                                  *ParseAxis("device.memory=1MB,40,80GB")};
  GridOptions options;
  ModelCache models;
  const auto one = RunGrid(Tiny(), axes, options, models);
  options.threads = 3;
  const auto three = RunGrid(Tiny(), axes, options, models);
  ASSERT_TRUE(one && three);
  ASSERT_EQ(one->size(), 6U);
  EXPECT_THAT((*one)[1].values, ElementsAre("1", "40GB"));
  EXPECT_THAT((*one)[3].values, ElementsAre("2", "1MB"));
  for (size_t i = 0; i < one->size(); ++i) {
    EXPECT_EQ((*one)[i].prediction->evaluation,
              (*three)[i].prediction->evaluation);
    EXPECT_EQ((*one)[i].prediction->bottleneck,
              (*three)[i].prediction->bottleneck);
  }
  // What does not fit is a result.
  EXPECT_FALSE((*one)[0].prediction->evaluation.feasible());
  EXPECT_EQ((*one)[0].prediction->bottleneck, "memory");
  EXPECT_TRUE((*one)[1].prediction->evaluation.feasible());
}

TEST(Grid, WhatDoesNotDivideIsTheCellsProblem) {
  GridOptions options;
  ModelCache models;
  const auto cells =
      RunGrid(Tiny(), {*ParseAxis("strategy.tp=2,3")}, options, models);
  ASSERT_TRUE(cells);
  EXPECT_TRUE((*cells)[0].prediction);
  EXPECT_FALSE((*cells)[1].prediction);
  EXPECT_FALSE((*cells)[1].problem.empty());
  EXPECT_FALSE(RunGrid(Tiny(), {*ParseAxis("nodse=1")}, options, models));
}

}  // namespace
}  // namespace tessera
