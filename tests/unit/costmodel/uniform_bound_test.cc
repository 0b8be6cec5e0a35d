// The bound of a uniform strategy against its score, and what a sweep makes of
// it against pricing every strategy.

#include "costmodel/evaluate/uniform_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "costmodel/evaluate/block_sample.h"
#include "costmodel/evaluate/evaluator.h"
#include "costmodel/link/router.h"
#include "costmodel/whatif/degrade.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/ir/short_graph.h"
#include "planner/plan/validate.h"
#include "planner/plan/work_shares.h"
#include "planner/search/sweep.h"
#include "planner/search/uniform_strategies.h"
#include "planner/search/unlike_stages.h"
#include "planner/topology/stacks.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/unlike_graph.h"

namespace tessera {
namespace {

Graph Model(const std::string& path, DType dtype, int64_t batch) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = 64;
  options.dtype = dtype;
  return Differentiate(ImportModel(path, options).value()).value();
}

Graph Gpt2(DType dtype, int64_t batch = 48) {
  return Model(ExamplePath("models/gpt2-tiny/config.json"), dtype, batch);
}

template <typename T>
T Pick(Rng& rng, std::initializer_list<T> of) {
  return of.begin()[rng.Below(static_cast<uint32_t>(of.size()))];
}

// Of any shape; most give a plan.
Strategy RandomStrategy(Rng& rng, const GraphIndex& index, int devices) {
  Strategy s;
  s.tp = Pick(rng, {1, 1, 2, 3, 4, 8});
  s.cp = Pick(rng, {1, 1, 1, 2});
  s.ep = index.has_experts ? Pick(rng, {1, 2, 4}) : 1;
  s.pp = Pick(rng, {1, 2, 3, 4, 6});
  s.vp = Pick(rng, {1, 1, 2});
  s.mbs = Pick(rng, {1, 2, 3, 4});
  s.sp = s.tp > 1 && rng.Below(2) == 0;
  s.cp_kind = s.cp == 1 ? "gather"
                        : Pick<const char*>(rng, {"gather", "ring", "ulysses"});
  s.zigzag = s.cp > 1 && rng.Below(2) == 0;
  const int shared = s.tp * s.cp * s.ep * s.pp;
  s.zero = devices > s.tp * s.pp ? Pick(rng, {0, 1, 2, 3}) : 0;
  s.tiles = Pick(rng, {1, 1, 2});
  s.recompute = Pick(rng, {RecomputeLevel::kNone, RecomputeLevel::kSelective,
                           RecomputeLevel::kFull});
  s.bucket = {Pick<int64_t>(rng, {0, 0, 100'000})};
  if (s.zero > 0 && rng.Below(4) == 0) s.zero_group = Strategy::kWithinNode;
  s.prefetch = Pick(rng, {0, 1, 2});
  s.schedule =
      s.vp > 1 ? "interleaved"
               : Pick<const char*>(rng, {"1f1b", "gpipe", "zb-h1", "zb-h2"});
  if (rng.Below(3) == 0) std::swap(s.order[3], s.order[4]);
  if (rng.Below(6) == 0) std::swap(s.order[0], s.order[3]);
  s.dp = devices % shared == 0 ? 0 : 1;
  return s;
}

// State beside the devices.
void OffloadSome(Rng& rng, Strategy& s) {
  constexpr auto kDevice = MemoryTier::kDevice;
  constexpr auto kHost = MemoryTier::kHost;
  constexpr auto kFile = MemoryTier::kFile;
  s.optimizer_tier = Pick(rng, {kDevice, kHost, kHost, kFile});
  s.parameter_tier = Pick(rng, {kDevice, kHost, kFile});
  const bool beside = s.optimizer_tier != kDevice && rng.Below(2) == 0;
  s.gradient_tier = beside ? kHost : kDevice;
}

void ExpectBelow(const Graph& graph, const Cluster& cluster, int tries,
                 int least_valid, double least_median, bool offload = false,
                 const TrainingOptions& training = {}) {
  const GraphIndex index(graph);
  const Evaluator evaluator(graph, cluster, nullptr, training);
  const bool unlike = HasUnlikeSpeeds(cluster, graph.dtype);
  // Others with --gtest_random_seed=….
  Rng rng(static_cast<uint64_t>(GTEST_FLAG_GET(random_seed)));
  std::vector<double> ratios;
  for (int i = 0; i < tries; ++i) {
    Strategy strategy =
        RandomStrategy(rng, index, static_cast<int>(cluster.devices.size()));
    if (offload) OffloadSome(rng, strategy);
    if (unlike) strategy.by_speed = rng.Below(2) == 0;
    const Score loose =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kLoose);
    const Score quick =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kQuick);
    const Score bound =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kClose);
    const auto score = evaluator.EvaluateUniform(index, cluster, strategy);
    if (!score) continue;
    const std::string text = ToString(strategy) + " on " + cluster.name;
    ASSERT_LE(loose.step_time, quick.step_time) << text;
    ASSERT_LE(loose.overflow, quick.overflow) << text;
    ASSERT_LE(quick.step_time, bound.step_time) << text;
    ASSERT_EQ(quick.overflow, bound.overflow) << text;
    ASSERT_LE(bound.step_time.picoseconds, score->step_time.picoseconds)
        << text;
    ASSERT_LE(bound.overflow.value, score->overflow.value) << text;
    ASSERT_TRUE(bound.feasible || !score->feasible) << text;
    ratios.push_back(bound.step_time.seconds() / score->step_time.seconds());
  }
  ASSERT_GE(std::ssize(ratios), least_valid);
  std::ranges::sort(ratios);
  const double median = ratios[ratios.size() / 2];
  ::testing::Test::RecordProperty("median", std::to_string(median));
  ::testing::Test::RecordProperty("p5",
                                  std::to_string(ratios[ratios.size() / 20]));
  EXPECT_GE(median, least_median);
}

// Devices of a hundredth of the memory, so that the memory floor is tried too.
Cluster Small(Cluster cluster, double share) {
  for (DeviceType& type : cluster.device_types) {
    type.memory = {
        static_cast<int64_t>(static_cast<double>(type.memory.value) * share)};
  }
  return cluster;
}

TEST(UniformBound, IsBelowTheScore) {
  ExpectBelow(Gpt2(DType::kFloat32), MakeCluster("dgx-a100-80gb:3").value(),
              250, 60, 0.2);
  ExpectBelow(Gpt2(DType::kBFloat16),
              Small(MakeCluster("dgx-a100-80gb:3").value(), 1e-4), 250, 60,
              0.2);
  // A cube mesh of NVLinks: where a replica lies in its host matters.
  ExpectBelow(Gpt2(DType::kFloat16), MakeCluster("p3.16xlarge:3x8").value(),
              150, 40, 0.2);
}

// With hosts so slow that they bind, and so small that they lack room.
TEST(UniformBound, IsBelowTheScoreOfWhatIsOffloaded) {
  TrainingOptions unclipped;
  unclipped.clip = 0;
  for (const TrainingOptions& training : {TrainingOptions(), unclipped}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      Cluster cluster = MakeCluster("dgx-a100-80gb:3").value();
      ExpectBelow(Gpt2(dtype), cluster, 80, 15, 0.2, true, training);
      cluster.hosts[0].memory_bandwidth =
          cluster.hosts[0].memory_bandwidth * 0.01;
      ExpectBelow(Gpt2(dtype), cluster, 80, 15, 0.2, true, training);
      cluster = MakeCluster("dgx-a100-80gb:3").value();
      cluster.hosts[0].device_link = cluster.hosts[0].device_link * 0.01;
      ExpectBelow(Gpt2(dtype), cluster, 80, 15, 0.2, true, training);
      cluster = MakeCluster("dgx-a100-80gb:3").value();
      cluster.hosts[0].storage_read = cluster.hosts[0].storage_read * 0.1;
      cluster.hosts[0].storage_write = cluster.hosts[0].storage_write * 0.1;
      cluster.hosts[0].memory = {4'000'000};
      cluster.hosts[0].storage = {4'000'000};
      ExpectBelow(Gpt2(dtype), Small(cluster, 1e-4), 80, 15, 0.2, true,
                  training);
    }
  }
  Cluster cpu = MakeCluster("local-cpu:12").value();
  ExpectBelow(Gpt2(DType::kFloat32), cpu, 100, 20, 0.2, true);
}

// Hosts of unlike devices, and of unlike numbers of them; with an embedding
// that is the head, too, and without.
TEST(UniformBound, IsBelowTheScoreOfWhatUnlikeDevicesOffload) {
  const Graph graphs[] = {Gpt2(DType::kBFloat16),
                          Model(ExamplePath("models/deepseek-tiny/config.json"),
                                DType::kBFloat16, 48)};
  for (const char* name :
       {"dgx-a100-80gb:1x4+dgx-h100:1x4", "dgx-a100-80gb:1x8+dgx-h100:2x2",
        "dgx-a100-80gb:2x4+dgx-a100-80gb:1x2+dgx-h100:1x2",
        "dgx-a100-80gb:1x8+dgx-a100-80gb:2x2"}) {
    for (const Graph& graph : graphs) {
      const Cluster usual = MakeCluster(name).value();
      ExpectBelow(graph, usual, 100, 8, 0.1, true);
      // The hosts of some nodes alone, which bounds take for the fastest, or
      // all.
      for (const size_t count : {size_t{1}, usual.hosts.size()}) {
        const double least_median = count == usual.hosts.size() ? 0.1 : 0.01;
        Cluster memory = usual;
        Cluster link = usual;
        Cluster files = Small(usual, 1e-4);
        for (size_t h = 0; h < count; ++h) {
          memory.hosts[h].memory_bandwidth.value *= 0.01;
          link.hosts[h].device_link.value *= 0.01;
          files.hosts[h].storage_read.value *= 0.1;
          files.hosts[h].storage_write.value *= 0.1;
          files.hosts[h].memory = {4'000'000};
          files.hosts[h].storage = {4'000'000};
        }
        for (const Cluster& cluster : {memory, link, files}) {
          ExpectBelow(graph, cluster, 100, 8, least_median, true);
        }
      }
    }
  }
}

// Networks so slow that they bind: which of a host's NICs a replica's routes
// take matters. A NIC for each device, for two, for all, and four for each.
TEST(UniformBound, IsBelowTheScoreOverSlowNetworks) {
  for (const char* name :
       {"dgx-a100-80gb:3", "p4d.24xlarge:3", "pcie-a100:3", "p5.48xlarge:3"}) {
    Cluster cluster = MakeCluster(name).value();
    const Router router(cluster);
    for (const Link& link : cluster.links) {
      if (router.NodeOf(link.from) == router.NodeOf(link.to)) continue;
      LinkType& type = cluster.link_types[static_cast<size_t>(link.type)];
      type.bandwidth = {std::min(type.bandwidth.value, 1e8)};
    }
    ExpectBelow(Gpt2(DType::kBFloat16), cluster, 150, 40, 0.02);
  }
}

// Hosts on unlike places of their network, whose trunks bind or do not.
TEST(UniformBound, IsBelowTheScoreOverUnlikePlaces) {
  for (const char* name :
       {"dgx-a100-80gb:6@fat-tree:4", "p4d.24xlarge:9@fat-tree",
        "dgx-a100-80gb:6@dragonfly", "dgx-a100-80gb:6@torus"}) {
    Cluster cluster = MakeCluster(name).value();
    ExpectBelow(Gpt2(DType::kFloat32), cluster, 60, 12, 0.1);
    for (LinkType& type : cluster.link_types) {
      if (!type.name.ends_with("-trunk")) continue;
      type.bandwidth = {type.bandwidth.value / 100};
    }
    ExpectBelow(Gpt2(DType::kFloat32), cluster, 60, 12, 0.02);
  }
}

// Hosts that have lost devices or links, slow devices, and devices of two
// types.
TEST(UniformBound, IsBelowTheScoreOnUnlikeHosts) {
  const auto slower = [](std::string_view part, double factor, Cluster to) {
    const auto slowed = SlowDown(part, factor, to);
    EXPECT_TRUE(slowed.has_value()) << part << " of " << to.name;
    return to;
  };
  const auto of = [](const char* name) { return MakeCluster(name).value(); };
  for (const Cluster& cluster :
       {FirstDevices(of("dgx-a100-80gb:2"), 12),
        FirstDevices(of("g5.48xlarge:3"), 18),
        FirstDevices(of("dgx-h100:2"), 12),
        slower("node1.gpu0", 1.3, of("dgx-a100-80gb:2")),
        slower("node0", 1.3, of("p3.16xlarge:2")),
        slower("node1.nic0", 4, of("dgx-a100-80gb:2")),
        of("dgx-h100:1x4+dgx-a100-80gb:1"), of("dgx-h100:1+dgx-a100-80gb:1"),
        of("dgx-h100:1x4+dgx1-v100-32gb:1+dgx-a100-80gb:1x4"),
        of("dgx-h100:1x7+dgx-a100-80gb:1x5"),
        of("g5.48xlarge:1+g4dn.12xlarge:1")}) {
    for (const double share : {1.0, 1e-4}) {
      ExpectBelow(Gpt2(DType::kFloat32), Small(cluster, share), 150, 15, 0.02);
    }
  }
}

// Unlike hosts have bounds as close as alike ones: of the exchanges within
// replicas, and of those between them.
TEST(UniformBound, IsCloseOnUnlikeHosts) {
  const Graph graph = Gpt2(DType::kFloat32);
  const GraphIndex index(graph);
  const auto ratio = [&](const Cluster& cluster, const char* text) {
    const Evaluator evaluator(graph, cluster, nullptr, {});
    const Strategy strategy = ParseStrategy(text).value();
    const Score bound =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kClose);
    const auto score = evaluator.EvaluateUniform(index, cluster, strategy);
    return bound.step_time.seconds() / score->step_time.seconds();
  };
  const Cluster whole = MakeCluster("g5.48xlarge:2").value();
  const Cluster part = FirstDevices(whole, 12);
  for (const char* text : {"tp=2,pp=2", "tp=2", "pp=2,zero=3"}) {
    EXPECT_GE(ratio(part, text), 0.8 * ratio(whole, text)) << text;
  }
}

// Devices of two types have bounds as close as those of one: where all do as
// much the slower one's, and where work goes by speed those of the shares.
TEST(UniformBound, IsCloseOnUnlikeDevices) {
  const Graph graph = Model(ExamplePath("models/gpt2/config.json"),
                            DType::kFloat16, /*batch=*/96);
  const GraphIndex index(graph);
  const auto ratio = [&](const char* name, const char* text) {
    const Cluster cluster = MakeCluster(name).value();
    const Evaluator evaluator(graph, cluster, nullptr, {});
    const Strategy strategy = ParseStrategy(text).value();
    const Score bound =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kClose);
    const auto score = evaluator.EvaluateUniform(index, cluster, strategy);
    EXPECT_LE(bound.step_time, score->step_time) << text;
    return bound.step_time.seconds() / score->step_time.seconds();
  };
  const char* mixed = "dgx-h100:1x4+dgx1-v100-32gb:1x4";
  for (const std::string text :
       {"tp=2,pp=2,dp=2,mbs=4", "tp=4,dp=2,mbs=4,zero=1", "pp=2,dp=4,mbs=6"}) {
    const double alike = ratio("dgx1-v100-32gb:2x4", text.c_str());
    EXPECT_GE(ratio(mixed, text.c_str()), 0.8 * alike) << text;
    // By speed tables may have fewer samples than shares.
    EXPECT_GE(ratio(mixed, (text + ",balance=speed").c_str()), 0.5 * alike)
        << text;
  }
}

// Stages with devices of one type and with both: samples that one replica has
// in a stage are several's in the next. And shares on two axes. Bounds are as
// close as without shares.
TEST(UniformBound, IsCloseWhereStagesShareOtherwise) {
  const Graph graph = Model(ExamplePath("models/gpt2-xl/config.json"),
                            DType::kFloat16, /*batch=*/96);
  const GraphIndex index(graph);
  const Cluster cluster =
      MakeCluster("dgx-h100:1x7+dgx1-v100-32gb:1x5").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto ratio = [&](const std::string& text) {
    const Strategy strategy = ParseStrategy(text).value();
    const Score bound =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kClose);
    const auto score = evaluator.EvaluateUniform(index, cluster, strategy);
    EXPECT_LE(bound.step_time, score->step_time) << text;
    return bound.step_time.seconds() / score->step_time.seconds();
  };
  for (const std::string text :
       {"pp=3,dp=4,mbs=4", "pp=2,dp=6,mbs=4", "pp=3,dp=2,tp=2,mbs=8,zero=1",
        "pp=2,dp=6,mbs=4,vp=2,schedule=interleaved"}) {
    EXPECT_GE(ratio(text + ",balance=speed"), 0.8 * ratio(text)) << text;
  }
}

// Of a sum that eight devices of one host and one of another need, trees bring
// each host one copy, where rings bring the smaller 2 * 8/9.
TEST(UniformBound, IsBelowTheScoreWhereTreesSumOverUnlikeHosts) {
  Cluster cluster = FirstDevices(MakeCluster("pcie-a100:2").value(), 9);
  const Router router(cluster);
  for (const Link& link : cluster.links) {
    if (router.NodeOf(link.from) == router.NodeOf(link.to)) continue;
    cluster.link_types[static_cast<size_t>(link.type)].bandwidth = {1e7};
  }
  // So large that pieces count for little.
  const Graph graph =
      Model(ExamplePath("models/gpt2/config.json"), DType::kFloat32, 54);
  const GraphIndex index(graph);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  for (const char* text :
       {"dp=9,mbs=2", "dp=9,mbs=2,zero=1", "dp=9,mbs=2,zero=3"}) {
    const Strategy strategy = ParseStrategy(text).value();
    const Score bound =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kClose);
    const auto score = evaluator.EvaluateUniform(index, cluster, strategy);
    ASSERT_TRUE(score) << text;
    EXPECT_LE(bound.step_time, score->step_time) << text;
    EXPECT_GE(bound.step_time.seconds(), 0.3 * score->step_time.seconds())
        << text;
  }
}

// Within a host: PCIe, switches that add, and cores that share their memory.
TEST(UniformBound, IsBelowTheScoreWithinAHost) {
  for (const char* name : {"g5.48xlarge:1", "dgx-h100:1", "local-cpu:8"}) {
    const DType dtype = name[0] == 'l' ? DType::kFloat32 : DType::kBFloat16;
    Cluster cluster = MakeCluster(name).value();
    ExpectBelow(Gpt2(dtype), cluster, 120, 20, 0.1);
    // So slow that they bind.
    for (LinkType& type : cluster.link_types) {
      type.bandwidth = {type.bandwidth.value / 100};
      type.in_switch_bandwidth = {type.in_switch_bandwidth.value / 100};
    }
    ExpectBelow(Gpt2(dtype), cluster, 120, 20, 0.02);
  }
}

// Where gathers bind, parameters count for the passes that read them: tables of
// embeddings and biases are not read backward.
TEST(UniformBound, CountsWhatEachPassReads) {
  Cluster cluster = MakeCluster("g5.48xlarge:1").value();
  for (LinkType& type : cluster.link_types) {
    type.bandwidth = {type.bandwidth.value / 100};
  }
  const Graph graph = Gpt2(DType::kBFloat16);
  const GraphIndex index(graph);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  for (const char* text : {"dp=4,pp=2,mbs=1,zero=3", "dp=2,pp=4,mbs=1,zero=3",
                           "dp=4,pp=2,mbs=1,zero=3,prefetch=2,recompute=full",
                           "dp=4,pp=2,mbs=1,zero=3,schedule=gpipe"}) {
    const Strategy strategy = ParseStrategy(text).value();
    const double bound =
        evaluator.BoundUniform(index, strategy, Objective::Bound::kClose)
            .step_time.seconds();
    const double score = evaluator.EvaluateUniform(index, cluster, strategy)
                             ->step_time.seconds();
    EXPECT_LE(bound, score) << text;
    EXPECT_GE(bound, 0.9 * score) << text;
  }
}

// Experts; layers of two kinds, and attention that has weights of its own.
TEST(UniformBound, IsBelowTheScoreOfModelsWithExperts) {
  for (const char* model : {"mixtral-tiny", "deepseek-tiny"}) {
    ExpectBelow(
        Model(ExamplePath("models/" + std::string(model) + "/config.json"),
              DType::kBFloat16, 48),
        Small(MakeCluster("dgx-h100:3").value(), 1e-3), 120, 20, 0.1);
  }
}

// Layers that all read what the encoder left.
TEST(UniformBound, IsBelowTheScoreOfEncodersWithDecoders) {
  ImportOptions options;
  options.global_batch = 48;
  options.seq_len = 32;
  options.dtype = DType::kBFloat16;
  const auto layers = ParseJson("{\"encoder\": 6, \"decoder\": 7}");
  options.overrides = {{"num_layers", layers->Field("encoder")},
                       {"num_decoder_layers", layers->Field("decoder")}};
  const Graph graph =
      Differentiate(ImportModel("zoo:t5-tiny", options).value()).value();
  ASSERT_LT(Shorten(graph).graph.blocks.size(), graph.blocks.size());
  ExpectBelow(graph, Small(MakeCluster("dgx-h100:3").value(), 1e-3), 120, 20,
              0.1);
}

// The stack's kernels, streams and floors.
TEST(UniformBound, IsBelowTheScoreUnderAStack) {
  for (const Stack& stack : Stacks()) {
    Cluster cluster = MakeCluster("dgx-a100-80gb:3").value();
    cluster.stack = stack;
    ExpectBelow(Gpt2(DType::kBFloat16), cluster, 60, 15, 0.2);
  }
}

Graph Zoo(const std::string& name, int64_t batch, int64_t seq_len,
          DType dtype = DType::kBFloat16) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  options.dtype = dtype;
  return Differentiate(ImportModel("zoo:" + name, options).value()).value();
}

// Stages cut as a uniform pipeline cuts them take about as long as that, and as
// much memory.
TEST(LayerCosts, AddUpToAPipeline) {
  const Graph graph = Zoo("gpt2-medium", 64, 1024);
  const GraphIndex index(graph);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  int tried = 0;
  for (const char* text :
       {"tp=1,pp=2,mbs=2,zero=0", "tp=1,pp=4,mbs=1,zero=1",
        "tp=2,pp=4,mbs=2,zero=0", "tp=2,pp=4,mbs=2,zero=1,sp=1",
        "tp=4,pp=2,mbs=4,zero=1", "tp=1,pp=8,mbs=2,zero=0,recompute=full",
        "tp=8,pp=2,mbs=4,zero=0,sp=1"}) {
    const Strategy strategy =
        Complete(index, cluster, ParseStrategy(text).value()).value();
    const Plan plan = PlanFromStrategy(index, cluster, strategy).value();
    const Evaluation priced = evaluator.Evaluate(plan);
    Strategy stage = strategy;
    stage.pp = 1;
    const auto costs = evaluator.LayerCosts(stage, DeviceId(0));
    ASSERT_EQ(costs.size(), graph.blocks.size());
    double slowest = 0;
    double sum = 0;
    const std::vector<int> starts = StageStarts(index, strategy.pp);
    for (size_t s = 0; s < starts.size(); ++s) {
      const auto end = s + 1 < starts.size()
                           ? static_cast<size_t>(starts[s + 1])
                           : costs.size();
      double time = 0;
      double once = 0;
      double kept = 0;
      double stored = 0;
      for (auto b = static_cast<size_t>(starts[s]); b < end; ++b) {
        time += std::max(costs[b].compute, costs[b].exchange);
        once += costs[b].update;
        kept += costs[b].kept;
        stored += costs[b].stored;
      }
      slowest = std::max(slowest, time);
      sum += time + (s == 0 ? once : 0);
      const double bytes =
          stored + costs[end - 1].backward_peak +
          kept * std::min<double>(static_cast<double>(starts.size() - s),
                                  plan.microbatches);
      EXPECT_NEAR(bytes / static_cast<double>(priced.memory[s].total.value), 1,
                  0.25)
          << text << " stage " << s;
    }
    const double estimate = sum + (plan.microbatches - 1) * slowest;
    EXPECT_NEAR(estimate / static_cast<double>(priced.step_time.picoseconds), 1,
                0.1)
        << text;
    ++tried;
  }
  EXPECT_EQ(tried, 7);
}

// Of the fastest uniform strategies' step time what unlike stages take, all of
// which run.
double TimeOfUnlikeStages(const std::string& model, int batch, int tokens,
                          const std::string& on) {
  const Graph graph = Zoo(model, batch, tokens, DType::kFloat16);
  const Cluster cluster = MakeCluster(on).value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const std::vector<Strategy> strategies = UniformStrategies(space);
  const SweepResult swept =
      Sweep(space, evaluator, strategies, 4, 1, nullptr, nullptr);
  std::vector<Strategy> likely;
  for (const Candidate& candidate : swept.best) {
    likely.push_back(candidate.strategy);
  }
  const Score uniform = swept.best[0].score;
  const std::vector<FoundPlan> found = UnlikeStages(
      space, evaluator, likely, strategies, uniform, 2, [] { return false; });
  if (found.empty()) return 1;
  EXPECT_TRUE(found[0].evaluation.feasible());
  for (const FoundPlan& plan : found) {
    EXPECT_EQ(evaluator.Evaluate(plan.plan).step_time,
              plan.evaluation.step_time);
    EXPECT_TRUE(Validate(space.index, cluster, plan.plan).empty());
  }
  return found[0].evaluation.step_time.seconds() / uniform.step_time.seconds();
}

// Gemma's head is as much work as several layers: on more devices than a layer,
// or with fewer layers beside it, no stage waits for it.
TEST(UnlikeStages, AreFasterWhereLayersAreUnlike) {
  EXPECT_LT(TimeOfUnlikeStages("gemma-7b", 32, 1024, "g5.48xlarge:2"), 0.95);
}

// Stages of fewer layers, or of fewer devices, where these are slower or have
// less memory.
TEST(UnlikeStages, AreFasterOnUnlikeDevices) {
  EXPECT_LT(TimeOfUnlikeStages("llama-2-7b", 64, 2048,
                               "dgx1-v100-32gb:1x4+dgx-a100-40gb:1x2"),
            0.9);
}

// A schedule that is forbidden takes no cuts away: another one runs them.
TEST(UnlikeStages, HaveASchedule) {
  const Graph graph = Zoo("gemma-7b", 32, 1024);
  const Cluster cluster = MakeCluster("g5.48xlarge:2").value();
  SearchSpace space(graph, cluster);
  space.constraints =
      Constraints::Make(space.index, cluster, {.forbid = {{"1f1b"}}}).value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const std::vector<Strategy> strategies = UniformStrategies(space);
  const std::vector<FoundPlan> found = UnlikeStages(
      space, evaluator, {}, strategies, Score(), 1, [] { return false; });
  ASSERT_FALSE(found.empty());
  for (const FoundPlan& plan : found) EXPECT_NE(plan.plan.schedule, "1f1b");
}

// Where there is to be one stage nothing is looked at.
TEST(UnlikeStages, AreNotLookedForWherePipelinesAreForbidden) {
  const Graph graph = Gpt2(DType::kFloat32, 32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto asked = [&](const ConstraintTexts& texts) {
    space.constraints = Constraints::Make(space.index, cluster, texts).value();
    int times = 0;
    UnlikeStages(space, evaluator, {}, UniformStrategies(space), Score(), 1,
                 [&] { return ++times < 0; });
    return times;
  };
  EXPECT_EQ(asked({.forbid = {{"pp"}}}), 0);
  EXPECT_GT(asked({}), 0);
}

// As if all were priced: the same strategies in the same order.
TEST(Sweep, IsExhaustive) {
  const Graph graph = Gpt2(DType::kFloat32, 32);
  for (const double share : {1.0, 3e-4, 1e-5}) {
    const Cluster cluster =
        Small(MakeCluster("dgx-a100-80gb:2").value(), share);
    const SearchSpace space(graph, cluster);
    const Evaluator evaluator(graph, cluster, nullptr, {});
    std::vector<Strategy> strategies = UniformStrategies(space);
    strategies.resize(200);  // a sample, in the order of the space
    std::vector<Candidate> all;
    for (const Strategy& strategy : strategies) {
      const auto score =
          evaluator.EvaluateUniform(space.index, cluster, strategy);
      if (score) all.push_back({strategy, *score});
    }
    std::ranges::stable_sort(all, [](const Candidate& a, const Candidate& b) {
      return Better(a.score, b.score);
    });
    for (const size_t count : {size_t{1}, size_t{10}, all.size() + 1}) {
      for (const int threads : {1, 3}) {
        const SweepResult swept =
            Sweep(space, evaluator, strategies, count, threads, nullptr);
        EXPECT_EQ(swept.bounded, std::ssize(strategies));
        EXPECT_TRUE(swept.complete);
        ASSERT_EQ(swept.best.size(), std::min(count, all.size()));
        for (size_t i = 0; i < swept.best.size(); ++i) {
          EXPECT_EQ(swept.best[i].strategy, all[i].strategy) << i;
          EXPECT_EQ(swept.best[i].score, all[i].score) << i;
        }
      }
    }
  }
}

// Estimates that say nothing true.
class Misled : public Objective {
 public:
  explicit Misled(const Evaluator& evaluator) : evaluator_(evaluator) {}
  Evaluation Evaluate(const Plan& plan) const override {
    return evaluator_.Evaluate(plan);
  }
  std::optional<Score> EvaluateUniform(
      const GraphIndex& index, const Cluster& cluster,
      const Strategy& strategy) const override {
    return evaluator_.EvaluateUniform(index, cluster, strategy);
  }
  Score BoundUniform(const GraphIndex& index, const Strategy& strategy,
                     Bound bound) const override {
    return evaluator_.BoundUniform(index, strategy, bound);
  }
  bool EstimatesUniform() const override { return true; }
  std::optional<Score> EstimateUniform(const GraphIndex&,
                                       const Strategy& strategy,
                                       Bound bound) const override {
    const uint64_t drawn = Mix64(std::hash<std::string>()(ToString(strategy)) +
                                 static_cast<uint64_t>(bound));
    if (drawn % 3 == 0) return std::nullopt;
    return Score{{static_cast<int64_t>(drawn % 1'000'000'000'000)},
                 {},
                 /*feasible=*/drawn % 2 == 0};
  }

 private:
  const Evaluator& evaluator_;
};

TEST(Sweep, FindsTheSameWhateverEstimatesSay) {
  const Graph graph = Gpt2(DType::kFloat32, 32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  std::vector<Strategy> strategies = UniformStrategies(space);
  strategies.resize(200);
  const SweepResult plain = Sweep(space, evaluator, strategies, 10, 1, nullptr);
  ASSERT_FALSE(plain.best.empty());
  for (const int threads : {1, 3}) {
    const SweepResult misled =
        Sweep(space, Misled(evaluator), strategies, 10, threads, nullptr);
    ASSERT_EQ(misled.best.size(), plain.best.size());
    for (size_t i = 0; i < plain.best.size(); ++i) {
      EXPECT_EQ(misled.best[i].strategy, plain.best[i].strategy) << i;
      EXPECT_EQ(misled.best[i].score, plain.best[i].score) << i;
    }
  }
}

TEST(Sweep, LeavesOutWhatIsNoBetter) {
  const Graph graph = Gpt2(DType::kFloat32, 32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const std::vector<Strategy> strategies = UniformStrategies(space);
  const SweepResult all = Sweep(space, evaluator, strategies, 20, 1, nullptr);
  const Score than = all.best[10].score;
  const auto better =
      std::ranges::count_if(all.best, [&](const Candidate& candidate) {
        return Better(candidate.score, than);
      });
  ASSERT_GT(better, 0);
  for (const int threads : {1, 3}) {
    const SweepResult swept = Sweep(space, evaluator, strategies, 20, threads,
                                    nullptr, nullptr, than);
    ASSERT_EQ(std::ssize(swept.best), better);
    for (size_t i = 0; i < swept.best.size(); ++i) {
      EXPECT_EQ(swept.best[i].strategy, all.best[i].strategy) << i;
    }
  }
}

// Of a graph whose blocks are all in the sample an estimate is the bound; of a
// graph of unlike blocks it is near it: one of 32 sizes stands for a block, of
// which most are less than a tenth apart.
TEST(UniformBound, IsEstimatedFromASample) {
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const auto expect_near = [&](const Graph& graph, double apart) {
    const GraphIndex index(graph);
    const UniformBound bounds(graph, cluster, nullptr, {});
    const UniformBound estimates(graph, cluster, nullptr, {},
                                 UniformBound::Blocks::kSample);
    for (const char* text :
         {"dp=16,mbs=2", "dp=16,zero=3,mbs=1", "dp=2,tp=8,mbs=4",
          "dp=4,tp=2,pp=2,mbs=2", "dp=4,pp=4,mbs=2,schedule=zb-h1"}) {
      const Strategy strategy = ParseStrategy(text).value();
      const double bound = bounds.Of(index, strategy, Objective::Bound::kClose)
                               .step_time.seconds();
      EXPECT_GT(bound, 0) << text;
      EXPECT_NEAR(estimates.Of(index, strategy, Objective::Bound::kClose)
                      .step_time.seconds(),
                  bound, apart * bound)
          << text;
    }
  };
  expect_near(Gpt2(DType::kFloat32, 32), 0);
  expect_near(testing::UnlikeGraph(2000), 0.1);
}

TEST(SampleBlocks, StandsForBlocksOfTheSameOperators) {
  const Graph graph = testing::UnlikeGraph(2000);
  const std::vector<int> stands = SampleBlocks(graph);
  ASSERT_EQ(stands.size(), graph.blocks.size());
  std::set<int> sampled;
  for (size_t b = 0; b < stands.size(); ++b) {
    const auto by = static_cast<size_t>(stands[b]);
    EXPECT_EQ(stands[by], stands[b]);
    sampled.insert(stands[b]);
  }
  // The last block, with the loss, is of a form of its own.
  EXPECT_EQ(std::ssize(sampled), kSampledOfForm + 1);
  EXPECT_EQ(stands.back(), std::ssize(stands) - 1);
  EXPECT_NE(stands.front(), stands.back());
}

}  // namespace
}  // namespace tessera
