// The search on real prices: what it starts from.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "costmodel/evaluate/evaluator.h"
#include "costmodel/whatif/fabric.h"
#include "planner/io/importer.h"
#include "planner/io/json_value.h"
#include "planner/plan/recompute.h"
#include "planner/plan/work_shares.h"
#include "planner/search/constraints.h"
#include "planner/search/fit.h"
#include "planner/search/fit_offload.h"
#include "planner/search/mcmc.h"
#include "planner/search/mixed_plans.h"
#include "planner/search/ragged.h"
#include "planner/search/sweep.h"
#include "planner/search/uniform_strategies.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/uniform_plan.h"

namespace tessera {
namespace {

using testing::Uniform;

Graph Gpt2(int64_t batch, int64_t seq_len = 64) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  options.dtype = DType::kBFloat16;
  return Differentiate(
             ImportModel(ExamplePath("models/gpt2-tiny/config.json"), options)
                 .value())
      .value();
}

std::vector<Plan> PlansOf(const std::vector<FoundPlan>& found) {
  std::vector<Plan> plans;
  for (const FoundPlan& each : found) plans.push_back(each.plan);
  return plans;
}

// The starts, and a proposal of each chain.
Result<SearchResult> Searched(const SearchSpace& space,
                              std::vector<Plan> starts = {}) {
  const Evaluator evaluator(*space.index.graph, *space.cluster, nullptr, {});
  SearchOptions options;
  options.proposals = 8;
  options.time_limit = 0;
  options.starts = std::move(starts);
  return Search(space, evaluator, options);
}

void ExpectFindsAllowed(const SearchSpace& space) {
  const auto result = Searched(space);
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  EXPECT_TRUE(Allowed(space, result->best));
}

// Devices with room for a replica, or where the batch does not divide for a
// stage, only once the optimizer is on the host.
struct Crowded {
  const char* cluster;
  const char* strategy;
};
class Offloading : public ::testing::TestWithParam<Crowded> {};
TEST_P(Offloading, WhereNothingElseFits) {
  const Graph graph = Gpt2(4);
  Cluster cluster = MakeCluster(GetParam().cluster).value();
  const std::string strategy = GetParam().strategy;
  Bytes needed[2];
  {
    const SearchSpace space(graph, cluster);
    const Evaluator evaluator(graph, cluster, nullptr, {});
    const std::string strategies[] = {
        strategy, strategy + ",offload=optimizer:host,gradients:host"};
    for (int i = 0; i < 2; ++i) {
      for (const MemoryUse& use :
           evaluator.Evaluate(Uniform(space, strategies[i])).memory) {
        needed[i] = std::max(needed[i], use.total);
      }
    }
  }
  ASSERT_LT(needed[1], needed[0]);
  for (DeviceType& type : cluster.device_types) type.memory = needed[1];
  const SearchSpace space(graph, cluster);
  const SearchResult result = Searched(space).value();
  EXPECT_TRUE(result.evaluation.feasible());
  EXPECT_TRUE(Offloads(result.best));
}
INSTANTIATE_TEST_SUITE_P(
    Search, Offloading,
    ::testing::Values(Crowded{"dgx-a100-80gb:1x1", "mbs=1,recompute=full"},
                      Crowded{"dgx-a100-80gb:1x3",
                              "pp=3,mbs=1,recompute=full"}));

// Where nothing fits but with all state on the host, a schedule that splits
// backwards is the best there, too.
TEST(Search, TriesSchedulesOfWhatOffloads) {
  const Graph graph = Gpt2(4);
  Cluster cluster = MakeCluster("dgx-a100-80gb:1x3").value();
  // Beside the kernels, copies take next to nothing.
  for (DeviceType& type : cluster.device_types) type.slowness = 1000;
  const std::string plain =
      "pp=3,mbs=1,recompute=full,"
      "offload=optimizer:host,gradients:host,parameters:host";
  const auto priced = [&](const std::string& strategy) {
    const SearchSpace space(graph, cluster);
    const Evaluator evaluator(graph, cluster, nullptr, {});
    return evaluator.Evaluate(Uniform(space, strategy));
  };
  const std::string split = plain + ",schedule=zb-h1";
  Bytes needed;
  for (const MemoryUse& use : priced(split).memory) {
    needed = Max(needed, use.total);
  }
  for (DeviceType& type : cluster.device_types) type.memory = needed;
  ASSERT_FALSE(priced("pp=3,mbs=1,recompute=full").feasible());
  ASSERT_LT(priced(split).step_time, priced(plain).step_time);
  SearchSpace space(graph, cluster);
  space.constraints =
      Constraints::Make(space.index, cluster, {.forbid = {{"tp"}}}).value();
  const SearchResult result = Searched(space).value();
  ASSERT_TRUE(result.uniform.has_value());
  EXPECT_LE(result.uniform->evaluation.step_time, priced(split).step_time);
}

// Over a slow network a pipeline whose optimizers are on the hosts is many
// times as fast as data parallelism that gathers parameters, which fits, too.
TEST(Search, LooksAtAllWaysToOffload) {
  const Graph graph = Gpt2(4);
  Cluster cluster = MakeCluster("dgx-a100-80gb:4x1").value();
  for (LinkType& type : cluster.link_types) {
    if (type.name.starts_with("ib")) type.bandwidth = type.bandwidth * 1e-3;
  }
  const char* const gathers =
      "dp=4,zero=3,mbs=1,recompute=full,"
      "offload=optimizer:host,gradients:host,parameters:host";
  const char* const pipeline =
      "pp=4,mbs=1,recompute=full,"
      "offload=optimizer:host,gradients:host,parameters:host";
  const auto priced = [&](const char* strategy) {
    const SearchSpace space(graph, cluster);
    const Evaluator evaluator(graph, cluster, nullptr, {});
    return evaluator.Evaluate(Uniform(space, strategy));
  };
  Bytes needed;
  for (const char* strategy : {gathers, pipeline}) {
    for (const MemoryUse& use : priced(strategy).memory) {
      needed = Max(needed, use.total);
    }
  }
  for (DeviceType& type : cluster.device_types) type.memory = needed;
  ASSERT_FALSE(priced("pp=4,mbs=1,recompute=full").feasible());
  ASSERT_FALSE(priced("dp=4,zero=3,mbs=1,recompute=full").feasible());
  ASSERT_TRUE(priced(gathers).feasible());
  ASSERT_LT(5 * priced(pipeline).step_time.seconds(),
            priced(gathers).step_time.seconds());
  const SearchSpace space(graph, cluster);
  const SearchResult result = Searched(space).value();
  EXPECT_TRUE(result.evaluation.feasible());
  EXPECT_LE(result.evaluation.step_time, priced(pipeline).step_time);
}

// Devices with less room than a plan needs that keeps all, and more than one
// that computes all layers again.
class FitsStrategy : public ::testing::TestWithParam<const char*> {};
TEST_P(FitsStrategy, ByComputingSomeAgain) {
  const Graph graph = Gpt2(32, 128);
  Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  const std::string strategy = GetParam();
  Evaluation none, full;
  {
    const SearchSpace space(graph, cluster);
    const Evaluator evaluator(graph, cluster, nullptr, {});
    none = evaluator.Evaluate(Uniform(space, strategy));
    full = evaluator.Evaluate(Uniform(space, strategy + ",recompute=full"));
  }
  const auto most = [](const Evaluation& evaluation) {
    Bytes bytes;
    for (const MemoryUse& use : evaluation.memory) {
      bytes = std::max(bytes, use.total);
    }
    return bytes.value;
  };
  ASSERT_LT(most(full), most(none));
  for (DeviceType& type : cluster.device_types) {
    type.memory = {(most(none) + most(full)) / 2};
  }
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Plan plan = Uniform(space, strategy);
  ASSERT_FALSE(evaluator.Evaluate(plan).feasible());
  const auto fitted = FitByRecomputing(space, evaluator, plan);
  ASSERT_TRUE(fitted.has_value());
  EXPECT_TRUE(fitted->evaluation.feasible());
  EXPECT_EQ(fitted->evaluation, evaluator.Evaluate(fitted->plan));
  EXPECT_GT(fitted->evaluation.step_time, none.step_time);
  EXPECT_LT(fitted->evaluation.step_time, full.step_time);
  // What fits stays as it is; what cannot fit is nothing.
  EXPECT_EQ(FitByRecomputing(space, evaluator, fitted->plan)->plan,
            fitted->plan);
  for (DeviceType& type : cluster.device_types) {
    type.memory = {most(full) / 2};
  }
  const SearchSpace small(graph, cluster);
  const Evaluator of_small(graph, cluster, nullptr, {});
  EXPECT_FALSE(FitByRecomputing(small, of_small, plan).has_value());
}
INSTANTIATE_TEST_SUITE_P(Strategies, FitsStrategy,
                         ::testing::Values("dp=4,mbs=8", "pp=2,dp=2,mbs=4",
                                           "tp=2,dp=2,mbs=8,zero=1"));

// In a pipeline stages are shared out by what they compute, the head and what
// runs again included, and plans come the fastest first.
TEST(Fits, SharesOutStages) {
  const Graph graph = Gpt2(32, 128);
  Cluster cluster = MakeCluster("dgx-a100-80gb:1x2").value();
  const auto strategy = ParseStrategy("pp=2,mbs=1").value();
  Bytes most;
  {
    const SearchSpace space(graph, cluster);
    const Evaluator evaluator(graph, cluster, nullptr, {});
    for (const MemoryUse& use :
         evaluator.Evaluate(Uniform(space, "pp=2,mbs=1")).memory) {
      most = std::max(most, use.total);
    }
  }
  for (DeviceType& type : cluster.device_types) {
    type.memory = {most.value * 95 / 100};
  }
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto uniform =
      FitByRecomputing(space, evaluator, Uniform(space, "pp=2,mbs=1"));
  ASSERT_TRUE(uniform.has_value());
  const std::vector<FoundPlan> fitted = FittedPlans(
      space, evaluator, {}, {strategy}, 1, Score(), 1, [] { return false; });
  ASSERT_FALSE(fitted.empty());
  for (size_t i = 0; i < fitted.size(); ++i) {
    EXPECT_TRUE(fitted[i].evaluation.feasible());
    EXPECT_TRUE(Allowed(space, fitted[i].plan));
    if (i > 0) {
      EXPECT_LT(fitted[i - 1].evaluation.step_time,
                fitted[i].evaluation.step_time);
    }
  }
  EXPECT_LE(fitted[0].evaluation.step_time, uniform->evaluation.step_time);
  // Nothing is better than a plan that takes no time.
  EXPECT_TRUE(FittedPlans(space, evaluator, {}, {strategy}, 1,
                          {Duration{}, Bytes{}, /*feasible=*/true}, 1,
                          [] { return false; })
                  .empty());
}

// On any number of threads; where guessing ends, of what was guessed before.
TEST(Fits, TheSameOnMoreThreads) {
  const Graph graph = Gpt2(32, 128);
  Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  // dp=4,mbs=8 takes 96 MB: 59 for parameters, gradients and states, 37 kept.
  for (DeviceType& type : cluster.device_types) type.memory = {40'000'000};
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto never = [] { return false; };
  const auto fitted = [&](const std::vector<Strategy>& strategies, int threads,
                          const std::function<bool()>& stop_guessing) {
    return PlansOf(FittedPlans(space, evaluator, {}, strategies, 4, Score(),
                               threads, never, stop_guessing));
  };
  std::vector<Strategy> strategies = UniformStrategies(space);
  const std::vector<Plan> all = fitted(strategies, 1, nullptr);
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(fitted(strategies, 3, nullptr), all);
  const size_t half = strategies.size() / 2;
  size_t asked = 0;
  const std::vector<Plan> in_time =
      fitted(strategies, 1, [&] { return ++asked > half; });
  strategies.resize(half);
  EXPECT_EQ(in_time, fitted(strategies, 1, nullptr));
  EXPECT_NE(in_time, all);
}

// Offloads as little as fits: the plan takes less time than with all of its
// optimizer state on the host, and has no room for what is there.
class OffloadsStrategy : public ::testing::TestWithParam<const char*> {};
TEST_P(OffloadsStrategy, AsFarAsMemoryLacks) {
  const Graph graph = Gpt2(32, 128);
  Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  const std::string strategy = GetParam();
  const auto never = [] { return false; };
  const auto most = [&](const std::string& text) {
    const SearchSpace space(graph, cluster);
    const Evaluator evaluator(graph, cluster, nullptr, {});
    Bytes most;
    for (const MemoryUse& use :
         evaluator.Evaluate(Uniform(space, text)).memory) {
      most = std::max(most, use.total);
    }
    return most.value;
  };
  const std::string all = strategy + ",offload=optimizer:host";
  for (DeviceType& type : cluster.device_types) {
    type.memory = {(2 * most(strategy) + most(all)) / 3};
  }
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Plan plan = Uniform(space, strategy);
  ASSERT_FALSE(evaluator.Evaluate(plan).feasible());
  const auto fitted = FitByOffloading(space, evaluator, plan, never);
  ASSERT_TRUE(fitted.has_value());
  EXPECT_TRUE(fitted->evaluation.feasible());
  EXPECT_EQ(fitted->evaluation, evaluator.Evaluate(fitted->plan));
  EXPECT_LT(fitted->evaluation.step_time,
            evaluator.Evaluate(Uniform(space, all)).step_time);
  // The largest that is on the host has no room on the devices.
  std::optional<size_t> largest;
  const auto elements = [&](size_t w) {
    return space.index.weights[w].elements;
  };
  for (size_t w = 0; w < plan.weights.size(); ++w) {
    if (fitted->plan.weights[w].optimizer_tier == MemoryTier::kDevice) continue;
    if (!largest || elements(w) > elements(*largest)) largest = w;
  }
  ASSERT_TRUE(largest.has_value());
  Plan back = fitted->plan;
  back.weights[*largest].optimizer_tier = MemoryTier::kDevice;
  EXPECT_FALSE(evaluator.Evaluate(back).feasible());
  // Gradients of one microbatch go to the host once, wherever they wait: there
  // they leave more room.
  if (plan.microbatches == 1) {
    for (const WeightPlacement& weight : fitted->plan.weights) {
      EXPECT_EQ(weight.gradient_tier, weight.optimizer_tier);
    }
  }
  // What fits stays as it is; what cannot fit is nothing.
  EXPECT_EQ(FitByOffloading(space, evaluator, fitted->plan, never)->plan,
            fitted->plan);
  // What the host has no room for is in files.
  const auto on_host = [&](const Plan& of) {
    int64_t bytes = 0;  // of one device of each group
    for (const MemoryUse& use : evaluator.Evaluate(of).host_memory) {
      bytes += use.total.value;
    }
    return bytes * std::ssize(cluster.devices) / std::ssize(of.groups);
  };
  Plan in_files = fitted->plan;
  for (WeightPlacement& weight : in_files.weights) {
    if (weight.optimizer_tier == MemoryTier::kHost) {
      weight.optimizer_tier = MemoryTier::kFile;
    }
  }
  ASSERT_LT(on_host(in_files), on_host(fitted->plan));
  cluster.hosts[0].memory = {(on_host(in_files) + 9 * on_host(fitted->plan)) /
                             10};
  const SearchSpace full(graph, cluster);
  const Evaluator of_full(graph, cluster, nullptr, {});
  const auto filed = FitByOffloading(full, of_full, plan, never);
  ASSERT_TRUE(filed.has_value());
  EXPECT_TRUE(filed->evaluation.feasible());
  const auto in = [&](MemoryTier tier) {
    return std::ranges::count(filed->plan.weights, tier,
                              &WeightPlacement::optimizer_tier);
  };
  EXPECT_GT(in(MemoryTier::kFile), 0);
  EXPECT_GT(in(MemoryTier::kHost), 0);
  for (DeviceType& type : cluster.device_types) {
    type.memory = {most(all) / 4};
  }
  const SearchSpace small(graph, cluster);
  const Evaluator of_small(graph, cluster, nullptr, {});
  EXPECT_FALSE(FitByOffloading(small, of_small, plan, never).has_value());
}
INSTANTIATE_TEST_SUITE_P(Strategies, OffloadsStrategy,
                         ::testing::Values("dp=4,mbs=8", "pp=2,dp=2,mbs=4",
                                           "tp=2,dp=2,mbs=8"));

// What a search starts from, where nothing walks: the best of its candidates
// with shared links, in seconds.
double StartOn(const Graph& graph, const Cluster& cluster,
               const ConstraintTexts& constraints) {
  SearchSpace space(graph, cluster);
  space.constraints =
      Constraints::Make(space.index, cluster, constraints).value();
  const Evaluator evaluator(graph, cluster, nullptr, {});
  SearchOptions options;
  options.proposals = 0;
  options.time_limit = 0;
  options.share_links = true;
  options.candidates = 5;
  const SearchResult result = Search(space, evaluator, options).value();
  double least = std::numeric_limits<double>::infinity();
  for (const FoundPlan& found : result.candidates) {
    const Evaluation step = evaluator.Explain(found.plan, /*share_links=*/true);
    least = std::min(least, step.step_time.seconds());
  }
  return least;
}

Graph Zoo(const char* model, int64_t batch, int64_t seq_len, DType dtype) {
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  options.dtype = dtype;
  return Differentiate(ImportModel(ExamplePath(std::string("models/") + model +
                                               "/config.json"),
                                   options)
                           .value())
      .value();
}

// Where all that fits runs its forward again, or waits for more stages, a plan
// with some of its state on the host is better, and found.
TEST(Starts, OffloadAPartWhereThatIsFaster) {
  const Graph graph = Zoo("gpt2-xl", 16, 1024, DType::kFloat16);
  const Cluster cluster = MakeCluster("titan-rtx-pair:1x1").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  std::vector<Strategy> none;
  for (const char* text :
       {"dp=1,mbs=2", "dp=1,mbs=4", "dp=1,mbs=4,recompute=full",
        "dp=1,mbs=8,recompute=full"}) {
    none.push_back(ParseStrategy(text).value());
  }
  const auto never = [] { return false; };
  const std::vector<FoundPlan> fitted =
      PartlyOffloaded(space, evaluator, none, 4, 1'000'000, Score(), 1, never);
  ASSERT_FALSE(fitted.empty());
  for (size_t i = 0; i < fitted.size(); ++i) {
    EXPECT_TRUE(fitted[i].evaluation.feasible());
    if (i > 0) {
      EXPECT_LT(fitted[i - 1].evaluation.step_time,
                fitted[i].evaluation.step_time);
    }
  }
  // Nothing is better than a plan that takes no time, and nothing is simulated
  // that is too large.
  EXPECT_TRUE(PartlyOffloaded(space, evaluator, none, 4, 1'000'000,
                              {Duration{}, Bytes{}, /*feasible=*/true}, 1,
                              never)
                  .empty());
  EXPECT_TRUE(PartlyOffloaded(space, evaluator, none, 4, 10, Score(), 1, never)
                  .empty());
  // The same on more threads; and what was guessed in time is fitted.
  EXPECT_EQ(PlansOf(PartlyOffloaded(space, evaluator, none, 4, 1'000'000,
                                    Score(), 2, never)),
            PlansOf(fitted));
  int asked = 0;
  const auto in_time =
      PlansOf(PartlyOffloaded(space, evaluator, none, 4, 1'000'000, Score(), 1,
                              never, [&] { return ++asked > 2; }));
  none.resize(2);
  EXPECT_EQ(in_time, PlansOf(PartlyOffloaded(space, evaluator, none, 4,
                                             1'000'000, Score(), 1, never)));
  EXPECT_NE(in_time, PlansOf(fitted));
}

// A recommender's tables are split over all devices, and its layers by samples:
// faster than either split of all, and what is best comes first.
TEST(Starts, MixTablesWithDataParallelism) {
  const Graph graph = Zoo("dlrm", 4096, 1, DType::kFloat32);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto never = [] { return false; };
  const std::vector<FoundPlan> mixed = MixedPlans(space, evaluator, {}, never);
  ASSERT_FALSE(mixed.empty());
  for (size_t i = 0; i < mixed.size(); ++i) {
    EXPECT_EQ(mixed[i].evaluation, evaluator.Evaluate(mixed[i].plan));
    if (i > 0) {
      EXPECT_FALSE(Better(mixed[i].evaluation, mixed[i - 1].evaluation));
    }
  }
  const FoundPlan& best = mixed[0];
  EXPECT_TRUE(best.evaluation.feasible());
  for (const char* text : {"dp=16,mbs=256", "dp=16,mbs=256,zero=3",
                           "tp=16,mbs=4096", "tp=8,dp=2,mbs=2048"}) {
    EXPECT_TRUE(
        Better(best.evaluation, evaluator.Evaluate(Uniform(space, text))))
        << text;
  }
  EXPECT_TRUE(MixedPlans(space, evaluator, {}, [] { return true; }).empty());
}

// Searches that differ in what they may use: who may use more starts no worse,
// but for what estimates are off.
constexpr double kEstimatesOff = 1.01;

TEST(Starts, AreNoWorseWithFewerConstraints) {
  const Graph gpt2 = Zoo("gpt2-large", 64, 1024, DType::kBFloat16);
  const Cluster pcie = MakeCluster("pcie-a100:1").value();
  const double any = StartOn(gpt2, pcie, {});
  for (int most : {2, 4}) {
    ConstraintTexts small;
    small.max_microbatch = most;
    EXPECT_LE(any, kEstimatesOff * StartOn(gpt2, pcie, small)) << most;
  }
  const Graph mixtral = Zoo("mixtral-8x7b", 128, 4096, DType::kBFloat16);
  const Cluster dgx = MakeCluster("dgx-h100:4").value();
  EXPECT_LE(
      StartOn(mixtral, dgx, {}),
      kEstimatesOff * StartOn(mixtral, dgx, {.forbid = {{"interleaved"}}}));
}

TEST(Starts, AreNoWorseOnFasterLinks) {
  const Graph graph = Zoo("gpt2-large", 64, 1024, DType::kFloat16);
  const Cluster slow = MakeCluster("g4dn.12xlarge:4").value();
  Cluster fast = slow;
  ASSERT_TRUE(ScaleLinks(LinkClass::kInter, 2, 1, fast));
  EXPECT_LE(StartOn(graph, fast, {}), kEstimatesOff * StartOn(graph, slow, {}));
}

// However slow it is: two microbatches of the slowest tensor parallelism.
TEST(Search, WalksFromPlansThatAreGiven) {
  const Graph graph = Gpt2(16);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Plan given = Uniform(space, "dp=4,tp=2,pp=1,mbs=1,zero=3");
  const SearchResult result = Searched(space, {given}).value();
  EXPECT_EQ(result.chains[0].start.step_time,
            evaluator.Evaluate(given).step_time);
  EXPECT_GT(result.chains[0].start.step_time, result.evaluation.step_time);
}

// Those without a bound are left out, the others priced all the same.
TEST(Sweep, PricesWhatIsBoundedInTime) {
  const Graph graph = Gpt2(48);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const std::vector<Strategy> strategies = UniformStrategies(space);
  int asked = 0;
  const SweepResult swept = Sweep(space, evaluator, strategies, 3, 1, nullptr,
                                  [&asked] { return ++asked > 100; });
  EXPECT_GT(swept.bounded, 0);
  EXPECT_LT(swept.bounded, std::ssize(strategies));
  EXPECT_FALSE(swept.complete);
  ASSERT_EQ(swept.best.size(), 3u);
  // Small microbatches come first.
  for (const Candidate& candidate : swept.best) {
    EXPECT_EQ(candidate.strategy.mbs, 1);
  }
}

Graph DeepSeekLite(int64_t samples, int64_t seq_len) {
  ImportOptions options;
  options.global_batch = samples;
  options.seq_len = seq_len;
  return Differentiate(
             ImportModel(ExamplePath("models/deepseek-v2-lite/config.json"),
                         options)
                 .value())
      .value();
}

// Three stages cannot share out gpt2-tiny's four layers evenly: two chunks of
// each are as good as one. Nor should stages of unlike devices.
TEST(UniformStrategies, HaveChunksOfUnevenStages) {
  const auto chunks = [](const char* cluster, int pp) {
    const Graph graph = Gpt2(48);
    const Cluster on = MakeCluster(cluster).value();
    const SearchSpace space(graph, on);
    std::set<int> all;
    for (const Strategy& s : UniformStrategies(space)) {
      if (s.pp == pp) all.insert(s.vp);
    }
    return all;
  };
  EXPECT_EQ(chunks("dgx-h100:1x3", 3), (std::set<int>{1, 2}));
  EXPECT_EQ(chunks("dgx-h100:1x2", 2), (std::set<int>{1, 2}));
  EXPECT_EQ(chunks("dgx-h100:1x1+dgx-a100-80gb:1x1", 2),
            (std::set<int>{1, 2, 3}));
}

// Two stages of gpt2-tiny's four layers have one chunk each or two.
TEST(UniformStrategies, HaveChunks) {
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const Graph graph = Gpt2(16);
  const SearchSpace space(graph, cluster);
  const auto all = UniformStrategies(space);
  EXPECT_TRUE(std::ranges::any_of(all, [](const Strategy& s) {
    return s.pp == 2 && s.vp == 2 && s.schedule == "interleaved";
  }));
  EXPECT_TRUE(std::ranges::all_of(all, [](const Strategy& s) {
    return s.cp == 1 && (s.pp > 1 || s.vp == 1) &&
           (s.vp > 1) == (s.schedule == "interleaved");
  }));
}

TEST(UniformStrategies, CutLongSequences) {
  const Graph graph = DeepSeekLite(8, 32'768);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const SearchSpace space(graph, cluster);
  const auto all = UniformStrategies(space);
  for (const char* kind : {"gather", "ring", "ulysses"}) {
    EXPECT_TRUE(std::ranges::any_of(all, [&](const Strategy& s) {
      return s.cp == 4 && s.cp_kind == kind;
    })) << kind;
  }
  // Degrees make up the devices; experts' room goes by the tokens' order.
  EXPECT_TRUE(std::ranges::all_of(all, [](const Strategy& s) {
    return s.dp * s.tp * s.pp * s.cp * s.ep == 8 && !s.zigzag;
  }));
}

// What sees its past alone is cut evenly where ranks have parts of it, of which
// 2 x 8 do not make up 32,776 tokens.
TEST(UniformStrategies, CutWhatIsCausalEvenly) {
  ImportOptions options;
  options.global_batch = 8;
  options.seq_len = 32'776;
  options.overrides["n_positions"] = ParseJson("{\"n\": 32776}")->Field("n");
  const Graph graph =
      Differentiate(
          ImportModel(ExamplePath("models/gpt2-tiny/config.json"), options)
              .value())
          .value();
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  EXPECT_TRUE(std::ranges::all_of(
      UniformStrategies({graph, cluster}), [](const Strategy& s) {
        return s.zigzag == (s.cp > 1 && s.cp < 8 && s.cp_kind != "ulysses");
      }));
}

// Shorter ones are cut where samples are fewer than the 8 devices, among those
// that share one: 8 / 4 of these, and of 6 samples 8 / 2 that share 3.
TEST(UniformStrategies, CutSequencesOfFewSamples) {
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const auto most_context = [&](int64_t samples, int64_t seq_len) {
    const Graph graph = DeepSeekLite(samples, seq_len);
    int most = 0;
    for (const Strategy& s : UniformStrategies({graph, cluster})) {
      most = std::max(most, s.cp);
    }
    return most;
  };
  EXPECT_EQ(most_context(4, 8'192), 2);
  EXPECT_EQ(most_context(4, 4'096), 2);
  EXPECT_EQ(most_context(6, 8'192), 4);
  EXPECT_EQ(most_context(8, 8'192), 1);
  EXPECT_EQ(most_context(12, 8'192), 1);
  EXPECT_EQ(most_context(4, 2'048), 1);
  EXPECT_EQ(most_context(8, 32'768), 8);
}

// Of the 768 samples of two replicas: every divisor up to 64, then, up to
// 65,536 tokens, the first that is twice the one before.
TEST(UniformStrategies, HaveLargeMicrobatchesOfShortSequences) {
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x2").value();
  const auto sizes = [&](const Graph& graph) {
    std::vector<int> sizes;
    Strategy strategy;
    strategy.dp = 2;
    for (const Strategy& s : WithSamples({graph, cluster}, strategy)) {
      sizes.push_back(s.mbs);
    }
    return sizes;
  };
  std::vector<int> expected = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  EXPECT_EQ(sizes(Zoo("gpt2", 1536, 1024, DType::kBFloat16)), expected);
  expected.push_back(128);
  EXPECT_EQ(sizes(Zoo("gpt2", 1536, 512, DType::kBFloat16)), expected);
  expected.insert(expected.end(), {256, 768});
  EXPECT_EQ(sizes(Gpt2(1536, 64)), expected);
}

// The best are tried in each other way, in zigzag order where that balances.
TEST(UniformStrategies, HaveOtherContexts) {
  const Graph graph = Gpt2(4);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1").value();
  const std::vector<Strategy> from = {
      ParseStrategy("dp=8").value(),
      ParseStrategy("cp=2,cp-kind=ulysses").value()};
  std::set<std::string> texts;
  for (const Strategy& s : OtherContexts({graph, cluster}, from)) {
    texts.insert(s.cp_kind + (s.zigzag ? " zigzag" : ""));
    EXPECT_EQ(s.cp, 2);
  }
  EXPECT_EQ(texts, (std::set<std::string>{"gather zigzag", "ring zigzag"}));
}

// Of four layers in two stages: one chunk in four schedules, two chunks
// interleaved, each at three levels of recomputation; not twice where two
// differ in these alone, and of what is no pipeline none.
TEST(UniformStrategies, HaveOtherSchedules) {
  const Graph graph = Gpt2(4);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x2").value();
  const std::vector<Strategy> from = {
      ParseStrategy("dp=2,mbs=1").value(), ParseStrategy("pp=2,mbs=1").value(),
      ParseStrategy("pp=2,mbs=1,recompute=full").value()};
  const std::vector<Strategy> others = OtherSchedules({graph, cluster}, from);
  std::set<std::string> texts;
  for (const Strategy& s : others) {
    texts.insert(s.schedule + std::to_string(s.vp));
    EXPECT_EQ(s.pp, 2);
  }
  EXPECT_EQ(texts, (std::set<std::string>{"1f1b1", "gpipe1", "interleaved2",
                                          "zb-h11", "zb-h21"}));
  EXPECT_EQ(others.size(), 5 * RecomputeLevels().size());
  // One stage on each of two unlike devices has up to three chunks, the third
  // interleaved as well, and each of all once with work by speed.
  const Cluster unlike = MakeCluster("dgx-h100:1x1+dgx-a100-80gb:1x1").value();
  const std::vector<Strategy> on_unlike =
      OtherSchedules({graph, unlike}, {from[1]});
  EXPECT_EQ(on_unlike.size(), 2 * 6 * RecomputeLevels().size());
  EXPECT_EQ(std::ranges::count(on_unlike, true, &Strategy::by_speed),
            std::ssize(on_unlike) / 2);
}

// Beyond what is tried by itself, all of them along the height of an image.
TEST(UniformStrategies, DoWhatIsFixed) {
  ImportOptions options;
  options.global_batch = 8;
  const Graph graph =
      Differentiate(
          ImportModel(ExamplePath("models/resnet-tiny/config.json"), options)
              .value())
          .value();
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  SearchSpace space(graph, cluster);
  space.constraints =
      Constraints::Make(space.index, cluster, {.fix = {{.text = "*=cp:4"}}})
          .value();
  const auto all = UniformStrategies(space);
  EXPECT_TRUE(
      std::ranges::any_of(all, [](const Strategy& s) { return s.cp == 4; }));
  // Without attention there is one kind.
  EXPECT_TRUE(std::ranges::all_of(
      all, [](const Strategy& s) { return s.cp_kind == "gather"; }));
  ExpectFindsAllowed(space);
}

// A batch of one sample on nodes of one device: layers have to be split over
// the network.
TEST(UniformStrategies, SplitLayersOverSmallNodes) {
  const Graph graph = Gpt2(1);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:8x1").value();
  const SearchSpace space(graph, cluster);
  EXPECT_TRUE(std::ranges::any_of(UniformStrategies(space),
                                  [](const Strategy& s) { return s.tp == 8; }));
  const auto result = Searched(space);
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  // All devices may do all the work, too; but that is no strategy.
  EXPECT_TRUE(result->uniform.has_value());
}

// Of larger nodes apart: where nothing else fits.
TEST(UniformStrategies, SplitLayersBeyondNodesWhereAsked) {
  const Graph graph = Gpt2(1);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:4x4").value();
  const SearchSpace space(graph, cluster);
  const auto within = UniformStrategies(space);
  const auto beyond = UniformStrategies(space, TensorRanks::kBeyond);
  EXPECT_TRUE(
      std::ranges::all_of(within, [](const Strategy& s) { return s.tp <= 4; }));
  EXPECT_FALSE(beyond.empty());
  EXPECT_TRUE(std::ranges::all_of(
      beyond, [](const Strategy& s) { return s.tp == 8 || s.tp == 16; }));
}

// 13 samples on 5 devices: three have one more than the other two.
TEST(RaggedPlans, AreDataParallel) {
  const Graph graph = Gpt2(13);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x5").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto never = [] { return false; };
  const auto plans = RaggedPlans(space, evaluator, never);
  ASSERT_EQ(plans.size(), 3U);  // of ZeRO stages
  for (const FoundPlan& found : plans) {
    EXPECT_TRUE(Validate(graph, cluster, found.plan).empty());
    EXPECT_TRUE(found.evaluation.feasible());
    EXPECT_EQ(found.plan.microbatches, 1);
    EXPECT_EQ(found.evaluation, evaluator.Evaluate(found.plan));
  }
  EXPECT_EQ(plans[2].plan.weights[0].zero_stage, 3);
  const SearchResult result = Searched(space).value();
  EXPECT_FALSE(Better(plans[0].evaluation, result.evaluation));

  const Graph divided = Gpt2(15);
  EXPECT_TRUE(RaggedPlans(SearchSpace(divided, cluster),
                          Evaluator(divided, cluster, nullptr, {}), never)
                  .empty());
  const Graph few = Gpt2(3);
  EXPECT_TRUE(RaggedPlans(SearchSpace(few, cluster),
                          Evaluator(few, cluster, nullptr, {}), never)
                  .empty());
}

// Fifteen of the 31 samples, shared between an H100 of 989.4 TFLOP/s and an
// A100 of 312, each at its efficiency: the larger share is the H100's, and
// their products with the times of a sample are as equal as may be.
TEST(RaggedPlans, ShareBySpeedWhatDevicesDoNotDivide) {
  const Graph graph = Gpt2(31);
  const Cluster cluster = MakeCluster("dgx-h100:1x2+dgx-a100-80gb:1x2").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const auto plans = RaggedPlans(space, evaluator, [] { return false; });
  ASSERT_FALSE(plans.empty());
  const DeviceGroup& group = plans[0].plan.groups[0];
  ASSERT_EQ(group.axes.size(), 2U);
  ASSERT_EQ(group.axes[0].shares.size(), 2U);
  const std::vector<double> speeds = {
      SpeedOf(cluster, DeviceId(0), graph.dtype),
      SpeedOf(cluster, DeviceId(2), graph.dtype)};
  EXPECT_EQ(group.axes[0].shares, ReducedShares(SharesBySpeed(15, speeds)));
  EXPECT_GT(group.axes[0].shares[0], group.axes[0].shares[1]);
  EXPECT_TRUE(group.axes[1].shares.empty());
  EXPECT_TRUE(Validate(graph, cluster, plans[0].plan).empty());
}

// A degree of one operator that attention, with its 12 heads, has no room for:
// no uniform plan gives it.
TEST(Search, StartsWithADegreeThatNoUniformPlanHas) {
  const Graph graph = Zoo("gpt2", 32, 128, DType::kBFloat16);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  ASSERT_FALSE(PlanFromStrategy(GraphIndex(graph), cluster,
                                ParseStrategy("tp=16").value()));
  const double free = StartOn(graph, cluster, {});
  const double fixed =
      StartOn(graph, cluster, {.fix = {{.text = "lm_head=tp:16"}}});
  EXPECT_LT(fixed, 2 * free);
}

// No uniform plan has two stages.
TEST(Search, StartsWithTwoZeroStagesThatAreFixed) {
  const Graph graph = Gpt2(16);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x4").value();
  SearchSpace space(graph, cluster);
  space.constraints = Constraints::Make(space.index, cluster,
                                        {.fix = {{.text = "h.*.attn.*=zero:3"},
                                                 {.text = "h.*.mlp.*=zero:1"}}})
                          .value();
  ExpectFindsAllowed(space);
}

// What was simulated is not simulated again.
TEST(Evaluator, RemembersWhatItSimulated) {
  const Graph graph = Gpt2(4);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x1").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {});
  const Plan plan = Uniform(space, "mbs=1,offload=optimizer:host");
  const Evaluation first = evaluator.Evaluate(plan);
  EXPECT_EQ(evaluator.simulated(), 1);
  EXPECT_EQ(evaluator.Evaluate(plan), first);
  EXPECT_EQ(evaluator.simulated(), 1);
  // Another one is.
  Plan other = plan;
  other.prefetch = 2;
  evaluator.Evaluate(other);
  EXPECT_EQ(evaluator.simulated(), 2);
}

// One operator is more than no operator.
TEST(Evaluator, DoesNotPriceWhatIsTooLargeToSimulate) {
  const Graph graph = Gpt2(4);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:1x1").value();
  const SearchSpace space(graph, cluster);
  const Evaluator evaluator(graph, cluster, nullptr, {}, 0);
  EXPECT_TRUE(evaluator.Evaluate(Uniform(space, "mbs=1")).feasible());
  const Evaluation unpriced =
      evaluator.Evaluate(Uniform(space, "mbs=1,offload=optimizer:host"));
  EXPECT_FALSE(unpriced.feasible());
  ASSERT_FALSE(unpriced.violations.empty());
  EXPECT_NE(unpriced.violations[0].find("too large to simulate"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
