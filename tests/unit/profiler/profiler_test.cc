#include "profiler/profiler.h"

#include <gmock/gmock.h>

#include <set>
#include <string>

#include "costmodel/simulate/simulator.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "runtime/comm/thread_world.h"
#include "runtime/trainer.h"
#include "tests/support/paths.h"

namespace tessera {
namespace {

Cluster LocalCpu(int ranks) {
  return MakeCluster("local-cpu:" + std::to_string(ranks)).value();
}

Graph TinyGraph() {
  ImportOptions options;
  options.global_batch = 4;
  options.seq_len = 8;
  options.dtype = DType::kFloat32;
  return Differentiate(
             ImportModel(ExamplePath("models/gpt2-tiny"), options).value())
      .value();
}

Plan PlanOf(const Graph& graph, const Cluster& cluster,
            std::string_view strategy) {
  return PlanFromStrategy(graph, cluster, ParseStrategy(strategy).value())
      .value();
}

// All ranks profile; rank 0's result.
ProfilerResult ProfileOnThreads(const ProfileCases& cases, int ranks,
                                const ProfilerOptions& options) {
  auto worlds = MakeThreadWorlds(ranks);
  std::vector<Result<ProfilerResult>> results(static_cast<size_t>(ranks),
                                              InvalidInput("did not run"));
  RunThreads(ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    results[r] = Profile(cases, *worlds[r], options);
  });
  return results[0].value();
}

TEST(UniformPlansTest, AreValidAndDistinct) {
  const Graph graph = TinyGraph();
  const Cluster cluster = LocalCpu(4);
  const int samples[] = {1, 2};
  const std::vector<Plan> plans = UniformPlans(graph, cluster, samples);
  EXPECT_GE(plans.size(), 6u);  // at least one for each (dp, tp, pp)
  for (const Plan& plan : plans) {
    EXPECT_THAT(Validate(graph, cluster, plan), ::testing::IsEmpty());
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(plans[i], plans[j]);
  }
}

TEST(TypicalGraphsTest, HaveEveryOperatorOfTheirFamilies) {
  const auto graphs = TypicalGraphs();
  ASSERT_TRUE(graphs) << graphs.error().ToString();
  std::set<std::string_view> operators;
  for (const Graph& graph : *graphs) {
    for (const Node& node : graph.nodes) operators.insert(node.op->name);
  }
  EXPECT_THAT(operators, ::testing::IsSupersetOf(
                             {"embedding", "linear", "layer_norm", "rms_norm",
                              "rotary", "attention", "gelu", "silu", "dropout",
                              "multiply", "cross_entropy"}));
}

// What was profiled for a plan prices all of it: kernels and copies exactly,
// exchanges exactly or between two payloads of the ladder.
TEST(ProfileTest, PricesThePlanThatItWasMadeFor) {
  const Graph graph = TinyGraph();
  for (const char* strategy :
       {"dp=2,mbs=2,zero=1", "tp=2,mbs=2,sp=1", "pp=2,mbs=1"}) {
    const Cluster cluster = LocalCpu(2);
    const Plan plan = PlanOf(graph, cluster, strategy);
    ProfileCases cases;
    AddLadder(cluster, cases);
    ASSERT_TRUE(AddCases(graph, cluster, {&plan, 1}, {}, cases)) << strategy;
    ProfilerOptions options;
    options.time_limit_s = 1e9;
    options.sample_s = 0;
    const ProfilerResult result = ProfileOnThreads(cases, 2, options);
    EXPECT_EQ(result.left_out, 0u);
    EXPECT_EQ(result.profile.origin.ranks_at_once, 2);
    EXPECT_THAT(Validate(result.profile), ::testing::IsEmpty());
    for (const auto& [key, row] : result.profile.rows) {
      EXPECT_GT(row.median_s, 0) << key.name;
      EXPECT_GE(row.samples, 5) << key.name;
    }

    const Pricer pricer(graph, cluster, &result.profile);
    const TaskGraph tasks = Lower(graph, cluster, plan, {});
    const std::vector<TaskCost> costs = PriceTasks(pricer, tasks);
    for (size_t t = 0; t < costs.size(); ++t) {
      const Task& task = tasks.tasks[t];
      const bool exchange =
          task.kind == TaskKind::kComm || task.kind == TaskKind::kSend;
      EXPECT_LE(costs[t].source,
                exchange ? CostSource::kInterpolated : CostSource::kMeasured)
          << strategy << ": "
          << NameOf(tasks, graph, TaskId(static_cast<int64_t>(t)));
    }
  }
}

TEST(ProfileTest, LeavesOutWhatThereIsNoTimeFor) {
  const Cluster cluster = LocalCpu(2);
  ProfileCases cases;
  AddLadder(cluster, cases);
  ProfilerOptions options;
  options.time_limit_s = 0;
  const ProfilerResult result = ProfileOnThreads(cases, 2, options);
  EXPECT_THAT(result.profile.rows, ::testing::IsEmpty());
  EXPECT_EQ(result.left_out, cases.kernels.size() + cases.collectives.size());
}

}  // namespace
}  // namespace tessera
