#include "planner/plan/strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <span>
#include <sstream>

#include "planner/base/append.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/plan/axis_roles.h"
#include "planner/plan/describe.h"
#include "planner/plan/strategy_text.h"
#include "planner/plan/validate.h"
#include "planner/plan/work_shares.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/small_models.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MlpGraph;

Graph Model(std::string_view name, int64_t batch, int64_t seq) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq;
  auto graph = ImportModel(
      ExamplePath(std::string("models/") + std::string(name)), options);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  auto differentiated = Differentiate(*std::move(graph));
  TESSERA_CHECK(differentiated.has_value());
  return *std::move(differentiated);
}

// "b/dp0 f/tp0*tp1" of the node called `name`.
std::string SplitOf(const Graph& graph, const Plan& plan,
                    std::string_view name) {
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.name != name) continue;
    const DeviceGroup& group = plan.groups[plan.ops[i].group.index()];
    std::string text;
    for (size_t f = 0; f < node.rule.factors.size(); ++f) {
      std::string axes;
      for (size_t a = 0; a < group.axes.size(); ++a) {
        if ((plan.ops[i].axes[f] >> a & 1) == 0) continue;
        AppendTo(axes, "*", group.axes[a].name);
      }
      if (axes.empty()) continue;
      AppendTo(text, " ",
               std::string(1, node.rule.factors[f].letter) + "/" + axes);
    }
    return text;
  }
  ADD_FAILURE() << "no node " << name;
  return "";
}

Result<Plan> Make(const Graph& graph, const Cluster& cluster,
                  std::string_view text) {
  TESSERA_TRY(const Strategy strategy, ParseStrategy(text));
  return PlanFromStrategy(graph, cluster, strategy);
}

TEST(ParseStrategy, DefaultsAndAllKeys) {
  EXPECT_EQ(*ParseStrategy(""), Strategy());
  const auto strategy = ParseStrategy(
      "tp=8,pp=4,dp=2,vp=1,cp=1,ep=2,mbs=3,zero=1,sp=1,recompute=full:4,"
      "schedule=gpipe,order=dp-tp-cp-ep-pp");
  ASSERT_TRUE(strategy.has_value()) << strategy.error().ToString();
  EXPECT_EQ(strategy->tp, 8);
  EXPECT_EQ(strategy->pp, 4);
  EXPECT_EQ(strategy->dp, 2);
  EXPECT_EQ(strategy->ep, 2);
  EXPECT_EQ(strategy->mbs, 3);
  EXPECT_EQ(strategy->zero, 1);
  EXPECT_TRUE(strategy->sp);
  EXPECT_EQ(strategy->recompute, RecomputeLevel::kFull);
  EXPECT_EQ(strategy->recompute_layers, 4);
  EXPECT_EQ(strategy->schedule, "gpipe");
  EXPECT_EQ(strategy->order[0], MeshDimension::kData);
}

TEST(ParseStrategy, SaysWhatIsSupported) {
  const auto error = [](std::string_view text) {
    const auto strategy = ParseStrategy(text);
    return strategy ? "none" : strategy.error().ToString();
  };
  EXPECT_EQ(error("zero=4"), "zero: is '4': expected 0, 1, 2 or 3");
  EXPECT_EQ(error("vp=0"), "vp: is '0': expected a whole number from 1");
  EXPECT_EQ(error("recompute=all"),
            "recompute: unknown recompute level 'all'; did you mean 'full'? "
            "known: none, selective, full");
  EXPECT_EQ(error("recompute=full:0"),
            "recompute: is '0': expected a whole number of layers behind the "
            "':'");
  EXPECT_EQ(error("cp-kind=rings"),
            "cp-kind: unknown cp-kind 'rings'; did you mean 'ring'? known: "
            "gather, ring, ulysses");
  EXPECT_EQ(error("cp-balance=zig"),
            "cp-balance: unknown cp-balance 'zig'; did you mean 'zigzag'? "
            "known: none, zigzag");
  EXPECT_EQ(error("dp-kind=x"),
            "dp-kind: unknown dp-kind 'x'; known: ddp, rooted");
  EXPECT_EQ(error("branches=splits"),
            "branches: unknown branches 'splits'; did you mean 'split'? "
            "known: whole, split");
  // A table of actions is not named, but given as a file.
  for (const char* name : {"zb-h3", "table"}) {
    EXPECT_THAT(
        error(std::string("schedule=") + name),
        AllOf(HasSubstr(std::string("schedule: unknown schedule '") + name),
              HasSubstr("known: gpipe, 1f1b, interleaved, zb-h1, zb-h2, or the "
                        "path of a file with a table of actions")));
  }
  EXPECT_EQ(error("tp=0"), "tp: is '0': expected a whole number from 1");
  EXPECT_EQ(error("tp=two"), "tp: is 'two': expected a whole number from 1");
  EXPECT_EQ(error("tp=2x"), "tp: is '2x': expected a whole number from 1");
  EXPECT_EQ(error("tp"), "tp: expected KEY=VALUE");
  EXPECT_EQ(error("tp=2,tp=2"), "tp: is given twice");
  EXPECT_THAT(error("schedul=1f1b"), HasSubstr("did you mean 'schedule'?"));
  EXPECT_EQ(error("tp=2,"), "ends in a comma: expected KEY=VALUE behind it");
  EXPECT_EQ(error("offload=optimizer:host,"),
            "ends in a comma: expected KEY=VALUE behind it");
  EXPECT_EQ(error(",tp=2"),
            "has a comma with nothing before it: expected KEY=VALUE");
  EXPECT_THAT(error("order=tp-dp"), HasSubstr("order: is 'tp-dp': expected"));
  EXPECT_THAT(error("order=tp-tp-dp-pp-ep"), HasSubstr("names tp twice"));
}

TEST(ParseStrategy, KeysWithoutEffectSayWhatTheyNeed) {
  const auto error = [](std::string_view text) {
    const auto strategy = ParseStrategy(text);
    return strategy ? "none" : strategy.error().ToString();
  };
  EXPECT_EQ(error("zero=2,prefetch=2"),
            "prefetch: has no effect: needs zero=3 or "
            "offload=parameters:host|file");
  EXPECT_EQ(error("prefetch=2,zero=3"), "none");
  EXPECT_EQ(error("prefetch=2,offload=parameters:host"), "none");
  EXPECT_EQ(error("prefetch=1"), "none");  // as without it
  EXPECT_EQ(error("zero-group=2,dp-kind=rooted"),
            "zero-group: has no effect: needs zero=1, 2 or 3");
  EXPECT_EQ(error("sp=1"), "sp: has no effect: needs tp of at least 2");
  EXPECT_EQ(error("cp-kind=ring"),
            "cp-kind: has no effect: needs cp of at least 2");
  EXPECT_EQ(error("cp=2,cp-kind=ulysses,cp-balance=zigzag"),
            "cp-balance: has no effect: needs cp of at least 2 and "
            "cp-kind=gather or ring");
  EXPECT_EQ(error("recompute=none:1"),
            "recompute: has no effect: needs selective or full where it "
            "counts layers");
  EXPECT_EQ(error("recompute=none"), "none");
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const Cluster cluster = *MakeCluster("local-cpu:2");
  EXPECT_EQ(Make(graph, cluster, "tp=2,bucket=1MB").error().ToString(),
            "bucket=1MB has no effect: no gradient is reduced where dp, cp "
            "and ep are 1");
  EXPECT_EQ(Make(graph, cluster, "tp=2,zero=3").error().ToString(),
            "zero=3 has no effect: no weight has copies to cut where dp, cp "
            "and ep are 1");
  EXPECT_TRUE(Make(graph, cluster, "cp=2,zero=3").has_value());
  EXPECT_EQ(Make(graph, cluster, "tp=2,dp-kind=rooted").error().ToString(),
            "dp-kind=rooted has no effect: needs dp of at least 2");
}

TEST(ParseStrategy, Offload) {
  const auto strategy = ParseStrategy(
      "tp=2,offload=optimizer:host,parameters:file:/mnt/nvme,"
      "activations:host,zero=1");
  ASSERT_TRUE(strategy.has_value()) << strategy.error().ToString();
  EXPECT_EQ(strategy->optimizer_tier, MemoryTier::kHost);
  EXPECT_EQ(strategy->parameter_tier, MemoryTier::kFile);
  EXPECT_EQ(strategy->activation_tier, MemoryTier::kHost);
  EXPECT_EQ(strategy->offload_directory, "/mnt/nvme");
  EXPECT_EQ(strategy->tp, 2);
  EXPECT_EQ(strategy->zero, 1);
  const auto error = [](std::string_view text) {
    const auto strategy = ParseStrategy(text);
    return strategy ? "none" : strategy.error().ToString();
  };
  EXPECT_THAT(error("offload=optimiser:host"),
              HasSubstr("unknown offload 'optimiser'; did you mean "
                        "'optimizer'?"));
  EXPECT_EQ(error("offload=optimizer"),
            "offload: 'optimizer' lacks its tier: expected :host or :file");
  EXPECT_THAT(error("offload=optimizer:disk"),
              HasSubstr("is 'disk': expected device, host or file"));
  EXPECT_EQ(error("offload=optimizer:host,optimizer:file"),
            "offload: optimizer is given twice");
  EXPECT_EQ(error("offload=optimizer:host:/mnt"),
            "offload: 'optimizer:host:/mnt': only the file tier has a "
            "directory");
  EXPECT_EQ(ParseStrategy("offload=optimizer:file,gradients:host")
                .value()
                .gradient_tier,
            MemoryTier::kHost);
  EXPECT_EQ(error("offload=optimizer:file,gradients:file"),
            "offload: 'gradients:file': gradients wait on the device or the "
            "host");
  EXPECT_EQ(error("offload=parameters:host,gradients:host"),
            "offload: has no effect: needs a step on the host for "
            "gradients:host: optimizer:host or optimizer:file");
  EXPECT_EQ(error("offload=optimizer:file:/a,parameters:file:/b"),
            "offload: names two directories, /a and /b: expected one");
}

TEST(ParseStrategy, StorageAndCommunication) {
  const auto strategy =
      ParseStrategy("zero=3,zero-group=4,bucket=25MB,prefetch=2");
  ASSERT_TRUE(strategy.has_value()) << strategy.error().ToString();
  EXPECT_EQ(strategy->zero_group, 4);
  EXPECT_EQ(strategy->bucket, Bytes{25'000'000});
  EXPECT_EQ(strategy->prefetch, 2);
  EXPECT_EQ(ParseStrategy("zero=1,zero-group=node")->zero_group,
            Strategy::kWithinNode);
  EXPECT_EQ(ParseStrategy("bucket=4096")->bucket, Bytes{4096});
  EXPECT_EQ(ParseStrategy("bucket=3kB")->bucket, Bytes{3000});
  const auto error = [](std::string_view text) {
    const auto bad = ParseStrategy(text);
    return bad ? "none" : bad.error().ToString();
  };
  EXPECT_EQ(error("zero-group=0"),
            "zero-group: is '0': expected a whole number of ranks from 1, or "
            "node");
  EXPECT_EQ(error("bucket=big"),
            "bucket: is 'big': expected a size such as 25MB (B, kB, MB, GB, "
            "KiB, MiB or GiB), or 0 for one bucket for each block");
  EXPECT_EQ(error("bucket=1KB"),
            "bucket: unknown unit 'KB'; did you mean 'kB'? known: B, kB, MB, "
            "GB, TB, KiB, MiB, GiB, TiB");
  EXPECT_EQ(ParseStrategy("tiles=4")->tiles, 4);
  EXPECT_EQ(error("tiles=0"),
            "tiles: is '0': expected a whole number from 1 to 1024");
  EXPECT_EQ(error("prefetch=-1"),
            "prefetch: is '-1': expected a whole number of blocks");
  EXPECT_EQ(error("prefetch=20000000"),
            "prefetch: is '20000000': expected at most 16777216");
  EXPECT_EQ(error("dp=99999999999999999999"),
            "dp: is '99999999999999999999': expected at most 16777216");
}

TEST(ParseStrategy, SizesOfBuckets) {
  EXPECT_EQ(ParseStrategy("bucket=0")->bucket, Bytes{0});
  EXPECT_EQ(ParseStrategy("bucket=1.5MB")->bucket, Bytes{1'500'000});
  EXPECT_EQ(ParseStrategy("bucket=25MiB")->bucket, Bytes{25 << 20});
  for (const std::string size :
       {"1.5B", "-1MB", "50%", "5ms", "2000TB", "MB", ""}) {
    const auto bad = ParseStrategy("bucket=" + size);
    ASSERT_FALSE(bad.has_value()) << size;
    EXPECT_EQ(bad.error().ToString(),
              "bucket: is '" + size +
                  "': expected a size such as 25MB (B, kB, MB, GB, KiB, MiB or "
                  "GiB), or 0 for one bucket for each block");
  }
}

// Each key, with a value that is not its default and what it needs.
TEST(FlagTextOf, EveryKeyIsWrittenAsItIsRead) {
  const std::map<std::string_view, std::string_view> texts = {
      {"tp", "tp=4"},
      {"pp", "pp=2"},
      {"vp", "pp=2,vp=2,schedule=interleaved"},
      {"cp", "cp=2"},
      {"cp-kind", "cp=2,cp-kind=ring"},
      {"cp-balance", "cp=2,cp-balance=zigzag"},
      {"ep", "ep=2"},
      {"etp", "tp=4,etp=2"},
      {"mbs", "mbs=4"},
      {"balance", "mbs=4,balance=speed"},
      {"zero", "zero=1"},
      {"dp-kind", "dp-kind=rooted"},
      {"zero-group", "zero=3,zero-group=node"},
      {"bucket", "bucket=123456789B"},
      {"prefetch", "zero=3,prefetch=2"},
      {"tiles", "tiles=4"},
      {"offload", "offload=optimizer:host,parameters:file,activations:host"},
      {"sp", "tp=2,sp=1"},
      {"branches", "branches=split"},
      {"recompute", "recompute=full:3"},
      {"schedule", "schedule=gpipe"},
      {"order", "order=tp-cp-ep-pp-dp"},
  };
  // An unknown key's error lists all.
  const std::string error = ParseStrategy("no_key=1").error().message;
  std::istringstream keys(error.substr(error.find("known: ") + 7));
  size_t count = 0;
  for (std::string key; std::getline(keys, key, ','); ++count) {
    key.erase(0, key.find_first_not_of(' '));
    if (key == "dp") continue;  // follows the devices
    ASSERT_TRUE(texts.contains(key)) << key;
    const Strategy strategy = *ParseStrategy(texts.at(key));
    const auto flag = FlagTextOf(strategy);
    ASSERT_TRUE(flag.has_value()) << key;
    EXPECT_THAT("," + *flag, HasSubstr("," + std::string(key) + "="));
    EXPECT_EQ(*ParseStrategy(*flag), strategy) << *flag;
  }
  EXPECT_EQ(count, texts.size() + 1);
  EXPECT_EQ(FlagTextOf(*ParseStrategy("")), "");
  EXPECT_EQ(FlagTextOf(*ParseStrategy("dp=2,offload=optimizer:file:/mnt")),
            "offload=optimizer:file");
  Strategy table;
  table.schedule = "table";
  EXPECT_FALSE(FlagTextOf(table).has_value());
}

TEST(PlanFromStrategy, TilesEveryLinearAsFarAsItHasRows) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  // Projections of 8 heads have a row for each, 4 on a rank.
  const auto plan = Make(graph, cluster, "tp=2,tiles=6");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  std::map<std::string, int> tiles;
  for (size_t i = 0; i < plan->ops.size(); ++i) {
    if (plan->ops[i].tiles > 1) tiles[graph.nodes[i].name] = plan->ops[i].tiles;
  }
  EXPECT_EQ(tiles.size(), 4u * 6u);  // the head is tied
  EXPECT_EQ(tiles["h.1.attn.c_attn.q"], 4);
  EXPECT_EQ(tiles["h.1.attn.c_proj"], 6);
  EXPECT_EQ(tiles["h.1.mlp.c_fc"], 6);
  const auto strategy = UniformStrategy(GraphIndex(graph), cluster, *plan);
  ASSERT_TRUE(strategy.has_value());
  EXPECT_EQ(strategy->tiles, 6);
}

TEST(PlanFromStrategy, RootedDataParallelismKeepsLossAndStateAtTheRoot) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  const auto plan = Make(graph, cluster, "tp=2,pp=2,dp-kind=rooted");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  for (const WeightPlacement& weight : plan->weights) {
    EXPECT_EQ(weight.rooted, AxisSet{0b1}) << "dp0";
  }
  for (size_t i = 0; i < plan->ops.size(); ++i) {
    const std::string& name = graph.nodes[i].name;
    const bool at_root = name == "loss" || graph.nodes[i].op->once_per_step;
    EXPECT_EQ(plan->ops[i].rooted, at_root ? AxisSet{0b1} : AxisSet{0}) << name;
  }
  EXPECT_EQ(SplitOf(graph, *plan, "loss"), "v/tp0");
  EXPECT_THAT(StrategyText(GraphIndex(graph), cluster, *plan),
              HasSubstr("dp2 tp2 pp2 mbs1 zero0 sp0 rooted"));
  EXPECT_EQ(Make(graph, cluster, "dp-kind=rooted,zero=1").error().message,
            "dp-kind=rooted keeps all state on the root: expected zero=0, not "
            "zero=1");
  EXPECT_EQ(ParseStrategy("dp-kind=dpp").error().ToString(),
            "dp-kind: unknown dp-kind 'dpp'; did you mean 'ddp'? known: ddp, "
            "rooted");
}

// The zero axes of every weight that is cut, which they share.
AxisSet SharedZeroAxes(const Plan& plan) {
  AxisSet axes = 0;
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.zero_axes == 0) continue;
    EXPECT_TRUE(axes == 0 || axes == weight.zero_axes);
    axes = weight.zero_axes;
  }
  return axes;
}

TEST(PlanFromStrategy, HybridShardingCutsWithinANode) {
  const Graph graph = MlpGraph(2, 16, 4, 8, 16, 32);
  // Two hosts of four GPUs, tensor parallelism inside: dp0 is across hosts.
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2x4");
  const auto within = Make(graph, cluster, "tp=2,zero=3,zero-group=node");
  ASSERT_TRUE(within.has_value()) << within.error().ToString();
  ASSERT_EQ(within->groups[0].axes[0], (MeshAxis{"dp0", 2}));
  EXPECT_EQ(SharedZeroAxes(*within), AxisSet{0b10}) << "dp1";
  const auto two = Make(graph, cluster, "tp=2,zero=3,zero-group=2");
  EXPECT_EQ(*two, *within);
  const auto all = Make(graph, cluster, "tp=2,zero=3");
  EXPECT_EQ(SharedZeroAxes(*all), AxisSet{0b11});
  EXPECT_EQ(*Make(graph, cluster, "tp=2,zero=3,zero-group=4"), *all);
  EXPECT_EQ(Make(graph, cluster, "tp=2,zero=3,zero-group=1").error().message,
            "zero=3 has no effect: zero-group=1 has no other rank");
  EXPECT_EQ(Make(graph, cluster, "tp=2,zero=3,zero-group=3").error().message,
            "zero-group=3: expected a product of prime factors of dp=4 * cp=1");
  EXPECT_THAT(StrategyText(GraphIndex(graph), cluster, *within),
              HasSubstr("zero3 within 2 ranks"));
  EXPECT_THAT(Describe(graph, cluster, *within),
              HasSubstr("cut over 2, each shard on 2 ranks"));
}

// Two elements over two hosts: what axis could cut them lies across.
TEST(PlanFromStrategy, HybridShardingLeavesWholeWhatItCannotCutWithinANode) {
  GraphBuilder builder("biased", 16, 4, DType::kFloat32);
  builder.BeginBlock("head");
  const TensorId x = builder.Input("x", {16, 4, 64}, DType::kFloat32);
  const TensorId labels = builder.Input("labels", {16, 4}, DType::kInt32);
  const TensorId matrix =
      builder.Weight("matrix", {2, 64}, {.stddev = 1}, true);
  const TensorId bias = builder.Weight("bias", {2}, {.stddev = 1}, false);
  const TensorId logits =
      builder.Add1("linear", "head", {x, matrix, bias}, "bsi,vi+v->bsv");
  const Graph graph = testing::FinishWithLoss(builder, logits, labels);
  const GraphIndex index(graph);
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2x4");
  const auto plan = Make(graph, cluster, "zero=3,zero-group=node");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan->weights[0].zero_stage, 3);
  EXPECT_EQ(plan->groups[0].Size(plan->weights[0].zero_axes), 4);
  EXPECT_EQ(plan->weights[1], WeightPlacement());
  const auto strategy = UniformStrategy(index, cluster, *plan);
  ASSERT_TRUE(strategy.has_value());
  EXPECT_EQ(strategy->zero, 3);
  EXPECT_EQ(strategy->zero_group, 4);
  EXPECT_EQ(Make(graph, cluster, "zero=3")->weights[1].zero_stage, 3);
}

TEST(PlanFromStrategy, ExpertsByDerivation) {
  const Graph graph = Model("mixtral-tiny", 8, 64);
  const auto plan =
      Make(graph, *MakeCluster("local-cpu:8"), "tp=2,ep=2,zero=1");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const auto split = [&](const std::string& name) {
    return SplitOf(graph, *plan, "model.layers.1." + name);
  };
  EXPECT_EQ(plan->microbatches, 2);
  // Outside of experts these axes split samples.
  EXPECT_EQ(split("self_attn.q_proj"), "b/dp0*ep0 g/tp0");
  EXPECT_EQ(split("block_sparse_moe.gate"), "b/dp0*ep0");
  EXPECT_EQ(split("block_sparse_moe.routes"), "b/dp0*ep0");
  EXPECT_EQ(split("block_sparse_moe.dispatch"), "b/dp0*ep0");
  EXPECT_EQ(split("block_sparse_moe.experts.w1"), "e/ep0 b/dp0 o/tp0");
  EXPECT_EQ(split("block_sparse_moe.experts.act_fn"), "e/ep0 b/dp0 f/tp0");
  EXPECT_EQ(split("block_sparse_moe.experts.w2"), "e/ep0 b/dp0 i/tp0");
  EXPECT_EQ(split("block_sparse_moe.collect"), "b/dp0*ep0");
  EXPECT_EQ(split("block_sparse_moe.combine"), "b/dp0*ep0");
  // An expert's state is cut over its copies, others' over all replicas.
  const GraphIndex index(graph);
  for (size_t w = 0; w < plan->weights.size(); ++w) {
    const std::string& name = graph.tensor(index.weights[w].tensor).name;
    const bool of_expert = name.find(".experts.") != std::string::npos;
    EXPECT_EQ(plan->groups[0].Size(plan->weights[w].zero_axes),
              of_expert ? 2 : 4)
        << name;
  }
  const auto uniform =
      UniformStrategy(index, *MakeCluster("local-cpu:8"), *plan);
  ASSERT_TRUE(uniform.has_value());
  EXPECT_EQ(ToString(*uniform), "dp2 tp2 pp1 ep2 mbs1 zero1 sp0");
  EXPECT_THAT(Describe(graph, *MakeCluster("local-cpu:8"), *plan),
              HasSubstr("data-parallel 4 (experts split 2 ways), "
                        "tensor-parallel 2"));
}

// Slots are split like a sequence by context parallelism; routing is not.
TEST(PlanFromStrategy, ExpertsWithSplitSequences) {
  const Graph graph = Model("mixtral-tiny", 8, 64);
  const auto plan = Make(graph, *MakeCluster("local-cpu:4"), "cp=2,tp=2,sp=1");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const auto split = [&](const std::string& name) {
    return SplitOf(graph, *plan, "model.layers.1.block_sparse_moe." + name);
  };
  EXPECT_EQ(split("gate"), "s/cp0");
  EXPECT_EQ(split("routes"), "");
  EXPECT_EQ(split("dispatch"), "s/cp0");
  EXPECT_EQ(split("experts.w1"), "s/cp0 o/tp0");
  EXPECT_EQ(split("collect"), "s/cp0");
  EXPECT_EQ(split("combine"), "s/cp0*tp0");
}

TEST(PlanFromStrategy, UlyssesSplitsHeadsInAttentionOnly) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  const auto plan = Make(graph, cluster, "cp=4,tp=2,sp=1,cp-kind=ulysses");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(SplitOf(graph, *plan, "h.1.attn.c_attn.q"), "s/cp0*cp1 g/tp0");
  EXPECT_EQ(SplitOf(graph, *plan, "h.1.attn"), "g/cp0*cp1*tp0");
  EXPECT_EQ(SplitOf(graph, *plan, "h.1.ln_1"), "s/cp0*cp1*tp0");
  const auto uniform = UniformStrategy(GraphIndex(graph), cluster, *plan);
  ASSERT_TRUE(uniform.has_value());
  EXPECT_EQ(ToString(*uniform), "dp1 tp2 pp1 cp4 ulysses mbs1 zero0 sp1");
  EXPECT_THAT(Describe(graph, cluster, *plan),
              HasSubstr("sequence split 4 (context parallel, attention by "
                        "heads), tensor-parallel 2"));
  // Heads alone are no tensor parallelism where the axis splits the sequence.
  Plan named = *plan;
  for (auto& axis : named.groups[0].axes) axis.name = "none";
  NameAxes(GraphIndex(graph), named);
  for (size_t a = 0; a < named.groups[0].axes.size(); ++a) {
    EXPECT_EQ(named.groups[0].axes[a].name, plan->groups[0].axes[a].name);
  }
  // Eight heads.
  const auto too_many =
      Make(graph, *MakeCluster("local-cpu:16"), "cp=16,cp-kind=ulysses");
  ASSERT_FALSE(too_many.has_value());
  EXPECT_EQ(too_many.error().ToString(),
            "tp=1 and cp=16 leave an empty shard: 8 heads cannot be "
            "split over 16 ranks ('h.0.attn')");
}

TEST(PlanFromStrategy, ImagesAreSplitByChannelsAndHeight) {
  const Graph graph = Model("resnet-tiny", 8, 1);
  const Cluster cluster = *MakeCluster("local-cpu:4");
  const auto plan = Make(graph, cluster, "cp=2,tp=2");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const std::string text = Describe(graph, cluster, *plan);
  EXPECT_THAT(text, HasSubstr("height split 2 (context parallel), "
                              "tensor-parallel 2 (convolutions by channels"));
  EXPECT_THAT(text, HasSubstr("tensor-parallel 2 (classes)"));
}

TEST(PlanFromStrategy, ZigzagCutsTheSequenceIntoTwoChunksARank) {
  const auto plan = Make(Model("gpt2-tiny", 8, 64), *MakeCluster("local-cpu:3"),
                         "cp=3,cp-balance=zigzag");
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().ToString(),
            "cp=3,cp-balance=zigzag: the order cuts sequences into 6 chunks: "
            "expected a divisor of the sequence length 64");
}

TEST(PlanFromStrategy, RingStreamsWhatSplitsTheSequence) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  const auto plan =
      Make(graph, cluster, "cp=4,tp=2,cp-kind=ring,cp-balance=zigzag");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(SplitOf(graph, *plan, "h.1.attn"), "s/cp0*cp1 g/tp0");
  EXPECT_EQ(plan->zigzag, 4);
  size_t streaming = 0;
  for (const OpPlacement& op : plan->ops) {
    if (op.streamed == 0) continue;
    ++streaming;
    EXPECT_EQ(op.streamed, 0b11u);  // cp0 and cp1, the outer axes
  }
  EXPECT_EQ(streaming, 4u);  // layers
  const auto uniform = UniformStrategy(GraphIndex(graph), cluster, *plan);
  ASSERT_TRUE(uniform.has_value());
  EXPECT_EQ(ToString(*uniform), "dp1 tp2 pp1 cp4 ring zigzag mbs1 zero0 sp0");
  EXPECT_THAT(Describe(graph, cluster, *plan),
              HasSubstr("sequence split 4 (context parallel, keys and values "
                        "in a ring), tensor-parallel 2"));
  EXPECT_THAT(Describe(graph, cluster, *plan),
              HasSubstr("sequences in the zigzag order of 4 ranks"));
  const auto alone = Make(graph, cluster, "tp=2,cp-balance=zigzag");
  ASSERT_FALSE(alone.has_value());
  EXPECT_EQ(alone.error().ToString(),
            "cp-balance: has no effect: needs cp of at least 2 and "
            "cp-kind=gather or ring");
}

// Tensor ranks have whole experts; the mesh has them outside of ep, so that an
// exchange stays among the ranks of one of them. Rank 0 beside 1 is tp.
TEST(PlanFromStrategy, ExpertsOverTensorRanksByDerivation) {
  const Graph graph = Model("mixtral-tiny", 8, 64);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  const auto plan = Make(graph, cluster, "tp=2,ep=2,etp=1,zero=1,sp=1");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const auto split = [&](const std::string& name) {
    return SplitOf(graph, *plan, "model.layers.1." + name);
  };
  const std::string moe = "block_sparse_moe.";
  EXPECT_EQ(split("self_attn.q_proj"), "b/dp0*ep0 g/tpe0");
  EXPECT_EQ(split(moe + "dispatch"), "b/dp0*ep0 e/tpe0");
  EXPECT_EQ(split(moe + "experts.w1"), "e/tpe0*ep0 b/dp0");
  EXPECT_EQ(split(moe + "experts.act_fn"), "e/tpe0*ep0 b/dp0");
  EXPECT_EQ(split(moe + "experts.w2"), "e/tpe0*ep0 b/dp0");
  EXPECT_EQ(split(moe + "collect"), "e/tpe0 b/dp0*ep0");
  EXPECT_EQ(split(moe + "combine"), "b/dp0*ep0 s/tpe0");
  std::vector<int64_t> devices;
  for (const DeviceId id : plan->groups[0].devices) {
    devices.push_back(static_cast<int64_t>(id.index()));
  }
  // By dp, tp, ep.
  EXPECT_THAT(devices, ElementsAre(0, 2, 1, 3, 4, 6, 5, 7));
  const auto read = UniformStrategy(GraphIndex(graph), cluster, *plan);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(ToString(*read), "dp2 tp2 pp1 ep2 etp1 mbs1 zero1 sp1");
  EXPECT_THAT(Describe(graph, cluster, *plan),
              HasSubstr("(experts split 4 ways)"));

  const auto error = [&](const Graph& of, const char* text) {
    const auto made = Make(of, cluster, text);
    return made ? "" : made.error().ToString();
  };
  EXPECT_EQ(error(graph, "tp=4,etp=3"), "etp=3: expected a divisor of tp=4");
  EXPECT_EQ(error(graph, "etp=2"),
            "etp: has no effect: needs tp of at least 2");
  EXPECT_EQ(error(Model("gpt2-tiny", 8, 64), "tp=2,etp=1"),
            "etp=1 has no effect: gpt2-tiny has no experts");
}

TEST(PlanFromStrategy, ExpertParallelismNeedsExperts) {
  const auto dense =
      Make(Model("gpt2-tiny", 8, 64), *MakeCluster("local-cpu:2"), "ep=2");
  ASSERT_FALSE(dense.has_value());
  EXPECT_EQ(dense.error().ToString(),
            "ep=2: expected 1, gpt2-tiny has no experts");
  const auto too_many =
      Make(Model("mixtral-tiny", 8, 64), *MakeCluster("local-cpu:8"), "ep=8");
  ASSERT_FALSE(too_many.has_value());
  EXPECT_THAT(too_many.error().ToString(), HasSubstr("an empty shard"));
}

// Gemma 2's scores are products of two activations, which share samples and
// heads; with the matrices that a router gathered for each token they share
// tokens. Neither are experts.
TEST(PlanFromStrategy, ProductsOfActivationsAreNoExperts) {
  const auto error = [](const Graph& graph) {
    const auto plan = Make(graph, *MakeCluster("local-cpu:8"), "ep=2");
    return plan ? "" : plan.error().ToString();
  };
  EXPECT_EQ(error(Model("gemma-2-2b", 8, 64)),
            "ep=2: expected 1, gemma-2-2b has no experts");
  ImportOptions options;
  options.global_batch = 8;
  options.seq_len = 16;
  const auto gathered = ImportModel(TestdataPath("onnx/mixtral.onnx"), options);
  ASSERT_TRUE(gathered.has_value()) << gathered.error().ToString();
  EXPECT_EQ(error(*Differentiate(*gathered)),
            "ep=2: expected 1, mixtral has no experts");
}

// All experts compute all tokens. The second layer's result has the experts'
// dimension; the sum over it, weighed by the gates, is of two activations and
// splits samples as all else does.
TEST(PlanFromStrategy, ExpertsOfAFileHaveTheirMatrices) {
  ImportOptions options;
  options.global_batch = 8;
  options.seq_len = 16;
  const auto imported = ImportModel(TestdataPath("onnx/routed.onnx"), options);
  ASSERT_TRUE(imported.has_value()) << imported.error().ToString();
  const Graph graph = *Differentiate(*imported);
  const auto plan = Make(graph, *MakeCluster("local-cpu:8"), "ep=2");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(SplitOf(graph, *plan, "node_einsum"), "b/dp0*dp1*ep0");
  EXPECT_EQ(SplitOf(graph, *plan, "node_einsum_1"), "b/dp0*dp1 f/ep0");
  EXPECT_EQ(SplitOf(graph, *plan, "node_einsum_2"), "b/dp0*dp1*ep0");
}

TEST(PlanFromStrategy, MegatronOnGpt2ByDerivation) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const auto plan = Make(graph, *MakeCluster("local-cpu:8"), "tp=4");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const auto split = [&](std::string_view name) {
    return SplitOf(graph, *plan, name);
  };
  EXPECT_EQ(split("wte"), "b/dp0 v/tp0*tp1");
  EXPECT_EQ(split("wpe"), "b/dp0");  // as many rows, but not the vocabulary
  EXPECT_EQ(split("drop"), "b/dp0");
  EXPECT_EQ(split("h.2.ln_1"), "b/dp0");
  // Column parallel by heads.
  for (const char* name : {"h.2.attn.c_attn.q", "h.2.attn.c_attn.k",
                           "h.2.attn.c_attn.v", "h.2.attn"}) {
    EXPECT_EQ(split(name), "b/dp0 g/tp0*tp1") << name;
  }
  // Row parallel: the heads are reduced.
  EXPECT_EQ(split("h.2.attn.c_proj"), "b/dp0 g/tp0*tp1");
  EXPECT_EQ(split("h.2.attn.add"), "b/dp0");
  EXPECT_EQ(split("h.2.mlp.c_fc"), "b/dp0 f/tp0*tp1");
  EXPECT_EQ(split("h.2.mlp.act"), "b/dp0 f/tp0*tp1");
  EXPECT_EQ(split("h.2.mlp.c_proj"), "b/dp0 f/tp0*tp1");
  EXPECT_EQ(split("lm_head"), "b/dp0 v/tp0*tp1");
  EXPECT_EQ(split("loss"), "b/dp0 v/tp0*tp1");
  // Row-parallel results are partial sums, column-parallel ones sharded.
  for (size_t i = 0; i < plan->ops.size(); ++i) {
    const Layout layout =
        ResultLayout(graph, graph.nodes[i], plan->ops[i],
                     plan->groups[plan->ops[i].group.index()], 0);
    const bool row =
        graph.nodes[i].name.ends_with("c_proj") || graph.nodes[i].name == "wte";
    EXPECT_EQ(layout.partial & 6u, row ? 6u : 0u) << graph.nodes[i].name;
  }
  EXPECT_EQ(plan->microbatches, 4);  // 8 samples / (1 * dp 2)
}

TEST(PlanFromStrategy, SequenceParallelSplitsTheResidualStream) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const auto plan = Make(graph, *MakeCluster("local-cpu:4"), "tp=4,sp=1");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  for (const char* name :
       {"wpe", "embed.add", "drop", "h.0.ln_1", "h.0.attn.resid_dropout",
        "h.0.attn.add", "h.0.ln_2", "h.0.mlp.add", "ln_f"}) {
    EXPECT_EQ(SplitOf(graph, *plan, name), "s/tp0*tp1") << name;
  }
  EXPECT_EQ(SplitOf(graph, *plan, "wte"), "v/tp0*tp1");
  EXPECT_EQ(SplitOf(graph, *plan, "h.0.mlp.act"), "f/tp0*tp1");
  EXPECT_EQ(SplitOf(graph, *plan, "h.0.attn.c_proj"), "g/tp0*tp1");
}

TEST(PlanFromStrategy, GroupedQueryHeads) {
  const Graph graph = Model("llama-3-8b", 64, 256);
  // 8 key/value heads of 4 queries on 16 ranks: 8 by 2.
  const auto plan = Make(graph, *MakeCluster("dgx-h100:2"), "tp=16");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const std::string layer = "model.layers.3.";
  const auto split = [&](std::string_view name) {
    return SplitOf(graph, *plan, layer + std::string(name));
  };
  EXPECT_EQ(split("self_attn.q_proj"), "g/tp0*tp1*tp2 r/tp3");
  EXPECT_EQ(split("self_attn.k_proj"), "g/tp0*tp1*tp2");  // on both
  EXPECT_EQ(split("self_attn.rotary_k"), "g/tp0*tp1*tp2");
  EXPECT_EQ(split("self_attn"), "g/tp0*tp1*tp2 r/tp3");
  EXPECT_EQ(split("self_attn.o_proj"), "g/tp0*tp1*tp2 r/tp3");
  EXPECT_EQ(split("mlp.gate_proj"), "f/tp0*tp1*tp2*tp3");
  EXPECT_EQ(split("mlp.product"), "f/tp0*tp1*tp2*tp3");
  EXPECT_EQ(split("mlp.down_proj"), "f/tp0*tp1*tp2*tp3");
  EXPECT_EQ(split("input_layernorm"), "");
  // 32 query heads do not go on 64 ranks.
  const auto too_many = Make(graph, *MakeCluster("dgx-h100:8"), "tp=64");
  ASSERT_FALSE(too_many.has_value());
  EXPECT_THAT(too_many.error().message,
              HasSubstr("an empty shard: 32 heads cannot be split over 64 "
                        "ranks"));
}

TEST(PlanFromStrategy, ContextParallelSplitsEverySequence) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const auto plan = Make(graph, *MakeCluster("local-cpu:4"), "cp=2,tp=2,sp=1");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(SplitOf(graph, *plan, "h.0.attn"), "s/cp0 g/tp0");
  EXPECT_EQ(SplitOf(graph, *plan, "h.0.mlp.c_fc"), "s/cp0 f/tp0");
  EXPECT_EQ(SplitOf(graph, *plan, "h.0.ln_1"), "s/cp0*tp0");
  EXPECT_EQ(SplitOf(graph, *plan, "count"), "s/cp0");
}

TEST(PlanFromStrategy, ZeroCutsOverDataAndContextAxes) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const auto plan =
      Make(graph, *MakeCluster("local-cpu:8"), "dp=2,cp=2,tp=2,sp=1,zero=1");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  ASSERT_EQ(plan->groups[0].axes.size(), 3u);  // dp0, cp0, tp0
  for (const WeightPlacement& weight : plan->weights) {
    EXPECT_EQ(weight.zero_stage, 1);
    EXPECT_EQ(weight.zero_axes, 3u);
  }
}

TEST(PlanFromStrategy, RanksFollowTheOrder) {
  const Graph graph = MlpGraph(2, 8, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  const auto ranks = [&](std::string_view text) {
    const auto plan = Make(graph, cluster, text);
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    std::vector<std::vector<int>> result;
    for (const DeviceGroup& group : plan->groups) {
      result.emplace_back();
      for (DeviceId device : group.devices) {
        result.back().push_back(device.value);
      }
    }
    return result;
  };
  // tp innermost, then dp, then pp; the mesh is (dp, tp).
  EXPECT_THAT(ranks("tp=2,pp=2"),
              ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
  // dp innermost: the mesh is (tp, dp).
  EXPECT_THAT(ranks("tp=2,pp=2,order=dp-tp-cp-ep-pp"),
              ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
  // pp innermost: stages on even and odd ranks.
  EXPECT_THAT(ranks("tp=2,pp=2,order=pp-tp-cp-ep-dp"),
              ElementsAre(ElementsAre(0, 2, 4, 6), ElementsAre(1, 3, 5, 7)));
  const auto plan = Make(graph, cluster, "tp=2,pp=2,order=dp-tp-cp-ep-pp");
  EXPECT_EQ(plan->groups[0].axes[0].name, "tp0");
  EXPECT_EQ(plan->groups[0].axes[1].name, "dp0");
}

TEST(PlanFromStrategy, StagesHoldEqualNumbersOfLayers) {
  const Graph twelve = MlpGraph(12, 8, 4, 8, 16, 32);
  // embed goes with the first stage, head with the last: blocks 0, 1+4, 1+8.
  EXPECT_THAT(StageStarts(GraphIndex(twelve), 3), ElementsAre(0, 5, 9));
  // Of 13 layers the extra one goes to the stage between the ends.
  const Graph thirteen = MlpGraph(13, 8, 4, 8, 16, 32);
  EXPECT_THAT(StageStarts(GraphIndex(thirteen), 3), ElementsAre(0, 5, 10));
  // More stages than layers: every block is one.
  const Graph two = MlpGraph(2, 8, 4, 8, 16, 32);
  EXPECT_THAT(StageStarts(GraphIndex(two), 4), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(StageStarts(GraphIndex(two), 1), ElementsAre(0));
}

// Against all ways to cut: the largest work over speed is the least.
TEST(PlanFromStrategy, StagesTakeLayersByTheirSpeed) {
  const GraphIndex index(MlpGraph(7, 8, 4, 8, 16, 32));
  const auto blocks = static_cast<int>(index.block_flops.size());
  const auto slowest = [&](const std::vector<int>& starts,
                           std::span<const double> speeds) {
    double most = 0;
    for (size_t p = 0; p < starts.size(); ++p) {
      const int end = p + 1 < starts.size() ? starts[p + 1] : blocks;
      double work = 0;
      for (int b = starts[p]; b < end; ++b) {
        work += index.block_flops[static_cast<size_t>(b)];
      }
      most = std::max(most, work / speeds[p]);
    }
    return most;
  };
  const double speeds[][3] = {
      {1, 1, 1}, {3, 1, 1}, {1, 2.5, 1}, {1, 1, 9}, {5, 1, 2}};
  for (const auto& of : speeds) {
    double best = std::numeric_limits<double>::infinity();
    for (int second = 1; second < blocks - 1; ++second) {
      for (int third = second + 1; third < blocks; ++third) {
        best = std::min(best, slowest({0, second, third}, of));
      }
    }
    EXPECT_DOUBLE_EQ(slowest(StageStarts(index, of), of), best);
  }
}

// All of the work in one block, on the slowest: the whole divided by a speed
// and multiplied by it may be less than the whole.
TEST(PlanFromStrategy, OneBlockMayHaveAllWork) {
  GraphIndex index(MlpGraph(7, 8, 4, 8, 16, 32));
  std::ranges::fill(index.block_flops, 0);
  index.block_flops.back() = 1e15 / 3;
  for (int i = 1; i < 1000; ++i) {
    const std::vector<double> speeds = {1e12, 1e9 * i};
    EXPECT_EQ(StageStarts(index, speeds).size(), 2u);
  }
}

// What a strategy's plan is called: a strategy that gives the same plan.
TEST(UniformStrategy, IsFoundOfEveryUniformPlan) {
  Rng rng(1);
  const auto pick = [&](std::initializer_list<const char*> of) {
    return std::string(of.begin()[rng.Below(static_cast<uint32_t>(of.size()))]);
  };
  for (const char* model : {"gpt2-tiny", "mixtral-tiny", "bert-tiny",
                            "deepseek-tiny", "t5-tiny", "vit-tiny"}) {
    ImportOptions options;
    options.global_batch = 48;
    if (model != std::string("vit-tiny")) options.seq_len = 32;
    const Graph graph =
        Differentiate(
            ImportModel(ExamplePath(std::string("models/") + model), options)
                .value())
            .value();
    const GraphIndex index(graph);
    int plans = 0;
    for (int i = 0; i < 150; ++i) {
      const Cluster cluster =
          MakeCluster(pick({"dgx-a100-80gb:1", "local-cpu:6", "local-cpu:12"}))
              .value();
      const std::string text =
          "tp=" + pick({"1", "1", "2", "3"}) + ",pp=" + pick({"1", "2", "4"}) +
          ",cp=" + pick({"1", "1", "2"}) + ",ep=" + pick({"1", "1", "2"}) +
          ",mbs=" + pick({"1", "2"}) +
          pick({"", ",sp=1", ",cp-kind=ring", ",cp-kind=ulysses"}) +
          pick({"", ",zero=1", ",zero=3", ",dp-kind=rooted"}) +
          pick({"", ",recompute=selective", ",recompute=full",
                ",recompute=selective:1", ",recompute=full:2"}) +
          pick({"", ",tiles=2", ",order=tp-cp-ep-pp-dp"});
      const auto strategy = ParseStrategy(text);
      if (!strategy) continue;
      const auto plan = PlanFromStrategy(index, cluster, *strategy);
      if (!plan) continue;
      ++plans;
      const auto found = UniformStrategy(index, cluster, *plan);
      ASSERT_TRUE(found.has_value()) << model << " " << text;
      auto again = PlanFromStrategy(index, cluster, *found);
      ASSERT_TRUE(again.has_value()) << model << " " << text;
      EXPECT_TRUE(ChangesBetween(index, cluster, *plan, *again).empty())
          << model << " " << text;
    }
    EXPECT_GE(plans, 10) << model;
  }
}

TEST(Describe, NamesDevicesAndNodes) {
  const Graph graph = Model("gpt2-tiny", 64, 64);
  const auto text = [&](const char* on, const char* strategy) {
    const Cluster cluster = MakeCluster(on).value();
    return Describe(
        graph, cluster,
        PlanFromStrategy(graph, cluster, *ParseStrategy(strategy)).value());
  };
  EXPECT_THAT(text("local-cpu:4", "pp=2,dp=2,order=pp-tp-cp-ep-dp"),
              HasSubstr("on devices 0, 2:\n"));
  EXPECT_THAT(text("local-cpu:8", "pp=2,dp=4,order=pp-tp-cp-ep-dp"),
              HasSubstr("devices 0, 2, 4, … (4)"));
  EXPECT_THAT(text("dgx-h100:4x2", "pp=2,tp=2,dp=2,order=tp-pp-cp-ep-dp"),
              AllOf(HasSubstr("devices 0, 1, 4, … (4) of nodes 0, 2"),
                    HasSubstr("devices 2, 3, 6, … (4) of nodes 1, 3")));
  EXPECT_THAT(text("dgx-h100:4x2", "pp=2,tp=2,dp=2"),
              HasSubstr("devices 0-3 of nodes 0-1"));
}

TEST(PlanFromStrategy, SharesOfSamplesFollowSpeeds) {
  // 4 : 1 of 20 samples; 7 parts by 3 : 2 : 2; nobody goes without.
  EXPECT_THAT(SharesBySpeed(20, std::vector<double>{4, 1}), ElementsAre(16, 4));
  EXPECT_THAT(SharesBySpeed(7, std::vector<double>{3, 2, 2}),
              ElementsAre(3, 2, 2));
  EXPECT_THAT(SharesBySpeed(3, std::vector<double>{100, 1, 1}),
              ElementsAre(1, 1, 1));
}

TEST(PlanFromStrategy, UnlikeDevicesGetWorkByTheirSpeed) {
  // 32 samples of a microbatch and pair of ranks that are 312 and 125 TFLOP/s
  // at the same efficiency or nearly so: 23 and 9.
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:1x2+dgx1-v100-32gb:1x2");
  Graph graph = Model("gpt2-tiny", 64, 64);
  graph.dtype = DType::kFloat16;
  const GraphIndex index(graph);
  const auto make = [&](std::string_view text) {
    return PlanFromStrategy(index, cluster, *ParseStrategy(text)).value();
  };
  const Plan plan = make("mbs=16,balance=speed");
  const double fast = SpeedOf(cluster, DeviceId(0), DType::kFloat16);
  const double slow = SpeedOf(cluster, DeviceId(2), DType::kFloat16);
  Cluster straggling = cluster;
  straggling.device_types[0].slowness = 2;
  EXPECT_DOUBLE_EQ(SpeedOf(straggling, DeviceId(0), DType::kFloat16), fast / 2);
  int best = 1;
  const auto longest = [&](int share) {
    return std::max(share / fast, (32 - share) / slow);
  };
  for (int share = 2; share < 32; ++share) {
    if (longest(share) < longest(best)) best = share;
  }
  ASSERT_EQ(plan.groups[0].axes.size(), 2u);
  ASSERT_EQ(plan.groups[0].axes[0].shares.size(), 2u);
  const auto& shares = plan.groups[0].axes[0].shares;
  EXPECT_EQ(shares[0] * (32 - best), shares[1] * best);
  EXPECT_TRUE(plan.groups[0].axes[1].shares.empty());  // alike
  EXPECT_EQ(ToString(*UniformStrategy(index, cluster, plan)),
            "dp4 tp1 pp1 mbs16 zero0 sp0 by speed");
  EXPECT_THAT(Describe(graph, cluster, plan),
              HasSubstr("of each microbatch " + std::to_string(best) +
                        " samples on each of devices 0-1 of node 0, " +
                        std::to_string(32 - best) +
                        " samples on each of devices 2-3 of node 1"));
  // Stages of unlike devices have unequal numbers of layers, and samples as
  // before.
  const Plan stages = make("dp=2,pp=2,mbs=4,balance=speed");
  int of_first = 0;
  for (const OpPlacement& op : stages.ops) of_first += op.group == GroupId(0);
  EXPECT_GT(of_first, std::ssize(stages.ops) / 2);
  EXPECT_FALSE(stages.groups[0].IsUneven(stages.groups[0].all_axes()));
  EXPECT_EQ(UniformStrategy(index, cluster, stages)->by_speed, true);
  // One sample of each replica cannot be shared.
  EXPECT_EQ(make("mbs=1,balance=speed").groups, make("mbs=1").groups);
  const auto alike = PlanFromStrategy(index, *MakeCluster("dgx-a100-80gb:1x2"),
                                      *ParseStrategy("mbs=1,balance=speed"));
  ASSERT_FALSE(alike.has_value());
  EXPECT_THAT(alike.error().ToString(),
              HasSubstr("balance=speed has no effect: all devices of "
                        "dgx-a100-80gb:1x2 are alike"));
}

TEST(PlanFromStrategy, ChunksAreDealtInTurns) {
  const Graph graph = MlpGraph(6, 8, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:2");
  const auto plan =
      Make(graph, cluster, "pp=2,vp=2,schedule=interleaved,mbs=2");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  // Eight blocks: embed with a layer, two, two, one with the head: what does
  // not divide goes to the last positions without a head.
  std::vector<int> positions;
  for (const auto& nodes : GraphIndex(graph).nodes_of_block) {
    const OpPlacement& op = plan->ops[nodes[0].index()];
    positions.push_back(op.chunk * 2 + op.group.value);
  }
  EXPECT_THAT(positions, ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
  EXPECT_EQ(StrategyText(GraphIndex(graph), cluster, *plan),
            "dp1 tp1 pp2 mbs2 zero0 sp0 vp2 interleaved");
  EXPECT_THAT(Describe(graph, cluster, *plan),
              HasSubstr("  chunk 1, h.5: not split\n"));
  EXPECT_EQ(Make(graph, cluster, "vp=2,pp=2,mbs=2")->schedule, "interleaved");
  EXPECT_EQ(Make(graph, cluster, "pp=2,vp=2,schedule=1f1b").error().message,
            "1f1b runs one chunk a stage, not 2 (vp); interleaved runs "
            "several");
  EXPECT_THAT(
      Make(graph, cluster, "pp=2,vp=5,schedule=interleaved").error().message,
      HasSubstr("pp=2 * vp=5 = 10: expected at most 8"));
}

TEST(PlanFromStrategy, AScheduleFromAFile) {
  const Graph graph = MlpGraph(2, 4, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:2");
  const std::string path = TempPath("schedule");
  std::ofstream(path) << "F0 F1 B0 B1\nF0 B0 F1 I1 W1\n";
  const auto plan = Make(graph, cluster, "pp=2,mbs=2,schedule=" + path);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(plan->schedule, "table");
  EXPECT_EQ(plan->actions[1][3], (Action{ActionKind::kBackwardInput, 0, 1}));
  const auto strategy = UniformStrategy(GraphIndex(graph), cluster, *plan);
  ASSERT_TRUE(strategy.has_value());
  EXPECT_EQ(strategy->actions, plan->actions);
  EXPECT_EQ(Make(graph, cluster, "pp=2,mbs=1,schedule=" + path).error().message,
            "the schedule's table has pp=2, vp=1 and 2 microbatches; the "
            "strategy has pp=2, vp=1 and 4");
  std::ofstream(path) << "F0 F1 B0 B1\nF0 B0 X1\n";
  EXPECT_THAT(ParseStrategy("pp=2,schedule=" + path).error().ToString(),
              HasSubstr("schedule: " + path + ": line 2: 'X1' is no action"));
  std::remove(path.c_str());
  EXPECT_THAT(ParseStrategy("schedule=table").error().ToString(),
              HasSubstr("schedule: unknown schedule 'table'"));
  EXPECT_THAT(ParseStrategy("schedule=1f2b").error().ToString(),
              HasSubstr("or the path of a file with a table of actions"));
  // Longer than a file's name may be.
  EXPECT_THAT(
      ParseStrategy("schedule=" + std::string(300, 'f')).error().ToString(),
      HasSubstr("or the path of a file with a table of actions"));
}

TEST(PlanFromStrategy, ErrorsNameTheFigures) {
  const Graph graph = MlpGraph(2, 12, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  const auto error = [&](std::string_view text) {
    const auto plan = Make(graph, cluster, text);
    return plan ? "none" : plan.error().ToString();
  };
  EXPECT_THAT(error("tp=3"), HasSubstr("= 3 does not divide the 8 devices of "
                                       "local-cpu:8"));
  EXPECT_THAT(error("dp=2,tp=2"), HasSubstr("= 4: expected the 8 devices"));
  // Of 2^64 and more, which no number holds.
  EXPECT_EQ(error("tp=16777216,pp=16777216,cp=65536"),
            "tp=16777216 * pp=16777216 * cp=65536 * ep=1 does not divide the 8 "
            "devices of local-cpu:8");
  EXPECT_EQ(error("dp=65536,tp=16777216,pp=16777216"),
            "dp=65536 * tp=16777216 * pp=16777216 * cp=1 * ep=1: expected the "
            "8 devices of local-cpu:8");
  EXPECT_THAT(error("dp=8"),
              HasSubstr("mbs=1 * dp=8 = 8: expected a divisor of the global "
                        "batch 12"));
  EXPECT_THAT(error("pp=8"), HasSubstr("pp=8: expected at most 4, the number "
                                       "of blocks of mlp"));
  EXPECT_THAT(error("tp=8,sp=1"), HasSubstr("an empty shard"));  // 4 tokens
}

// Samples that are no sequences: all of a replica are one microbatch.
TEST(PlanFromStrategy, SamplesOfAMicrobatchByDefault) {
  const Graph graph = Model("resnet-tiny", 16, 0);
  const auto microbatches = [&](int ranks, std::string_view text) {
    const auto plan =
        Make(graph, *MakeCluster("local-cpu:" + std::to_string(ranks)), text);
    return plan ? plan->microbatches : 0;
  };
  EXPECT_EQ(microbatches(4, ""), 1);
  EXPECT_EQ(microbatches(4, "pp=2"), 1);
  EXPECT_EQ(microbatches(4, "pp=2,mbs=2"), 4);
  EXPECT_EQ(microbatches(4, "mbs=1"), 4);
  const Graph text = Model("gpt2-tiny", 16, 64);
  EXPECT_EQ(Make(text, *MakeCluster("local-cpu:4"), "")->microbatches, 4);
}

TEST(PlanFromStrategy, WhatAModelLacksIsNotSplit) {
  const Cluster cluster = *MakeCluster("local-cpu:2");
  const auto error = [&](const Graph& graph, std::string_view text) {
    const auto plan = Make(graph, cluster, text);
    return plan ? "none" : plan.error().ToString();
  };
  const Graph clicks = Model("dlrm-tiny", 8, 0);
  EXPECT_THAT(error(clicks, "cp=2"),
              HasSubstr("cp=2 has no effect: dlrm-tiny has no sequence to "
                        "split"));
  EXPECT_THAT(error(clicks, "tp=2,sp=1"), HasSubstr("sp=1 has no effect"));
  const Graph images = Model("resnet-tiny", 8, 0);
  EXPECT_EQ(error(images, "cp=2"), "none");
  EXPECT_THAT(error(images, "cp=2,cp-kind=ulysses"),
              HasSubstr("cp-kind=ulysses has no effect: resnet-tiny has no "
                        "operator 'attention'"));
}

TEST(UniformStrategy, ReadsBackWhatThePlanWasMadeFrom) {
  const Graph graph = Model("gpt2-tiny", 16, 64);
  const GraphIndex index(graph);
  const Cluster cluster = *MakeCluster("local-cpu:8");
  for (const char* text :
       {"", "tp=2", "tp=2,sp=1,zero=1", "tp=4,pp=2,mbs=2,schedule=gpipe",
        "cp=2,tp=2", "pp=4,zero=1", "tp=2,order=dp-tp-cp-ep-pp",
        "tp=2,pp=2,order=pp-tp-cp-ep-dp", "tp=2,pp=2,order=tp-cp-ep-pp-dp",
        "recompute=selective", "tp=2,recompute=full", "recompute=full:3",
        "offload=optimizer:host", "dp=8,zero=3,offload=parameters:file",
        "tp=2,offload=optimizer:file,parameters:host,activations:host"}) {
    const auto plan = PlanFromStrategy(index, cluster, *ParseStrategy(text));
    ASSERT_TRUE(plan.has_value()) << text;
    const auto read = UniformStrategy(index, cluster, *plan);
    ASSERT_TRUE(read.has_value()) << text;
    EXPECT_EQ(*PlanFromStrategy(index, cluster, *read), *plan) << text;
  }
  Plan custom = *PlanFromStrategy(index, cluster, *ParseStrategy("tp=2"));
  custom.ops[5].axes = {};
  EXPECT_FALSE(UniformStrategy(index, cluster, custom).has_value());
  EXPECT_EQ(StrategyText(index, cluster, custom),
            "custom (1 stage on 8 devices)");
}

// Groups of samples are normed together, so no share of them is unequal: what
// the speeds of the hosts would give in one order of ranks is no plan, but in
// the one of this plan replicas are alike.
TEST(UniformStrategy, IsFoundBehindOrdersThatGiveNoPlan) {
  ImportOptions options;
  options.global_batch = 256;
  JsonValue groups;
  groups.kind = JsonValue::Kind::kNumber;
  groups.number = 4;
  options.overrides["batch_norm_groups"] = groups;
  const Graph graph =
      *Differentiate(*ImportModel(ExamplePath("models/resnet-tiny"), options));
  const GraphIndex index(graph);
  const Cluster cluster = *MakeCluster("dgx-h100:1+dgx-a100-80gb:1");
  const std::string_view text =
      "tp=2,zero=1,zero-group=2,mbs=8,order=dp-tp-cp-ep-pp";
  const auto plan = PlanFromStrategy(index, cluster, *ParseStrategy(text));
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_FALSE(PlanFromStrategy(
      index, cluster,
      *ParseStrategy("tp=2,zero=1,zero-group=2,mbs=8,balance=speed")));
  const auto found = UniformStrategy(index, cluster, *plan);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(*PlanFromStrategy(index, cluster, *found), *plan);
}

TEST(RolesOf, ReadsTheRolesThatABlockWasPlacedBy) {
  const Graph graph = MlpGraph(1, 8, 8, 8, 16, 32);
  const GraphIndex index(graph);
  Plan plan = *PlanFromStrategy(index, *MakeCluster("local-cpu:8"),
                                *ParseStrategy("tp=2,cp=2,sp=1"));
  const auto roles = RolesOf(index, plan, 1);
  ASSERT_TRUE(roles.has_value());
  EXPECT_EQ(
      *roles,
      (AxisRoles{.data = 1, .context = 2, .tensor = 4, .sequence = true}));
  plan.ops[index.nodes_of_block[1][2].index()].axes = {};
  EXPECT_FALSE(RolesOf(index, plan, 1).has_value());
}

TEST(Describe, SaysWhichLayersAreSplitHow) {
  const Graph graph = Model("gpt2-tiny", 16, 64);
  const Cluster cluster = *MakeCluster("dgx-a100-80gb:2x4");
  const auto plan = Make(graph, cluster, "tp=2,pp=2,zero=1,sp=1,mbs=2");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ(
      Describe(graph, cluster, *plan),
      "dp2 tp2 pp2 mbs2 zero1 sp1 1f1b\n"
      "stage 0 on devices 0-3 of node 0:\n"
      "  embed: data-parallel 2, tensor-parallel 2 (vocabulary), the rest "
      "split by sequence\n"
      "  h.0 … h.1 (2): data-parallel 2, tensor-parallel 2 (attention by "
      "heads, dense layers by columns, then rows), the rest split by "
      "sequence\n"
      "stage 1 on devices 4-7 of node 1:\n"
      "  h.2 … h.3 (2): data-parallel 2, tensor-parallel 2 (attention by "
      "heads, dense layers by columns, then rows), the rest split by "
      "sequence\n"
      "  head: data-parallel 2, tensor-parallel 2 (vocabulary), the rest "
      "split by sequence\n"
      "ZeRO-1: optimizer state cut over 2\n"
      "1f1b, 4 microbatches of 4 samples (2 per replica)\n");
}

// Ten stages of a layer each, the first and the last with one more block.
TEST(Describe, TellsEqualStagesTogether) {
  const Graph graph = MlpGraph(10, 10, 8, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:20");
  const auto plan = Make(graph, cluster, "pp=10,dp=2,bucket=25MB");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const std::string text = Describe(graph, cluster, *plan);
  EXPECT_THAT(text, HasSubstr("stage 0 on devices 0-1:\n"));
  EXPECT_THAT(text,
              HasSubstr("stages 1 … 8 alike (devices 2-3 … devices 16-17):\n"
                        "  1 block each, h.1 … h.8: data-parallel 2\n"
                        "stage 9 on devices 18-19:\n"));
  EXPECT_THAT(text, HasSubstr("gradients reduced in buckets of 25 MB\n"));
}

TEST(Describe, SaysWhatIsComputedAgain) {
  const Graph graph = Model("gpt2-tiny", 16, 64);
  const Cluster cluster = *MakeCluster("local-cpu:2");
  const auto plan = Make(graph, cluster, "recompute=full:3");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const std::string text = Describe(graph, cluster, *plan);
  EXPECT_THAT(text, HasSubstr("zero0 sp0 recompute full:3\n"));
  EXPECT_THAT(text, HasSubstr("h.0 … h.2 (3): data-parallel 2, recompute "
                              "full\n  h.3: data-parallel 2\n"));
  EXPECT_EQ(Make(graph, cluster, "recompute=full:5").error().ToString(),
            "recompute=full:5: expected at most 4, the number of "
            "layers of gpt2-tiny");
}

TEST(Describe, SaysWhereGradientsWait) {
  const Graph graph = Model("gpt2-tiny", 8, 64);
  const Cluster cluster = *MakeCluster("local-cpu:2");
  const auto plan =
      Make(graph, cluster, "dp=2,offload=optimizer:file,gradients:host");
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_THAT(
      Describe(graph, cluster, *plan),
      AllOf(HasSubstr("optimizer state and its step on the file tier\n"),
            HasSubstr("gradients added up on the host\n")));
  const auto strategy = UniformStrategy(GraphIndex(graph), cluster, *plan);
  ASSERT_TRUE(strategy.has_value());
  EXPECT_EQ(strategy->gradient_tier, MemoryTier::kHost);
  EXPECT_THAT(ToString(*strategy), HasSubstr("optimizer:file,gradients:host"));
}

TEST(Describe, ListsTheSplitsOfABlockWithoutRoles) {
  const Graph graph = MlpGraph(2, 8, 4, 8, 16, 32);
  const Cluster cluster = *MakeCluster("local-cpu:4");
  Plan plan = *Make(graph, cluster, "tp=2");
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (graph.nodes[i].name == "h.1.act") plan.ops[i].axes = {};
  }
  EXPECT_THAT(Describe(graph, cluster, plan),
              HasSubstr("h.1: b/2: norm, add; b/2 f/2: up, down; whole: act"));
}

}  // namespace
}  // namespace tessera
