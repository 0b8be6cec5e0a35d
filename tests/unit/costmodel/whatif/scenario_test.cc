#include "costmodel/whatif/scenario.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "costmodel/whatif/fabric.h"
#include "costmodel/whatif/grid.h"
#include "costmodel/whatif/jitter.h"
#include "costmodel/whatif/predict.h"
#include "costmodel/whatif/questions.h"
#include "costmodel/whatif/sensitivity.h"
#include "planner/io/cluster_io.h"
#include "planner/io/importer.h"
#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"
#include "tests/support/cluster_edits.h"
#include "tests/support/paths.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

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

// Lists, objects and null, in place of those of the file.
TEST(Scenario, SettingsOfLists) {
  const auto import = [](const std::string& model, const std::string& key,
                         const std::string& value) {
    ImportOptions options;
    options.global_batch = 4;
    options.seq_len = 16;
    const Setting setting = {key, value};
    auto set = SetModelKeys(model, {&setting, 1}, options);
    EXPECT_TRUE(set) << set.error().ToString();
    return ImportModel(model, options);
  };
  // 2+2+2+2 layers, not 3+4+6+3: fewer blocks by 8.
  const auto of50 = import("zoo:resnet-50", "depths", "[3,4,6,3]");
  const auto shallow = import("zoo:resnet-50", "depths", "[2,2,2,2]");
  ASSERT_TRUE(of50 && shallow);
  EXPECT_EQ(of50->blocks.size(), shallow->blocks.size() + 8);
  const auto dlrm = import("zoo:dlrm-tiny", "top_mlp", "[8, 1]");
  ASSERT_TRUE(dlrm) << dlrm.error().ToString();
  // The file's third layer is gone.
  EXPECT_EQ(std::ranges::count(dlrm->tensors, "top_l.2.weight", &Tensor::name),
            1);
  EXPECT_EQ(std::ranges::count(dlrm->tensors, "top_l.4.weight", &Tensor::name),
            0);
  const auto rotary_of = [&](const std::string& value) {
    const auto llama = import("zoo:llama-3.2-1b", "rope_scaling", value);
    EXPECT_TRUE(llama) << llama.error().ToString();
    for (const Node& node : llama->nodes) {
      if (node.op->name.starts_with("rotary")) return node.op->name;
    }
    return std::string_view();
  };
  EXPECT_EQ(rotary_of("null"), "rotary");
  EXPECT_EQ(rotary_of(R"({"rope_type": "linear", "factor": 2})"),
            "rotary_linear");
  for (const std::string wrong : {"abc", "2", "[1.5]", "[]", "true"}) {
    const auto graph = import("zoo:resnet-50", "depths", wrong);
    ASSERT_FALSE(graph) << wrong;
    EXPECT_THAT(graph.error().ToString(), HasSubstr("depths: is ")) << wrong;
  }
}

TEST(Scenario, StacksAsAnAxis) {
  EXPECT_THAT(ParseAxis("cluster=dgx-h100:2,hgx-h100:2").error().ToString(),
              HasSubstr("cluster: unknown cluster 'hgx-h100'"));
  const auto axis = ParseAxis("stack=megatron-2021,megatron-core-2024");
  ASSERT_TRUE(axis);
  EXPECT_EQ(axis->values.size(), 2U);
  // Fields are those of the stack that is set.
  EXPECT_EQ(Made({{"stack.sustained", "0.75"}, {"stack", "megatron-2021"}})
                .cluster.stack.name,
            "megatron-2021");
  EXPECT_EQ(Made({{"stack.sustained", "0.75"}, {"stack", "megatron-2021"}})
                .cluster.stack.sustained,
            0.75);
  ModelCache models;
  const auto wrong = MakeCase(Tiny({{"stack", "megatron-2020"}}), models);
  ASSERT_FALSE(wrong);
  EXPECT_THAT(wrong.error().ToString(), HasSubstr("megatron-2021"));
}

TEST(Scenario, StacksAndTheirFields) {
  Scenario scenario = Tiny({{"stack.sustained", "0.75"}});
  scenario.stack = StackNamed("megatron-2021");
  ModelCache models;
  Stack expected = *scenario.stack;
  expected.sustained = 0.75;
  EXPECT_EQ(MakeCase(scenario, models)->cluster.stack, expected);
  // The default stack's fields are there to be set, one by one.
  Stack own;
  own.sustained = 0.8;
  EXPECT_EQ(Made({{"stack.sustained", "0.8"}}).cluster.stack, own);
  EXPECT_EQ(Made({{"stack.attention", "STACK_ATTENTION_UNFUSED"}})
                .cluster.stack.attention,
            StackAttention::kUnfused);
  EXPECT_THAT(ErrorOf({{"stack.attention", "unfused"}}),
              HasSubstr("STACK_ATTENTION_UNFUSED"));
}

TEST(Scenario, OtherCountsKeepTheNetwork) {
  Scenario scenario = Tiny({{"nodes", "4"}, {"gpus", "2"}});
  scenario.cluster = "dgx-a100-80gb:16x8@fat-tree:2";
  ModelCache models;
  EXPECT_EQ(MakeCase(scenario, models)->cluster,
            *MakeCluster("dgx-a100-80gb:4x2@fat-tree:2"));
  scenario.cluster = "dgx-a100-80gb@fat-tree:2";
  EXPECT_EQ(MakeCase(scenario, models)->cluster,
            *MakeCluster("dgx-a100-80gb:4x2@fat-tree:2"));
}

// Nodes of a mixture are unlike: which of them there are more of is not said.
TEST(Scenario, AMixtureHasItsCountsInItsName) {
  Scenario scenario = Tiny({{"device.memory", "40GB"}});
  scenario.cluster = "a3-high:1+a3-mega:1";
  ModelCache models;
  EXPECT_EQ(MakeCase(scenario, models)->cluster.num_nodes(), 2);
  for (const char* path : {"nodes", "gpus"}) {
    scenario.settings = {{path, "2"}};
    EXPECT_EQ(MakeCase(scenario, models).error().ToString(),
              std::string(path) +
                  ": the nodes of 'a3-high:1+a3-mega:1' are unlike: expected "
                  "their numbers in the cluster's name alone");
  }
  scenario.settings.clear();
  const auto grid = RunGrid(scenario, {*ParseAxis("nodes=1,2")}, {}, models);
  ASSERT_FALSE(grid);
  EXPECT_EQ(grid.error().code, ErrorCode::kInvalidInput);
}

// A rate is multiplied as it is, a count to a whole one: 8 heads become 12.
TEST(Scenario, FactorsOfAModelsKeys) {
  const auto set = [](const std::string& key, const std::string& value) {
    ImportOptions options;
    const Setting setting = {key, value};
    EXPECT_TRUE(SetModelKeys(ExamplePath("models/gpt2-tiny/config.json"),
                             {&setting, 1}, options));
    return options.overrides.at(key).number;
  };
  EXPECT_DOUBLE_EQ(set("layer_norm_epsilon", "2x"), 2e-5);
  EXPECT_EQ(set("n_head", "1.5x"), 12);
  EXPECT_EQ(set("n_head", "1.51x"), 12);
}

// Without a profile it would change nothing and say nothing.
TEST(Scenario, SlownessOfLinksIsOfMeasuredCollectives) {
  const Case made = Made({{"link_types[*].slowness", "2"}});
  EXPECT_EQ(made.cluster.link_types[0].slowness, 2);
  EXPECT_THAT(
      made.notes,
      ElementsAre(AllOf(HasSubstr("link_types[*].slowness: "),
                        HasSubstr("--profile"), HasSubstr("link.bandwidth"))));
  EXPECT_TRUE(Made({{"device.slowness", "2"}}).notes.empty());
}

// What sensitivity improves is what the path of its name sets: rates by 2x,
// times by 0.5x.
TEST(Scenario, PathsSetWhatTheResourcesAreMadeOf) {
  Scenario scenario = Tiny();
  scenario.stack = StackNamed("megatron-2021");
  scenario.dtype = DType::kFloat32;
  ModelCache models;
  const Cluster usual = MakeCase(scenario, models)->cluster;
  int paths = 0;
  for (const Resource& resource : Resources()) {
    if (resource.name == "host") continue;  // Several fields, no path.
    Cluster improved = usual;
    ASSERT_TRUE(resource.improve(2, improved)) << resource.name;
    EXPECT_NE(improved, usual) << resource.name;
    const bool rate = resource.name.ends_with("bandwidth") ||
                      resource.name.ends_with("flops");
    scenario.settings = {{std::string(resource.name), rate ? "2x" : "0.5x"}};
    EXPECT_EQ(MakeCase(scenario, models)->cluster, improved) << resource.name;
    ++paths;
  }
  EXPECT_GE(paths, 10);
}

TEST(Scenario, FlopsAreOf16BitProductsAndScaleTheOthers) {
  const DeviceType usual = Made({}).cluster.device_types[0];
  const DeviceType faster =
      Made({{"device.flops", "624TFLOP/s"}}).cluster.device_types[0];
  EXPECT_DOUBLE_EQ(faster.peak_bf16.value, 624e12);
  EXPECT_NEAR(faster.peak_fp32.value / usual.peak_fp32.value,
              624e12 / usual.peak_bf16.value, 1e-12);
  for (const char* nothing : {"0x", "0"}) {
    EXPECT_THAT(ErrorOf({{"device.flops", nothing}}),
                HasSubstr("not positive"));
  }
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
  EXPECT_EQ(
      ReferenceLink(twice.cluster, LinkClass::kIntra)->start.picoseconds,
      2 * ReferenceLink(base.cluster, LinkClass::kIntra)->start.picoseconds);
  const Case none = Made({{"fabric.inter.latency", "0"}});
  EXPECT_EQ(ReferenceLink(none.cluster, LinkClass::kInter)->latency,
            Duration{});
  // What is 0 may be set to it again, and to nothing else by its class.
  const Setting zero = {"link_types[*].latency", "0"};
  const Case again = Made({zero, {"fabric.inter.latency", "0"}});
  EXPECT_EQ(ReferenceLink(again.cluster, LinkClass::kInter)->latency,
            Duration{});
  EXPECT_THAT(ErrorOf({zero, {"fabric.inter.latency", "1us"}}),
              HasSubstr("is 0 and cannot be scaled; set link.latency"));
  const Case alone = Made({{"nodes", "1"}, {"fabric.inter.latency", "2x"}});
  EXPECT_THAT(alone.notes, ElementsAre(HasSubstr("no such links")));
}

// PCIe within hosts and NICs of the same rate share a type until one changes.
TEST(Scenario, PartedLinkTypesAreNamedAfterTheirClass) {
  for (const LinkClassRow& row : LinkClasses()) {
    Cluster cluster = *MakeCluster("dgx-a100-80gb:2");
    for (Link& link : cluster.links) link.type = 0;
    ASSERT_TRUE(ScaleLinks(row.link_class, 2, 1, cluster)) << row.name;
    const std::string name(row.name.substr(std::string("fabric.").size()));
    EXPECT_EQ(cluster.link_types.back().name,
              cluster.link_types[0].name + "-" + name);
  }
}

TEST(Scenario, ZeroStandsForWhatIsNotKnown) {
  EXPECT_THAT(Made({{"device.mtbf", "0h"}}).notes,
              ElementsAre("device.mtbf: 0 stands for a figure that is not "
                          "known"));
  EXPECT_THAT(Made({{"device.price", "2USD/h"}, {"device.price", "0x"}}).notes,
              ElementsAre(HasSubstr("device.price: 0")));
  EXPECT_THAT(Made({{"device.price", "2USD/h"}}).notes, IsEmpty());
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
  EXPECT_THAT(ErrorOf({{"model.layer", "1"}}),
              AllOf(HasSubstr("did you mean 'layers'?"),
                    HasSubstr("known: layers, hidden, heads, vocab, ")));
  for (const std::string list : {"[1", "[1], \"x\": [2]", "{\"x\": 1"}) {
    EXPECT_THAT(ErrorOf({{"model.n_inner", list}}),
                HasSubstr("is not a value of JSON"));
  }
  EXPECT_THAT(ErrorOf({{"dtype", "bf17"}}), HasSubstr("dtype"));
  // The field that is wrong, where it is not the path itself.
  EXPECT_THAT(ErrorOf({{"device.bandwidth", "0x"}}),
              HasSubstr("device.bandwidth: '0x' gives device_types[0].memory_"
                        "bandwidth_bytes_per_second"));
  EXPECT_THAT(ErrorOf({{"device.flops", "1e300x"}}),
              AllOf(HasSubstr("device.flops: device_types[0].peak_fp64_flops_"
                              "per_second: must be 0 or in [1e+09, 1e+21], is"),
                    HasSubstr("more problems")));
  EXPECT_THAT(ErrorOf({{"fabric.inter.bandwidth", "1e-12x"}}),
              AllOf(HasSubstr("fabric.inter.bandwidth: link_types["),
                    HasSubstr("].bandwidth_bytes_per_second: must be at least "
                              "1e+06, is ")));
  // A collective's start grows with the latency.
  EXPECT_THAT(ErrorOf({{"fabric.intra.latency", "1s"}}),
              AllOf(HasSubstr("fabric.intra.latency: link_types["),
                    HasSubstr("].start_seconds: must be at most 1, is ")));
  EXPECT_THAT(ErrorOf({{"fabric.inter.latency", "1e306s"}}),
              HasSubstr("fabric.inter.latency: '1e306s' is out of range"));
  Scenario slow = Tiny();
  slow.slow = {{"device3", "1e300x"}};
  ModelCache models;
  EXPECT_THAT(MakeCase(slow, models).error().message,
              HasSubstr("at most 1000x"));
  slow.slow = {{"device3", "1e-300x"}};
  EXPECT_THAT(MakeCase(slow, models).error().ToString(),
              HasSubstr("device3: device_types[1].slowness: must be in [0.001, "
                        "1e+06], is 1e-300"));
  slow.slow = {{"node1.nic0", "1000x"}};
  slow.settings = {{"fabric.inter.bandwidth", "1MB/s"}};
  EXPECT_THAT(MakeCase(slow, models).error().ToString(),
              AllOf(HasSubstr("node1.nic0: link_types["),
                    HasSubstr("must be at least 1e+06, is 1000")));
  EXPECT_THAT(ParseAxis("nodes=2,4,2").error().message,
              HasSubstr("given twice"));
  EXPECT_THAT(ParseAxis("cluster=dgx-h100,dgx-h100").error().message,
              HasSubstr("given twice"));
}

// A value that is none on any cluster, of any model and strategy, is no cell.
TEST(Scenario, AxesHaveValuesAlone) {
  for (const auto& [axis, message] :
       std::vector<std::pair<std::string, std::string>>{
           {"dtype=bf16,fp8", "dtype: unknown dtype 'fp8'"},
           {"collective=ring,foo", "unknown collective algorithm 'foo'"},
           {"collective=ring/foo", "unknown collective protocol 'foo'"},
           {"stack=tessera,foo", "unknown stack 'foo'"},
           {"cluster=dgx-h100,foo", "unknown cluster 'foo'"},
           {"strategy.tq=1,2", "unknown strategy key 'tq'"},
           {"strategy.tp=1,0", "strategy.tp: is '0': expected a whole number"},
           {"strategy.zero=1,4", "strategy.zero: is '4': expected 0, 1, 2 or"},
           {"strategy.recompute=full,foo", "unknown recompute level 'foo'"},
           {"model.heads=32,0", "model.heads: '0' is not a whole number"},
           {"model.layers=2,2.5", "model.layers: '2.5' is not a whole number"},
           {"model.vocab=2GB", "model.vocab: '2GB' is not a whole number"},
           {"model.hidden=1x,-1x", "'-1x' is not a whole number"}}) {
    const auto parsed = ParseAxis(axis);
    ASSERT_FALSE(parsed) << axis;
    EXPECT_THAT(parsed.error().ToString(), HasSubstr(message));
  }
  // These need something of the others.
  for (const char* axis :
       {"dtype=fp64", "collective=hierarchical,ring/ll,/simple",
        "strategy.sp=0,1", "strategy.vp=2", "strategy.tp=3,8",
        "strategy.offload=optimizer:host", "strategy.schedule=1f1b,gpipe",
        "model.layers=2x,0.5x", "model.heads=5", "model.hidden_act=relu"}) {
    EXPECT_TRUE(ParseAxis(axis)) << axis;
  }
}

TEST(Scenario, DocumentsEndInATokenOfTheVocabulary) {
  Scenario scenario = Tiny({{"model.vocab", "1000"}});
  ModelCache models;
  scenario.end_of_text = 999;
  EXPECT_TRUE(MakeCase(scenario, models));
  scenario.end_of_text = 1000;
  EXPECT_EQ(MakeCase(scenario, models).error().ToString(),
            "--end-of-text: is 1000: expected less than the vocabulary size "
            "1000");
}

// Rates that are set say how fast, not in which type: that is the first in
// which the cluster's devices, as it is named, are faster than in fp32.
TEST(Scenario, TheDTypeIsThatOfTheClusterAsNamed) {
  const auto dtype = [](std::vector<Setting> settings) {
    return Made(std::move(settings)).graph->dtype;
  };
  const std::string types = "device_types[*].";
  EXPECT_EQ(dtype({{types + "peak_bf16", "10TFLOP/s"}}), DType::kBFloat16);
  EXPECT_EQ(dtype({{types + "peak_fp32", "400TFLOP/s"}}), DType::kBFloat16);
  EXPECT_EQ(dtype({{"cluster", "dgx1-v100-32gb:1"},
                   {types + "peak_bf16", "400TFLOP/s"}}),
            DType::kFloat16);
  EXPECT_THAT(ErrorOf({{types + "peak_bf16", "0TFLOP/s"}}),
              HasSubstr("does not compute in bf16"));
}

// By their own names and by any family's.
TEST(Scenario, AKeyOfTheModelIsGivenOnce) {
  for (const char* other : {"model.n_layer", "model.layers"}) {
    EXPECT_THAT(ErrorOf({{"model.layers", "4"}, {other, "8"}}),
                HasSubstr(std::string(other) +
                          ": 'n_layer' is given twice, by model.layers too"));
  }
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

// A file's hosts in a chain, 0 - 2 - 1: the first two reach each other through
// the last alone, so that no case and no plan can be of them.
TEST(Scenario, DevicesThatNeedOthersOnTheirWayAreNotLeftAlone) {
  Cluster chain = *MakeCluster("dgx-h100:3x1");
  const VertexId leaf = testing::VertexNamed(chain, "leaf0");
  const int type = testing::EraseLinksOf(leaf, chain);
  chain.vertices.erase(chain.vertices.begin() + leaf.value);
  for (const char* host : {"node0.nic0", "node1.nic0"}) {
    testing::Join(testing::VertexNamed(chain, host),
                  testing::VertexNamed(chain, "node2.nic0"), type, chain);
  }
  const std::string path = TempPath("chain.txtpb");
  ASSERT_TRUE(WriteCluster(path, chain));
  Scenario scenario = Tiny();
  scenario.cluster = path;
  scenario.strategy = "mbs=2";
  ModelCache models;
  scenario.settings = {{"nodes", "2"}};
  const auto made = MakeCase(scenario, models);
  ASSERT_FALSE(made);
  EXPECT_THAT(made.error().ToString(), HasSubstr("only by way of others"));
  // A switch beside the way fails; 64 samples are no three replicas' of 2.
  scenario.settings = {};
  scenario.failed = {"node0.nvswitch"};
  Case failed = *MakeCase(scenario, models);
  ASSERT_TRUE(PlanOf(failed));
  EXPECT_EQ(failed.cluster.devices.size(), 1U);
}

// What failed makes measured collectives slower as --slow would, whoever asks.
TEST(Scenario, AFailureTakesItsTimeOfMeasuredCollectives) {
  ProfileDb profile;
  for (const CommKind kind :
       {CommKind::kAllReduce, CommKind::kAllGather, CommKind::kReduceScatter}) {
    for (const auto& [ranks, nodes] : {std::pair{2, 1}, {8, 2}, {16, 2}}) {
      for (const int64_t bytes : {1'000, 1'000'000}) {
        profile.rows[CollectiveKey(kind, "a100-sxm4-80gb", ranks, nodes,
                                   {bytes})] = {
            1e-9 * static_cast<double>(bytes) + 1e-3, 0, 5};
      }
    }
  }
  GridOptions options;
  options.predict.profile = &profile;
  options.predict.fast = true;
  options.predict.sensitivity = true;
  ModelCache models;
  Scenario scenario = Tiny({{"fabric.inter.bandwidth", "100MB/s"}});
  const auto predicted = [&] {
    Case made = *MakeCase(scenario, models);
    const Plan plan = *PlanOf(made);
    return Predict(made, plan, options.predict);
  };
  const Prediction usual = predicted();
  for (int nic = 1; nic < 8; ++nic) {
    scenario.failed.push_back("node0.nic" + std::to_string(nic));
  }
  const Prediction failed = predicted();
  const double step = failed.evaluation.step_time.seconds();
  EXPECT_GT(step, 1.2 * usual.evaluation.step_time.seconds());
  const Case made = *MakeCase(scenario, models);
  EXPECT_EQ(FitOf(made, options)->step_time, failed.evaluation.step_time);
  Case of = made;
  const Plan plan = *PlanOf(of);
  EXPECT_NEAR(JitterOf(of, plan, options.predict, {1e-9, 3, 1}).p50, step,
              1e-6 * step);
  // Faster links leave measured times what they are. (Of links so slow the
  // model's times are their bandwidth's before the failure, too.)
  const auto by_links = [](const Prediction& prediction) {
    for (const Elasticity& e : prediction.sensitivity->resources) {
      if (e.resource->name == "fabric.inter.bandwidth") return e.value;
    }
    return 0.0;
  };
  options.predict.profile = nullptr;
  EXPECT_LT(by_links(failed), by_links(predicted()) / 3);
}

// Two ranks on a host's cores: each has enough for itself, the host has not.
TEST(Scenario, CoresLackTheirHostsMemory) {
  Scenario scenario = Tiny();
  scenario.cluster = "local-cpu:2";
  scenario.strategy = "mbs=2";
  ModelCache models;
  Case made = *MakeCase(scenario, models);
  made.cluster.hosts[0].memory = Bytes{1'000'000};
  const Plan plan = *PlanOf(made);
  const Prediction prediction = Predict(made, plan, {});
  EXPECT_FALSE(prediction.evaluation.feasible());
  EXPECT_LE(prediction.memory, prediction.capacity);
  EXPECT_EQ(prediction.bottleneck, "host capacity");
}

// Degrees whose product no number holds do not fit what is left either.
TEST(Scenario, NoDevicesAreLeftForDegreesBeyondAllNumbers) {
  Scenario scenario = Tiny({{"nodes", "4"}});
  scenario.failed = {"node3.gpu1"};
  scenario.strategy = "tp=16777216,pp=16777216,cp=65536";
  ModelCache models;
  Case made = *MakeCase(scenario, models);
  const auto plan = PlanOf(made);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().ToString(),
              HasSubstr("cp=65536 * ep=1 does not divide the 24 devices"));
}

TEST(Scenario, AKeyOfAStrategyIsReplaced) {
  EXPECT_EQ(WithStrategyKey("offload=optimizer:host,activations:host,tp=2",
                            "tp", "4"),
            "offload=optimizer:host,activations:host,tp=4");
}

// A plan is for its cluster; on a larger one its strategy says more, and where
// it has none there is no answer.
TEST(Grid, APlanOnMoreDevicesIsItsStrategy) {
  Scenario scenario = Tiny();
  scenario.strategy = "zero=1,bucket=25MB";
  ModelCache models;
  Case made = *MakeCase(scenario, models);
  const Plan plan = *PlanOf(made);
  const auto strategy = UniformStrategy(*made.index, made.cluster, plan);
  scenario.strategy = FlagTextOf(*strategy);
  GridOptions options;
  options.plan = &plan;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  const auto cells =
      RunGrid(scenario, {*ParseAxis("nodes=2,4")}, options, models);
  ASSERT_TRUE(cells);
  EXPECT_EQ((*cells)[0].prediction->strategy.substr(0, 4), "dp16");
  EXPECT_EQ((*cells)[1].prediction->strategy.substr(0, 4), "dp32");
  scenario.strategy.reset();
  const auto bare =
      RunGrid(scenario, {*ParseAxis("nodes=2,4")}, options, models);
  ASSERT_TRUE(bare);
  EXPECT_TRUE((*bare)[0].prediction);
  EXPECT_THAT((*bare)[1].problem, HasSubstr("the plan is for 16 devices"));
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
  EXPECT_EQ((*one)[0].prediction->bottleneck, "memory capacity");
  EXPECT_TRUE((*one)[1].prediction->evaluation.feasible());
}

// zero=1 and sp=1 have no effect where there is one replica, or one tensor
// rank.
TEST(Grid, KeysWithoutEffectInACellAreDroppedThere) {
  Scenario scenario = Tiny();
  scenario.strategy = "tp=8,zero=1,sp=1";
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  ModelCache models;
  const std::vector<Axis> axes = {*ParseAxis("nodes=1,2"),
                                  *ParseAxis("strategy.tp=1,8")};
  const auto strict = RunGrid(scenario, axes, options, models);
  ASSERT_TRUE(strict);
  EXPECT_THAT((*strict)[1].problem, HasSubstr("zero=1 has no effect"));
  scenario.drops_idle_keys = true;
  const auto cells = RunGrid(scenario, axes, options, models);
  ASSERT_TRUE(cells);
  for (const Cell& cell : *cells) EXPECT_TRUE(cell.prediction) << cell.problem;
  EXPECT_THAT((*cells)[0].notes,
              ElementsAre("without sp=1, which has no effect: needs tp of at "
                          "least 2"));
  EXPECT_THAT((*cells)[1].notes,
              ElementsAre(HasSubstr("without zero=1, which has no effect: ")));
  EXPECT_TRUE((*cells)[3].notes.empty());
  EXPECT_EQ((*cells)[3].prediction->evaluation,
            (*strict)[3].prediction->evaluation);
  // What cannot be laid out still cannot.
  scenario.strategy = "tp=3,zero=1";
  EXPECT_THAT(RunGrid(scenario, {}, options, models)->front().problem,
              HasSubstr("does not divide"));
  // Of 16 devices a failure leaves one replica.
  scenario.strategy = "tp=8,zero=1";
  scenario.failed = {"node1"};
  Case made = *MakeCase(scenario, models);
  EXPECT_TRUE(PlanOf(made));
  EXPECT_THAT(made.notes.back(), HasSubstr("without zero=1"));
}

TEST(Grid, StochasticRoundingIsOfBf16) {
  Scenario scenario = Tiny();
  GridOptions options;
  options.predict.fast = true;
  options.predict.training.stochastic_rounding = true;
  ModelCache models;
  const auto cells =
      RunGrid(scenario, {*ParseAxis("dtype=bf16,fp32")}, options, models);
  ASSERT_TRUE(cells);
  EXPECT_TRUE((*cells)[0].prediction) << (*cells)[0].problem;
  EXPECT_THAT((*cells)[1].problem,
              HasSubstr("stochastic rounding is of parameters in bf16, and "
                        "these are in fp32"));
}

// Who waits hears how many cells are done, and what the others are at.
TEST(Grid, ProgressCountsCellsAndSaysTheBestSoFar) {
  std::vector<std::string> heard;
  GridOptions options;
  options.predict.fast = true;
  options.predict.sensitivity = false;
  options.predict.watch.hears = [&](const std::string& text) {
    heard.push_back(text);
  };
  options.replan = {.proposals = 2000};
  ModelCache models;
  Scenario scenario = Tiny();
  scenario.strategy.reset();
  ASSERT_TRUE(RunGrid(scenario, {*ParseAxis("nodes=1,2")}, options, models));
  ASSERT_GE(heard.size(), 2U);
  EXPECT_EQ(heard.back(), "2 of 2 cells are done");
  EXPECT_THAT(heard, ::testing::Contains("1 of 2 cells are done"));
  EXPECT_THAT(heard, ::testing::Contains(MatchesRegex(
                         "1 of 2 cells are done; planning for dgx-a100-80gb:2: "
                         "[0-9]+ of 2000 proposals, best step .* m?s")));
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
  // What is no value at all is no cell.
  for (const char* axis : {"nodes=1,abc", "device.memory=80GB,-1"}) {
    const auto grid = RunGrid(Tiny(), {*ParseAxis(axis)}, options, models);
    ASSERT_FALSE(grid.has_value()) << axis;
    EXPECT_EQ(grid.error().code, ErrorCode::kInvalidInput) << axis;
  }
}

}  // namespace
}  // namespace tessera
