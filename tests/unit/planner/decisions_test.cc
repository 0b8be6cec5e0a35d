// What stands beside a decision: other choices with a microbatch and ZeRO
// groups of their own. tests/unit/planner/explain_test.cc has the rest.

#include <gmock/gmock.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/check.h"
#include "planner/plan/strategy.h"
#include "planner/schedule/action_table.h"
#include "planner/search/explain.h"
#include "planner/search/search_space.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;
using testing::MlpGraph;
using testing::ToyObjective;

std::vector<Decision> Decisions(const SearchSpace& space,
                                std::string_view strategy) {
  return DecisionsOf(space, ToyObjective(*space.index.graph),
                     ParseStrategy(strategy).value(), 1, nullptr);
}

const Decision& Named(const std::vector<Decision>& decisions,
                      std::string_view name) {
  const auto found = std::ranges::find(decisions, name, &Decision::name);
  TESSERA_CHECK(found != decisions.end()) << name;
  return *found;
}

// The toy takes 10 ns for each microbatch: the 8 samples over 2 replicas are
// best in one of 4 each, whatever else is chosen.
TEST(Decisions, ChooseTheMicrobatchAnew) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("local-cpu:4").value();
  const SearchSpace space(graph, cluster);
  const auto decisions = Decisions(space, "dp=2,tp=2,mbs=2,zero=1");
  for (const char* name : {"ZeRO", "recomputation", "sequence parallelism",
                           "ranks on the fabric, innermost first"}) {
    for (const Alternative& other : Named(decisions, name).alternatives) {
      EXPECT_EQ(other.strategy.mbs, 4) << name << ": " << other.choice;
      EXPECT_EQ(other.with, "mbs 4") << name << ": " << other.choice;
    }
  }
  const auto best = Decisions(space, "dp=2,tp=2,mbs=4,zero=1");
  for (const Alternative& other : Named(best, "ZeRO").alternatives) {
    EXPECT_EQ(other.strategy.mbs, 4) << other.choice;
    EXPECT_EQ(other.with, "") << other.choice;
  }
}

// 12 samples: 8 replicas do not divide them, 4 and fewer do.
TEST(Decisions, CountChoicesThatDoNotDivideTheBatch) {
  const Graph graph = MlpGraph(4, 12, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("local-cpu:8").value();
  const SearchSpace space(graph, cluster);
  const Decision tensor =
      Named(Decisions(space, "dp=4,tp=2,mbs=3"), "tensor parallelism");
  EXPECT_EQ(tensor.alternatives.size(), 2U);  // 4 and 8
  EXPECT_EQ(tensor.invalid, 1);
}

// A picosecond for each microbatch.
class MicrobatchesObjective : public Objective {
 public:
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = {1'000 + plan.microbatches};
    return evaluation;
  }
};

// A table is of two microbatches: of one 1f1b is another plan, and the best.
TEST(Decisions, HaveSchedulesWhereTheChosenOneDoesNotRun) {
  const Graph graph = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("local-cpu:2").value();
  const SearchSpace space(graph, cluster);
  Strategy table = ParseStrategy("dp=1,pp=2,mbs=4").value();
  table.schedule = "table";
  table.actions = ParseActionTable("F0 F1 B0 B1\nF0 B0 F1 B1\n").value();
  const Decision schedule =
      Named(DecisionsOf(space, MicrobatchesObjective(), table, 1, nullptr),
            "schedule");
  const auto plain =
      std::ranges::find_if(schedule.alternatives, [](const Alternative& other) {
        return other.strategy.schedule == "1f1b";
      });
  ASSERT_NE(plain, schedule.alternatives.end());
  EXPECT_EQ(plain->strategy.mbs, 8);
}

// What is the same plan but for the microbatch is no other choice: on 8 devices
// of two types a single sample is shared alike by speed and equally.
TEST(Decisions, AreNoOtherWordsForTheMicrobatch) {
  const Graph graph = MlpGraph(4, 16, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("dgx-h100:1x4+dgx-a100-80gb:1x4").value();
  const SearchSpace space(graph, cluster);
  int compared = 0;
  for (const char* text :
       {"dp=8,mbs=1,zero=1,balance=speed", "pp=2,dp=4,mbs=1,zero=1"}) {
    const Strategy own = ParseStrategy(text).value();
    for (const Decision& decision : Decisions(space, text)) {
      if (decision.name == "microbatch") continue;
      for (const Alternative& other : decision.alternatives) {
        Strategy same = own;
        same.mbs = other.strategy.mbs;
        const auto plan = PlanFromStrategy(space.index, cluster, same);
        if (!plan) continue;
        EXPECT_FALSE(SameUpToNames(
            *plan,
            PlanFromStrategy(space.index, cluster, other.strategy).value()))
            << decision.name << ": " << other.choice;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 0);
}

// Pipelines of four stages on four hosts: the copies of a stage are on one, and
// a cut of them within nodes is the cut.
TEST(Decisions, NameAPlanOnce) {
  const Graph graph = MlpGraph(4, 16, 4, 8, 16, 32);
  const Cluster cluster = MakeCluster("dgx-h100:4x2").value();
  const SearchSpace space(graph, cluster);
  const Decision zero =
      Named(Decisions(space, "dp=2,pp=4,mbs=2,zero=1"), "ZeRO");
  EXPECT_EQ(zero.alternatives.size(), 3U);  // none, ZeRO-2 and ZeRO-3
  for (const Alternative& other : zero.alternatives) {
    EXPECT_EQ(other.choice.find("within"), std::string::npos) << other.choice;
  }
}

// Groups of 8 of the 16 replicas on two nodes of 8. Two tensor ranks leave 8
// replicas, four leave 4: over all of these, or those on a node. 6 layers with
// what is before and behind them make no 16 stages.
TEST(Decisions, CutWhatCopiesThereAre) {
  const Graph graph = MlpGraph(6, 32, 16, 64, 64, 64);
  const Cluster cluster = MakeCluster("dgx-a100-80gb:2").value();
  const SearchSpace space(graph, cluster);
  const auto decisions = Decisions(space, "dp=16,mbs=2,zero=3,zero-group=8");
  const Decision& tensor = Named(decisions, "tensor parallelism");
  EXPECT_EQ(tensor.alternatives.size(), 4U);  // 2, 4, 8 and 16
  EXPECT_EQ(tensor.invalid, 0);
  for (const Alternative& other : tensor.alternatives) {
    if (other.strategy.dp == 1) continue;
    EXPECT_EQ(other.strategy.zero, 3) << other.choice;
    EXPECT_THAT(other.with, HasSubstr("ZeRO ")) << other.choice;
  }
  const Decision& pipeline = Named(decisions, "pipeline parallelism");
  EXPECT_EQ(pipeline.alternatives.size(), 3U);
  EXPECT_EQ(pipeline.invalid, 1);
  // Groups that the copies make up stay: two of 4 of 8.
  const auto four = Decisions(space, "dp=16,mbs=2,zero=3,zero-group=4");
  EXPECT_THAT(Named(four, "tensor parallelism").alternatives,
              Contains(AllOf(Field(&Alternative::choice, "tp 2, dp 8"),
                             Field(&Alternative::strategy,
                                   Field(&Strategy::zero_group, 4)))));
}

}  // namespace
}  // namespace tessera
