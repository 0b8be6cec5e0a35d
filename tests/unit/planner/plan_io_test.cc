#include "planner/io/plan_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "planner/plan/stages.h"
#include "planner/plan/strategy.h"
#include "planner/plan/validate.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using testing::AttentionGraph;
using ::testing::HasSubstr;
using testing::MlpGraph;

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class PlanIoTest : public ::testing::Test {
 protected:
  PlanIoTest()
      : graph_(MlpGraph(2, 8, 4, 8, 16, 32)),
        cluster_(*MakeCluster("local-cpu:8")) {}

  Plan Make(std::string_view strategy) const {
    auto plan = PlanFromStrategy(graph_, cluster_, *ParseStrategy(strategy));
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    return *std::move(plan);
  }

  // The error of reading a good text plan with `from` replaced by `to`.
  std::string ErrorAfter(const std::string& from, const std::string& to) const {
    const std::string path = TempPath("broken.txtpb");
    EXPECT_TRUE(WritePlan(path, graph_, Make("tp=2,pp=2,zero=1")).has_value());
    std::string text = Contents(path);
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from << " in\n" << text;
    text.replace(at, from.size(), to);
    Write(path, text);
    const auto plan = ReadPlan(path, graph_);
    return plan ? "none" : plan.error().ToString();
  }

  Graph graph_;
  Cluster cluster_;
};

TEST_F(PlanIoTest, RoundTripIsExactAndBytesAreTheSame) {
  for (const char* strategy :
       {"", "tp=2,pp=2,zero=1,sp=1", "tp=4,mbs=4", "cp=2,zero=1",
        "zero=3,zero-group=2,bucket=25MB,prefetch=0", "recompute=full:1",
        "tiles=3", "dp-kind=rooted,tp=2"}) {
    const Plan plan = Make(strategy);
    for (const char* ending : {".txtpb", ".json", ".pb"}) {
      const std::string path = TempPath(std::string("round") + ending);
      ASSERT_TRUE(WritePlan(path, graph_, plan).has_value());
      const std::string bytes = Contents(path);
      const auto read = ReadPlan(path, graph_);
      ASSERT_TRUE(read.has_value()) << read.error().ToString();
      EXPECT_EQ(*read, plan) << strategy << ending;
      ASSERT_TRUE(WritePlan(path, graph_, *read).has_value());
      EXPECT_EQ(Contents(path), bytes);
      EXPECT_TRUE(Validate(graph_, cluster_, *read).empty());
    }
  }
}

TEST_F(PlanIoTest, ChunksAndTablesComeBack) {
  Plan plan = Make("pp=2,vp=2,mbs=1,dp=4,schedule=interleaved");
  plan.actions = OrdersOf(graph_, plan);
  plan.schedule = "table";
  ASSERT_TRUE(Validate(graph_, cluster_, plan).empty());
  const std::string path = TempPath("table.txtpb");
  ASSERT_TRUE(WritePlan(path, graph_, plan).has_value());
  const auto read = ReadPlan(path, graph_);
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, plan);
  std::string text = Contents(path);
  EXPECT_THAT(text, HasSubstr("chunk: 1"));
  const std::string good = "actions: \"B1.1\"";
  ASSERT_NE(text.find(good), std::string::npos) << text;
  text.replace(text.find(good), good.size(), "actions: \"R1.1\"");
  Write(path, text);
  EXPECT_THAT(ReadPlan(path, graph_).error().ToString(),
              HasSubstr("'R1.1' is no action"));
}

TEST_F(PlanIoTest, RingsAndZigzagComeBack) {
  const Graph graph = AttentionGraph(2, 16, 8, 8, 2, 32);
  const auto plan = PlanFromStrategy(
      graph, cluster_,
      *ParseStrategy("cp=4,tp=2,cp-kind=ring,cp-balance=zigzag"));
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const std::string path = TempPath("ring.txtpb");
  ASSERT_TRUE(WritePlan(path, graph, *plan).has_value());
  const auto read = ReadPlan(path, graph);
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, *plan);
  std::string text = Contents(path);
  EXPECT_THAT(text, HasSubstr("zigzag: 4"));
  const std::string good = "streamed: \"cp1\"";
  ASSERT_NE(text.find(good), std::string::npos) << text;
  text.replace(text.find(good), good.size(), "streamed: \"cp0\"");
  Write(path, text);
  EXPECT_THAT(ReadPlan(path, graph).error().ToString(),
              HasSubstr("streamed: 'cp0' occurs twice"));
}

TEST_F(PlanIoTest, TiersComeBack) {
  Plan plan =
      Make("dp=4,tp=2,offload=optimizer:file,parameters:host,activations:host");
  plan.ops[3].activation_tier = MemoryTier::kFile;
  ASSERT_TRUE(Validate(graph_, cluster_, plan).empty());
  const std::string path = TempPath("tiers.txtpb");
  ASSERT_TRUE(WritePlan(path, graph_, plan).has_value());
  const auto read = ReadPlan(path, graph_);
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, plan);
  EXPECT_EQ(read->ops[3].activation_tier, MemoryTier::kFile);
}

TEST_F(PlanIoTest, WhatASearchSaidIsRecordedAndPassedOver) {
  const Plan plan = Make("tp=2,pp=2");
  const PlanPrediction prediction = {
      Duration{1'500'000'000'000}, false,  "zero-1",
      Duration{1'800'000'000'000}, 0.0625, true};
  const std::string path = TempPath("said.txtpb");
  ASSERT_TRUE(WritePlan(path, graph_, plan, &prediction).has_value());
  const std::string text = Contents(path);
  for (const char* part :
       {"step_time_s: 1.5", "baseline: \"zero-1\"", "baseline_step_time_s: 1.8",
        "error_band: 0.0625", "confirmed: true"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  const auto read = ReadPlan(path, graph_);
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(*read, plan);
}

TEST_F(PlanIoTest, NamesNodesFactorsAndAxes) {
  const std::string path = TempPath("readable.txtpb");
  ASSERT_TRUE(WritePlan(path, graph_, Make("tp=2,pp=2")).has_value());
  const std::string text = Contents(path);
  for (const char* part :
       {"nodes: \"h.0.up\"", "group: \"stage1\"", "factor: \"f\"",
        "axes: \"tp0\"", "cluster: \"local-cpu:8\"", "microbatches: 4",
        "schedule: \"1f1b\""}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST_F(PlanIoTest, APlanForAnotherModelSaysSo) {
  const std::string path = TempPath("other.json");
  ASSERT_TRUE(WritePlan(path, graph_, Make("tp=2")).has_value());
  const Graph other = MlpGraph(2, 16, 4, 8, 16, 32);
  const auto plan = ReadPlan(path, other);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, ErrorCode::kInvalidInput);
  EXPECT_THAT(
      plan.error().ToString(),
      HasSubstr(
          "the plan is for mlp (global batch 8, sequence length 4, fp32), "
          "not for mlp (global batch 16, sequence length 4, fp32)"));
  EXPECT_THAT(plan.error().where, HasSubstr(path));
  const auto wide = ReadPlan(path, MlpGraph(2, 8, 4, 16, 16, 32));
  EXPECT_THAT(
      wide.error().ToString(),
      HasSubstr("another model of the same name, mlp (global batch 8,"));
}

TEST_F(PlanIoTest, APlanByHandNeedNotSayForWhatItIs) {
  const std::string path = TempPath("by_hand.txtpb");
  ASSERT_TRUE(WritePlan(path, graph_, Make("tp=2")).has_value());
  const std::string text = Contents(path);
  const size_t at = text.find("graph {");
  ASSERT_NE(at, std::string::npos);
  Write(path, text.substr(0, at) + text.substr(text.find('}', at) + 1));
  EXPECT_TRUE(ReadPlan(path, graph_).has_value());
  const Graph other = MlpGraph(2, 16, 4, 8, 16, 32);
  EXPECT_THAT(ReadPlan(path, other).error().ToString(),
              HasSubstr("another model, batch, sequence length or dtype than "
                        "mlp (global batch 16, sequence length 4, fp32)"));
  EXPECT_EQ(ReadPlanOfAnySize(path, other)->global_batch, 16);
}

TEST_F(PlanIoTest, APlanOfAnySizeIsReadForThisOne) {
  const std::string path = TempPath("any_size.json");
  const Plan plan = Make("tp=2,dp=2,pp=2,zero=1,mbs=2");
  ASSERT_TRUE(WritePlan(path, graph_, plan).has_value());
  Graph other = MlpGraph(2, 24, 16, 8, 16, 32);
  other.dtype = DType::kBFloat16;
  const auto read = ReadPlanOfAnySize(path, other);
  ASSERT_TRUE(read.has_value()) << read.error().ToString();
  EXPECT_EQ(read->global_batch, 8);
  EXPECT_EQ(read->plan.graph_fingerprint, Fingerprint(other));
  EXPECT_EQ(read->plan.microbatches, plan.microbatches);
  EXPECT_TRUE(read->plan.ops == plan.ops);
  const auto deeper = ReadPlanOfAnySize(path, MlpGraph(3, 8, 4, 8, 16, 32));
  EXPECT_THAT(deeper.error().ToString(),
              HasSubstr("node 'h.2.norm' has no placement"));
}

TEST_F(PlanIoTest, WhatNoPlanCanHaveIsAnError) {
  EXPECT_THAT(ErrorAfter("microbatches: 4", "microbatches: 0"),
              HasSubstr("microbatches: is 0: expected at least 1"));
  EXPECT_THAT(ErrorAfter("size: 2", "size: 0"),
              HasSubstr("axes[0].size: is 0: expected 1 to 1048576"));
  const std::string path = TempPath("no_batch.txtpb");
  ASSERT_TRUE(WritePlan(path, graph_, Make("tp=2")).has_value());
  std::string text = Contents(path);
  const size_t at = text.find("global_batch: 8");
  ASSERT_NE(at, std::string::npos);
  Write(path, text.replace(at, 15, "global_batch: 0"));
  EXPECT_THAT(ReadPlanOfAnySize(path, graph_).error().ToString(),
              HasSubstr("graph.global_batch: is 0: expected 1 or more"));
}

TEST_F(PlanIoTest, APlanForAnotherDTypeSaysWhich) {
  const std::string path = TempPath("dtype.json");
  ASSERT_TRUE(WritePlan(path, graph_, Make("tp=2")).has_value());
  Graph other = graph_;
  other.dtype = DType::kBFloat16;
  const auto plan = ReadPlan(path, other);
  ASSERT_FALSE(plan.has_value());
  EXPECT_THAT(plan.error().ToString(),
              HasSubstr("graph_fingerprint: is '" + Fingerprint(graph_) +
                        "': the plan is for mlp (global batch 8, sequence "
                        "length 4, fp32), not for mlp (global batch 8, "
                        "sequence length 4, bf16)"));
}

TEST_F(PlanIoTest, BadFilesGetOneLineWithThePlace) {
  for (const auto& [said, text] :
       {std::pair("step_time_s: -1", "step_time_s: is -1"),
        std::pair("step_time_s: nan", "step_time_s: is nan"),
        std::pair("step_time_s: inf", "step_time_s: is inf"),
        std::pair("baseline_step_time_s: -2", "baseline_step_time_s: is -2"),
        std::pair("error_band: -0.5", "error_band: is -0.5")}) {
    EXPECT_THAT(ErrorAfter("microbatches:", std::string("prediction { ") +
                                                said + " } microbatches:"),
                HasSubstr(std::string("broken.txtpb: prediction.") + text +
                          ": expected a finite number, 0 or more"));
  }
  EXPECT_THAT(ErrorAfter("microbatches:", "microbatch:"),
              HasSubstr("did you mean 'microbatches'?"));
  EXPECT_THAT(ErrorAfter("group: \"stage0\"", "group: \"stag0\""),
              HasSubstr("placements[0].group: unknown group 'stag0'; did you "
                        "mean 'stage0'?"));
  EXPECT_THAT(ErrorAfter("nodes: \"h.0.up\"", "nodes: \"h.9.up\""),
              HasSubstr("unknown node 'h.9.up'"));
  EXPECT_THAT(ErrorAfter("nodes: \"h.0.up\"", "nodes: \"lookup\""),
              HasSubstr("'lookup' is placed twice"));
  EXPECT_THAT(ErrorAfter("nodes: \"h.0.up\"", ""),
              HasSubstr("placements: node 'h.0.up' has no placement"));
  EXPECT_THAT(ErrorAfter("factor: \"v\"", "factor: \"q\""),
              HasSubstr("placements[0].splits[1].factor: node 'lookup' has no "
                        "factor 'q'"));
  EXPECT_THAT(ErrorAfter("factor: \"v\"", "factor: \"b\""),
              HasSubstr("factor 'b' is split twice"));
  for (const char* device : {"-1", "1048576"}) {
    EXPECT_THAT(ErrorAfter("devices: 0", std::string("devices: ") + device),
                HasSubstr(std::string("groups[0].devices[0]: is ") + device +
                          ": expected 0 to 1048575"));
  }
  EXPECT_THAT(ErrorAfter("axes: \"tp0\"", "axes: \"tp9\""),
              HasSubstr("placements[0].splits[1].axes: unknown mesh axis "
                        "'tp9'"));
  EXPECT_THAT(ErrorAfter("weights: \"table\"", ""),
              HasSubstr("weights: weight 'table' has no entry"));
  EXPECT_THAT(ErrorAfter("weights: \"table\"", "weights: \"matrix\""),
              HasSubstr("'matrix' occurs twice"));
  EXPECT_THAT(ErrorAfter("zero_axes: \"dp0\"", "zero_axes: \"dp1\""),
              HasSubstr("zero_axes: unknown mesh axis 'dp1'"));
  EXPECT_THAT(ErrorAfter("schema_version: 1", "schema_version: 7"),
              HasSubstr("schema_version is 7"));
}

// Values that do not fit their fields, too, in both text formats.
TEST_F(PlanIoTest, ValuesThatDoNotFitHaveALineAndColumn) {
  const auto error_after = [&](const std::string& name, const std::string& from,
                               const std::string& to) {
    const std::string path = TempPath(name);
    EXPECT_TRUE(WritePlan(path, graph_, Make("tp=2")).has_value());
    std::string text = Contents(path);
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from << " in\n" << text;
    text.replace(at, from.size(), to);
    Write(path, text);
    const auto plan = ReadPlan(path, graph_);
    return plan ? "none" : plan.error().ToString().substr(path.size());
  };
  EXPECT_EQ(error_after("x.json", "\"schema_version\": 1",
                        "\"schema_version\": \"one\""),
            ":2:20: schema_version: is \"one\": expected a whole number of 32 "
            "bits");
  EXPECT_EQ(error_after("x.json", "\"schedule\": \"1f1b\"", "\"schedule\": 7"),
            ":5:14: schedule: is 7: expected a text in quotes");
  EXPECT_THAT(error_after("x.json", "\"size\": 2", "\"size\": 99999999999"),
              HasSubstr(": groups[0].axes[0].size: is 99999999999: expected a "
                        "whole number of 32 bits"));
  EXPECT_EQ(error_after("x.json", "\"schedule\": \"1f1b\"", "\"schedule\": {}"),
            ":5:14: schedule: is an object: expected a text in quotes");
  EXPECT_THAT(error_after("x.json", "\"size\": 2", "\"size\": {\"a\": 1}"),
              HasSubstr(": groups[0].axes[0].size: is an object: expected a "
                        "whole number of 32 bits"));
  EXPECT_THAT(error_after("x.json", "\"table\",", "{},"),
              HasSubstr("weights[0]: is an object: expected a text in quotes"));
  EXPECT_THAT(error_after("x.json", "\"table\",", "[\"table\"],"),
              HasSubstr("weights[0]: is a list in a list: expected none"));
  EXPECT_THAT(error_after("x.json", "\"table\",",
                          "\"table\"], \"parameter_tier\": {}}, "
                          "{\"weights\": ["),
              HasSubstr("parameter_tier: is an object: expected one of DEVICE, "
                        "HOST, FILE"));
  EXPECT_THAT(
      error_after("x.json", "\"table\",",
                  "\"table\"], \"parameter_tier\": \"DISK\"}, "
                  "{\"weights\": ["),
      HasSubstr(
          "parameter_tier: is \"DISK\": expected one of DEVICE, HOST, FILE"));
  EXPECT_THAT(
      error_after("x.txtpb", "schema_version: 1", "schema_version: \"one\""),
      HasSubstr(":1:17: "));
}

TEST_F(PlanIoTest, TruncatedAndMissingFiles) {
  const std::string path = TempPath("cut.json");
  ASSERT_TRUE(WritePlan(path, graph_, Make("tp=2")).has_value());
  const std::string text = Contents(path);
  Write(path, text.substr(0, text.size() / 2));
  EXPECT_FALSE(ReadPlan(path, graph_).has_value());
  const auto missing = ReadPlan(TempPath("missing.json"), graph_);
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace tessera
