#include "costmodel/evaluate/evaluator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "costmodel/profile/profile_io.h"
#include "costmodel/simulate/simulator.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/search/move.h"
#include "planner/search/search_space.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Graph Example(const std::string& size, int64_t seq_len, DType dtype) {
  ImportOptions options;
  options.global_batch = 32;
  options.seq_len = seq_len;
  options.dtype = dtype;
  return Differentiate(ImportModel(ExamplePath(std::string("models/") + size +
                                               "/config.json"),
                                   options)
                           .value())
      .value();
}

Plan Uniform(const Graph& graph, const Cluster& cluster,
             std::string_view strategy) {
  return PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
      .value();
}

// 1.56e9 parameters at 2 + 4 + 4 + 4 + 4 bytes (bf16 and its fp32 gradient,
// master and moments) are 28 GB, which a V100 with 16 GB lacks, as it lacks
// bf16.
TEST(Evaluator, SaysWhatDoesNotFit) {
  const Graph graph = Example("gpt2-xl", 64, DType::kBFloat16);
  const Cluster cluster = MakeCluster("p3.16xlarge:1x1").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Evaluation result = evaluator.Evaluate(Uniform(graph, cluster, ""));
  EXPECT_FALSE(result.feasible());
  EXPECT_GT(result.overflow.value, 28'000'000'000 - 17'000'000'000);
  EXPECT_THAT(result.violations,
              ElementsAre(HasSubstr("v100-sxm2-16gb does not compute in bf16"),
                          HasSubstr("largest: optimizer 18.7 GB")));
  EXPECT_GT(result.step_time, Duration{});
}

// Devices so slow that picoseconds do not fit 64 bits have no price; folded or
// simulated, explained or not.
TEST(Evaluator, SaysWhatTakesTooLong) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  Cluster cluster = MakeCluster("local-cpu:2").value();
  for (DeviceType& type : cluster.device_types) type.compute_efficiency = 1e-14;
  const Evaluator evaluator(graph, cluster, nullptr, {});
  for (const char* strategy :
       {"mbs=1", "pp=2,mbs=1", "offload=optimizer:host"}) {
    const Plan plan = Uniform(graph, cluster, strategy);
    for (const Evaluation& result :
         {evaluator.Evaluate(plan), evaluator.Explain(plan)}) {
      EXPECT_THAT(result.violations,
                  ElementsAre(HasSubstr("too long to be priced")))
          << strategy;
      EXPECT_EQ(result.step_time, Duration{}) << strategy;
    }
  }
}

// What is too large to be simulated is explained as far as it is folded.
TEST(Evaluator, ExplainsNoMoreThanItMaySimulate) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  const Evaluator evaluator(graph, cluster, nullptr, {},
                            std::ssize(graph.nodes));
  const Plan small = Uniform(graph, cluster, "pp=2,mbs=16");  // 2 microbatches
  const Plan large = Uniform(graph, cluster, "pp=2,mbs=1");
  EXPECT_FALSE(evaluator.IsTooLargeToExplain(small));
  EXPECT_TRUE(evaluator.IsTooLargeToExplain(large));
  EXPECT_NE(evaluator.Explain(small).breakdown, Breakdown{});
  const Evaluation explained = evaluator.Explain(large);
  EXPECT_EQ(explained.breakdown, Breakdown{});
  EXPECT_EQ(explained.step_time, evaluator.Evaluate(large).step_time);
  ASSERT_EQ(explained.devices.size(), 2u);
  EXPECT_EQ(explained.devices[1].memory, explained.memory[1]);
}

TEST(Evaluator, SharesLinksOfWhatIsSimulatedQuickly) {
  const Graph graph = Example("gpt2-tiny", 256, DType::kFloat32);
  const Cluster cluster = MakeCluster("g4dn.12xlarge:2").value();
  const Evaluator evaluator(graph, cluster, nullptr, {},
                            20 * 2 * std::ssize(graph.nodes));
  const Plan quick = Uniform(graph, cluster, "dp=4,pp=2,mbs=4");
  ASSERT_EQ(quick.microbatches, 2);
  EXPECT_EQ(evaluator.QuickSharedStepTime(quick),
            evaluator.Explain(quick).step_time);
  EXPECT_GT(evaluator.QuickSharedStepTime(quick),
            evaluator.Evaluate(quick).step_time);
  const Plan slow = Uniform(graph, cluster, "dp=4,pp=2,mbs=2");
  EXPECT_EQ(evaluator.QuickSharedStepTime(slow), std::nullopt);
}

// Remembered or not, to the picosecond: no two strategies are taken for one
// another, though each of these differs from the first in one thing.
TEST(Evaluator, UniformStrategiesScoreAsTheirPlans) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const GraphIndex index(graph);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  int valid = 0;
  for (int asked = 0; asked < 2; ++asked) {
    for (const char* text : {"pp=2,tp=2",
                             "pp=2",
                             "tp=2",
                             "pp=2,tp=2,dp=4",
                             "pp=2,tp=2,dp=8",
                             "pp=2,tp=2,cp=2",
                             "pp=2,tp=2,cp=2,cp-kind=ring",
                             "pp=2,tp=2,cp=2,cp-balance=zigzag",
                             "pp=2,tp=2,ep=2",
                             "pp=2,tp=2,mbs=2",
                             "pp=2,tp=2,zero=1",
                             "pp=2,tp=2,zero=2",
                             "pp=2,tp=2,zero=3",
                             "pp=2,tp=2,zero=3,zero-group=2",
                             "pp=2,tp=2,zero=3,zero-group=node",
                             "pp=2,tp=2,zero=3,prefetch=2",
                             "pp=2,tp=2,bucket=100kB",
                             "pp=2,tp=2,tiles=2",
                             "pp=2,tp=2,sp=1",
                             "pp=2,tp=2,dp-kind=rooted",
                             "pp=2,tp=2,recompute=full",
                             "pp=2,tp=2,recompute=full:1",
                             "pp=2,tp=2,recompute=selective",
                             "pp=2,tp=2,schedule=gpipe",
                             "pp=2,tp=2,schedule=zb-h1",
                             "pp=2,tp=2,vp=2,schedule=interleaved",
                             "pp=2,tp=2,order=tp-cp-ep-pp-dp",
                             "pp=2,tp=2,offload=optimizer:host",
                             "pp=2,tp=2,offload=optimizer:host,gradients:host",
                             "pp=2,tp=2,offload=parameters:host",
                             "pp=2,tp=2,offload=activations:host"}) {
      const Strategy strategy = ParseStrategy(text).value();
      const auto score = evaluator.EvaluateUniform(index, cluster, strategy);
      const auto plan = PlanFromStrategy(index, cluster, strategy);
      ASSERT_EQ(score.has_value(), plan.has_value()) << text;
      if (!plan) continue;
      ++valid;
      EXPECT_EQ(*score, ScoreOf(evaluator.Evaluate(*plan))) << text;
    }
  }
  EXPECT_GT(valid, 40);
}

// The same with experts, who are on other ranks in each.
TEST(Evaluator, UniformStrategiesOfExpertsScoreAsTheirPlans) {
  const Graph graph = Example("mixtral-tiny", 64, DType::kFloat32);
  const GraphIndex index(graph);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  for (int asked = 0; asked < 2; ++asked) {
    for (const char* text :
         {"tp=4", "tp=4,etp=1", "tp=4,etp=2", "tp=4,ep=2", "tp=4,ep=2,etp=2"}) {
      const Strategy strategy = ParseStrategy(text).value();
      const auto plan = PlanFromStrategy(index, cluster, strategy);
      ASSERT_TRUE(plan.has_value()) << text << plan.error().ToString();
      EXPECT_EQ(evaluator.EvaluateUniform(index, cluster, strategy),
                ScoreOf(evaluator.Evaluate(*plan)))
          << text;
    }
  }
}

TEST(Evaluator, ExplainsAllOfTheStep) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Plan plan = Uniform(graph, cluster, "pp=2,tp=2,mbs=2");
  const Evaluation fast = evaluator.Evaluate(plan);
  Evaluation explained = evaluator.Explain(plan, /*share_links=*/false);
  EXPECT_EQ(explained.breakdown.total(), explained.step_time);
  EXPECT_GT(explained.breakdown.idle, Duration{});
  EXPECT_GT(explained.breakdown.all_reduce, Duration{});
  EXPECT_EQ(explained.sources.analytical, 1);
  // Two stages of four devices, alike within.
  ASSERT_EQ(explained.devices.size(), 2u);
  for (size_t s = 0; s < 2; ++s) {
    EXPECT_EQ(explained.devices[s].devices.size(), 4u);
    EXPECT_EQ(explained.devices[s].memory, explained.memory[s]);
  }
  explained.breakdown = {};
  explained.devices = {};
  EXPECT_GT(explained.moved, Bytes{});
  explained.moved = {};
  EXPECT_EQ(explained, fast);
}

// What lacks room on a host or its storage is said with the tensors that lie
// there: of GPT-2's 124.4 million parameters in fp32 the masters and moments of
// its largest tensor, 50,257 x 768 * 4 bytes = 154.4 MB each. Two ranks keep 2
// * 12 * 124.4e6 bytes of them, and in the host's memory 2 * 4 * 124.4e6 of
// gradients besides.
TEST(Evaluator, SaysWhatHostAndStorageLack) {
  const Graph graph = Example("gpt2", 64, DType::kFloat32);
  struct Row {
    const char* strategy;
    Bytes Host::*room;
    const char* lacks;
    const char* holds;
  };
  for (const Row& row : {Row{"offload=optimizer:host", &Host::memory,
                             "host of node0.gpu0: needs 3.98 GB of 1.00 GB of "
                             "memory, 2.98 GB too much",
                             "group all holds on the host at its peak 154 MB "},
                         Row{"offload=optimizer:file", &Host::storage,
                             "host of node0.gpu0: needs 2.99 GB of 1.00 GB of "
                             "storage, 1.99 GB too much",
                             "group all holds in files at its peak 154 MB "}}) {
    Cluster cluster = MakeCluster("dgx-a100-80gb:1x2").value();
    cluster.hosts[0].*row.room = Bytes{1'000'000'000};
    const Evaluator evaluator(graph, cluster, nullptr, {});
    const Evaluation result =
        evaluator.Explain(Uniform(graph, cluster, row.strategy));
    EXPECT_FALSE(result.feasible());
    ASSERT_GE(result.violations.size(), 2u);
    EXPECT_THAT(result.violations[0], HasSubstr(row.lacks));
    EXPECT_THAT(result.violations,
                ::testing::Contains(
                    AllOf(HasSubstr(row.holds), HasSubstr("master wte.weight"),
                          HasSubstr("m wte.weight"), HasSubstr("v wte.weight"),
                          HasSubstr("(optimizer)"))));
  }
}

// The cores of one machine share its memory, so their own counts there, too.
TEST(Evaluator, CoresCountInTheirHostsMemory) {
  const Graph graph = Example("gpt2", 64, DType::kFloat32);
  Cluster cluster = MakeCluster("local-cpu:2").value();
  cluster.hosts[0].memory = Bytes{3'000'000'000};
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Evaluation result = evaluator.Explain(Uniform(graph, cluster, "mbs=1"));
  ASSERT_EQ(result.violations.size(), 2u);
  EXPECT_EQ(result.overflow.value,
            2 * result.memory[0].total.value - 3'000'000'000);
  EXPECT_THAT(result.violations[0], HasSubstr("of 3.00 GB of memory"));
  EXPECT_THAT(result.violations[1],
              HasSubstr("at its peak 154 MB parameter wte.weight"));
}

// The group that lacks memory is said, not the one with most bytes,
// which has just enough.
TEST(Evaluator, SaysWhatTheGroupHoldsThatLacks) {
  const Graph graph = Example("gpt2", 64, DType::kFloat32);
  Cluster cluster = MakeCluster("dgx-a100-80gb:1x1+dgx-a100-40gb:1x1").value();
  const Plan plan = Uniform(graph, cluster, "pp=2,mbs=1");
  const auto most = [&] {
    const Evaluator evaluator(graph, cluster, nullptr, {});
    return evaluator.Evaluate(plan).memory;
  }();
  ASSERT_EQ(most.size(), 2u);
  const size_t larger = most[0].total > most[1].total ? 0 : 1;
  const size_t smaller = 1 - larger;
  const auto type = [&](size_t device) -> DeviceType& {
    return cluster
        .device_types[static_cast<size_t>(cluster.devices[device].type)];
  };
  type(larger).memory = most[larger].total;
  type(smaller).memory = most[smaller].total - Bytes{1'000'000};
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Evaluation result = evaluator.Explain(plan);
  const std::string group = "group stage" + std::to_string(smaller);
  EXPECT_THAT(result.violations,
              ::testing::ElementsAre(HasSubstr(group + ": needs"),
                                     HasSubstr(group + " holds at its peak")));
}

// One measured matrix product: others of up to four times its size either way
// follow from it, in proportion; the rest stays with the model.
TEST(Evaluator, CountsItsSources) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("local-cpu:1").value();
  const Plan plan = Uniform(graph, cluster, "mbs=32");
  const auto model = Evaluator(graph, cluster, nullptr, {}).Evaluate(plan);
  ProfileDb profile;
  // The head: 32 samples of 64 tokens, 256 wide, 256 words; a second.
  ProfileKey key;
  key.name = "linear";
  key.device = "cpu-core";
  for (const Node& node : graph.nodes) {
    if (node.op->name == "linear" &&
        graph.blocks[static_cast<size_t>(node.block)] == "head") {
      key.rule = node.rule.ToString();
    }
  }
  key.extents = {32, 64, 256, 256};
  profile.rows[key] = {1.0, 0, 1};
  const auto measured = Evaluator(graph, cluster, &profile, {}).Evaluate(plan);
  EXPECT_GT(measured.step_time.seconds(), model.step_time.seconds() + 0.9);
  EXPECT_GT(measured.sources.measured, 0);
  EXPECT_GT(measured.sources.interpolated, measured.sources.measured);
  EXPECT_GT(measured.sources.analytical, 0);
  EXPECT_NEAR(measured.sources.measured + measured.sources.interpolated +
                  measured.sources.analytical,
              1, 1e-12);
  EXPECT_EQ(measured.memory, model.memory);
}

// With times of fused kernels and of products that add to gradients.
TEST(Evaluator, AgreesWithTheSimulatorOnAProfile) {
  const Graph graph = Example("llama-3.2-1b", 64, DType::kBFloat16);
  const Cluster cluster = MakeCluster("dgx-h200:1x4").value();
  const ProfileDb profile =
      ReadProfile(ExamplePath("../profiler/profiles/tessera/h200.txtpb"))
          .value();
  const Evaluator evaluator(graph, cluster, &profile, {});
  ProfileDb writing = profile;  // none that add
  std::erase_if(writing.rows, [](const auto& row) {
    return row.first.name.ends_with(kAdds);
  });
  ASSERT_LT(writing.rows.size(), profile.rows.size());
  const Evaluator without(graph, cluster, &writing, {});
  for (const auto& [text, microbatches] :
       {std::pair("dp=4,mbs=8", 1),
        {"dp=4,mbs=2", 4},
        {"dp=4,mbs=2,zero=1", 4},
        {"dp=4,mbs=2,tiles=2", 4},
        {"dp=1,tp=2,pp=2,mbs=32", 1},
        {"dp=1,tp=2,pp=2,mbs=8", 4},
        {"dp=2,pp=2,mbs=4,recompute=full", 4}}) {
    const Plan plan = Uniform(graph, cluster, text);
    ASSERT_EQ(plan.microbatches, microbatches) << text;
    const Evaluation result = evaluator.Evaluate(plan);
    const TaskGraph tasks = Lower(graph, cluster, plan, {});
    const Timeline timeline =
        Simulate(evaluator.pricer(), tasks, {.share_links = false});
    EXPECT_EQ(result.step_time, timeline.step_time) << text;
    // Adding takes longer.
    const Duration written = without.Evaluate(plan).step_time;
    if (microbatches == 1) {
      EXPECT_EQ(result.step_time, written) << text;
    } else {
      EXPECT_GT(result.step_time, written) << text;
    }
  }
}

// What is remembered of other plans changes nothing: along random walks from
// several strategies each plan is priced as by an evaluator that knows no
// other.
class EvaluatorWalk : public testing::TestWithParam<const char*> {};
TEST_P(EvaluatorWalk, PricesPlansAsIfNoneCameBefore) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kBFloat16);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2x4").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  Plan plan = Uniform(graph, cluster, GetParam());
  ASSERT_TRUE(MakeCanonical(space, plan));
  Rng rng(3);
  int64_t lowered_anew = 0;
  for (int made = 0; made < 100;) {
    auto next = DrawMove(Moves(), rng).Propose(plan, space, rng);
    if (!next) continue;
    ++made;
    const Evaluator fresh(graph, cluster, nullptr, {});
    ASSERT_EQ(evaluator.Evaluate(next->plan), fresh.Evaluate(next->plan));
    lowered_anew += fresh.blocks_lowered();
    if (rng.Below(2) == 0) plan = std::move(next->plan);
  }
  EXPECT_LT(evaluator.blocks_lowered(), lowered_anew);
}
INSTANTIATE_TEST_SUITE_P(
    Strategies, EvaluatorWalk,
    testing::Values("dp=8", "tp=2,zero=3", "pp=2,tp=2,zero=1", "pp=2,mbs=2",
                    "pp=2,vp=2,schedule=interleaved,tp=2,recompute=full"));

// A layer that computes an activation again, which no other layer reads, looks
// to its neighbours as it did before: it alone is lowered again.
TEST(Evaluator, LowersABlockAloneWhereItsNeighboursSeeNoChange) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  Plan plan = Uniform(graph, cluster, "tp=2");
  const Duration before = evaluator.Evaluate(plan).step_time;
  const int64_t lowered = evaluator.blocks_lowered();
  const auto gelu = std::ranges::find_if(
      graph.nodes, [](const Node& node) { return node.op->name == "gelu"; });
  ASSERT_NE(gelu, graph.nodes.end());
  plan.ops[static_cast<size_t>(gelu - graph.nodes.begin())].recompute = true;
  EXPECT_GT(evaluator.Evaluate(plan).step_time, before);
  EXPECT_EQ(evaluator.blocks_lowered(), lowered + 1);
}

// The first and the last layer have other neighbours than those between them,
// of which their programs see nothing: embedding, layer and head are lowered.
TEST(Evaluator, LowersEqualLayersOnceWhateverIsBesideThem) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  ASSERT_GE(graph.blocks.size(), 4);
  for (const char* strategy : {"dp=4", "tp=4", "dp=2,tp=2,zero=1"}) {
    const Evaluator evaluator(graph, cluster, nullptr, {});
    (void)evaluator.Evaluate(Uniform(graph, cluster, strategy));
    EXPECT_EQ(evaluator.blocks_lowered(), 3) << strategy;
  }
}

// Programs are the same for all sizes of buckets that fill alike.
TEST(Evaluator, LowersNothingForBucketsThatFillAlike) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  Plan plan = Uniform(graph, cluster, "dp=4");
  plan.bucket_bytes = {int64_t{1} << 40};
  const Evaluation whole = evaluator.Evaluate(plan);
  const int64_t lowered = evaluator.blocks_lowered();
  plan.bucket_bytes = {int64_t{1} << 41};
  EXPECT_EQ(evaluator.Evaluate(plan), whole);
  EXPECT_EQ(evaluator.blocks_lowered(), lowered);
  plan.bucket_bytes = {1};
  const Evaluation each = evaluator.Evaluate(plan);
  EXPECT_GT(evaluator.blocks_lowered(), lowered);
  const Evaluator fresh(graph, cluster, nullptr, {});
  EXPECT_EQ(each, fresh.Evaluate(plan));
}

// Blocks that are fetched ahead count only where something is fetched.
TEST(Evaluator, LowersNothingForAnotherPrefetchThatFetchesNothing) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  for (const char* strategy : {"dp=4,zero=2", "dp=4,zero=3"}) {
    Plan plan = Uniform(graph, cluster, strategy);
    plan.prefetch = 1;
    const Evaluation near = evaluator.Evaluate(plan);
    const int64_t lowered = evaluator.blocks_lowered();
    plan.prefetch = 2;
    const Evaluation far = evaluator.Evaluate(plan);
    const bool fetches = strategy == std::string_view("dp=4,zero=3");
    EXPECT_EQ(evaluator.blocks_lowered() > lowered, fetches);
    EXPECT_EQ(far.memory != near.memory, fetches);
  }
}

// What is fetched further ahead has more blocks around it, among which a tied
// weight's other group has another number.
TEST(Evaluator, TellsTiedWeightsApartByWhatIsFetchedAhead) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2x4").value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  Plan plan = Uniform(graph, cluster, "pp=2,dp=4,zero=3");
  for (int prefetch : {1, 4}) {
    plan.prefetch = prefetch;
    const Evaluator fresh(graph, cluster, nullptr, {});
    EXPECT_EQ(evaluator.Evaluate(plan), fresh.Evaluate(plan));
  }
}

TEST(Evaluator, GivesTheSameBitsOnManyThreads) {
  const Graph graph = Example("gpt2-tiny", 64, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  std::vector<Plan> plans;
  for (const char* strategy :
       {"", "tp=2", "tp=4,zero=1", "pp=2,tp=2", "pp=4,tp=2,sp=1", "pp=2,mbs=2",
        "tp=8,sp=1", "pp=4,schedule=gpipe"}) {
    plans.push_back(Uniform(graph, cluster, strategy));
  }
  const Evaluator alone(graph, cluster, nullptr, {});
  std::vector<Evaluation> expected;
  for (const Plan& plan : plans) expected.push_back(alone.Evaluate(plan));

  const Evaluator shared(graph, cluster, nullptr, {});
  std::vector<std::vector<Evaluation>> found(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < found.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < plans.size(); ++i) {
        found[t].push_back(shared.Evaluate(plans[(i + t) % plans.size()]));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t t = 0; t < found.size(); ++t) {
    for (size_t i = 0; i < plans.size(); ++i) {
      EXPECT_EQ(found[t][i], expected[(i + t) % plans.size()]);
    }
  }
}

}  // namespace
}  // namespace tessera
