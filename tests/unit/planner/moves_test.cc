// Moves and drafts where the contract test's small graphs do not lead.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <string>

#include "planner/io/importer.h"
#include "planner/plan/strategy.h"
#include "planner/plan/validate.h"
#include "planner/search/draft.h"
#include "planner/search/move.h"
#include "planner/topology/topologies.h"
#include "tests/support/paths.h"
#include "tests/support/small_models.h"
#include "tests/support/uniform_plan.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::Uniform;

Graph Model(const std::string& name, int64_t batch, int64_t seq) {
  ImportOptions options;
  options.global_batch = batch;
  if (seq > 0) options.seq_len = seq;
  auto graph = ImportModel(ExamplePath("models/" + name), options);
  TESSERA_CHECK(graph.has_value()) << graph.error().ToString();
  return Differentiate(*std::move(graph)).value();
}

// T5 has a layer without attention, whose flags are those of several levels.
TEST(Draft, KnowsTheStrategyOfEveryUniformPlan) {
  const Graph graph = Model("t5-tiny", 16, 32);
  const Cluster cluster = MakeCluster("local-cpu:4").value();
  const SearchSpace space(graph, cluster);
  for (const char* again :
       {"none", "selective", "full", "selective:2", "full:1"}) {
    const Plan plan =
        Uniform(space, std::string("pp=2,mbs=2,recompute=") + again);
    const auto strategy = UniformStrategy(space.index, cluster, plan);
    ASSERT_TRUE(strategy.has_value()) << again;
    EXPECT_EQ(Draft(space, plan).strategy(), strategy) << again;
  }
}

// Tables of a recommendation model are parallel: stages of any of them.
TEST(StageBoundary, HasAWayBackWhereBlocksAreOutOfOrder) {
  const Graph graph = Model("dlrm-tiny", 16, 0);
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  const SearchSpace space(graph, cluster);
  const Plan ordered = Uniform(space, "pp=2,mbs=4");
  Plan plan = ordered;
  const std::set<std::string> first = {"bot_l", "emb_l.1", "emb_l.2"};
  for (size_t b = 0; b < graph.blocks.size(); ++b) {
    for (NodeId node : space.index.nodes_of_block[b]) {
      plan.ops[node.index()].group =
          GroupId(first.contains(graph.blocks[b]) ? 0 : 1);
    }
  }
  ASSERT_TRUE(IsValid(space.index, cluster, plan));
  const Move& move = **FindMove("stage-boundary");
  // By the state, a plan that some draw leads to.
  const auto reached = [&](const Plan& from) {
    std::map<std::string, Plan> plans;
    Rng rng(5);
    for (int i = 0; i < 64; ++i) {
      if (const auto step = move.Propose(from, space, rng)) {
        plans.emplace(testing::StateOf(step->plan), step->plan);
      }
    }
    return plans;
  };
  EXPECT_EQ(reached(ordered).size(), 2u);
  for (const Plan& from : {ordered, plan}) {
    for (const auto& [state, other] : reached(from)) {
      EXPECT_TRUE(reached(other).contains(testing::StateOf(from))) << state;
    }
  }
}

// Of the four stages of ZeRO there is the one that the way back draws.
TEST(StageCount, LeavesZeroWhereThereAreNoCopies) {
  const Graph graph = testing::MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  const SearchSpace space(graph, cluster);
  const Move& move = **FindMove("stage-count");
  const Plan whole = Uniform(space, "pp=2,mbs=4");
  std::set<int> stages;
  Rng rng(3);
  for (int i = 0; i < 400; ++i) {
    const auto step = move.Propose(whole, space, rng);
    if (!step.has_value()) continue;
    const auto strategy = UniformStrategy(space.index, cluster, step->plan);
    ASSERT_TRUE(strategy.has_value());
    const bool has_copies = strategy->tp == 1;
    EXPECT_EQ(step->log_ratio, has_copies ? std::log(4.0) : 0);
    if (has_copies) stages.insert(strategy->zero);
  }
  EXPECT_THAT(stages, ElementsAre(0, 1, 2, 3));
  for (const char* zero : {"0", "1", "2", "3"}) {
    const Plan cut = Uniform(space, std::string("mbs=4,zero=") + zero);
    bool reached = false;
    for (int i = 0; i < 64 && !reached; ++i) {
      const auto step = move.Propose(cut, space, rng);
      if (!step.has_value()) continue;
      EXPECT_EQ(step->log_ratio, -std::log(4.0));
      reached = SameUpToNames(step->plan, whole);
    }
    EXPECT_TRUE(reached) << zero;
  }
}

}  // namespace
}  // namespace tessera
