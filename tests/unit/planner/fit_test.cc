#include "planner/search/fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "planner/search/constraints.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

bool Never() {
  return false;
}

Strategy Parsed(const char* text) {
  return ParseStrategy(text).value();
}

// A device keeps a third of what it has of each layer that does not run again,
// which takes a second.
class ThirdsObjective : public Objective {
 public:
  ThirdsObjective(const GraphIndex& index, Bytes memory)
      : index_(index), memory_(memory) {}
  Evaluation Evaluate(const Plan& plan) const override {
    Evaluation evaluation;
    evaluation.step_time = Duration::FromSeconds(1);
    evaluation.memory.resize(1);
    Bytes& total = evaluation.memory[0].total;
    for (size_t b = 1; b + 1 < index_.nodes_of_block.size(); ++b) {
      if (std::ranges::any_of(index_.nodes_of_block[b], [&](NodeId node) {
            return plan.ops[node.index()].recompute;
          })) {
        evaluation.step_time = evaluation.step_time + Duration::FromSeconds(1);
      } else {
        total.value += memory_.value / 3;
      }
    }
    evaluation.overflow = {std::max<int64_t>(0, total.value - memory_.value)};
    if (evaluation.overflow.value > 0) evaluation.violations = {"memory"};
    return evaluation;
  }

 private:
  const GraphIndex& index_;
  Bytes memory_;
};

class FitsConstraints : public ::testing::Test {
 protected:
  FitsConstraints() : space_(graph_, cluster_) {}
  std::vector<FoundPlan> Fitted(const ConstraintTexts& texts,
                                const std::vector<Strategy>& strategies) {
    space_.constraints =
        Constraints::Make(space_.index, cluster_, texts).value();
    const ThirdsObjective objective(space_.index,
                                    cluster_.TypeOf(DeviceId(0)).memory);
    return FittedPlans(space_, objective, {}, strategies, 1, Score(), 1, Never);
  }
  bool RunsAgain(const Plan& plan, size_t block) const {
    return std::ranges::any_of(
        space_.index.nodes_of_block[block],
        [&](NodeId node) { return plan.ops[node.index()].recompute; });
  }

  // embed, h.0 to h.3, head: four thirds of the memory.
  const Graph graph_ = testing::MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster_ = MakeCluster("dgx-a100-80gb:1x2").value();
  SearchSpace space_;
};

// One of the four runs again, none that is fixed not to.
TEST_F(FitsConstraints, LeavesLayersThatMayNotRunAgain) {
  const auto fitted =
      Fitted({.fix = {{"h.0=recompute:none"}}}, {Parsed("dp=2,mbs=4")});
  ASSERT_FALSE(fitted.empty());
  EXPECT_TRUE(Allowed(space_, fitted[0].plan));
  EXPECT_FALSE(RunsAgain(fitted[0].plan, 1));
  EXPECT_EQ(fitted[0].evaluation.step_time, Duration::FromSeconds(2));
}

TEST_F(FitsConstraints, RunsLayersAgainThatAreFixedToDoSo) {
  const auto fitted =
      Fitted({.fix = {{"h.3=recompute:full"}}}, {Parsed("dp=2,mbs=4")});
  ASSERT_FALSE(fitted.empty());
  EXPECT_TRUE(RunsAgain(fitted[0].plan, 4));
  EXPECT_EQ(fitted[0].evaluation.step_time, Duration::FromSeconds(2));
}

// Strategies that are ruled out are none of the one that is tried.
TEST_F(FitsConstraints, TriesWhatIsAllowed) {
  const auto fitted =
      Fitted({.forbid = {{"zero3"}}},
             {Parsed("dp=2,mbs=4,zero=3"), Parsed("dp=2,mbs=4,zero=1")});
  ASSERT_FALSE(fitted.empty());
  EXPECT_TRUE(Allowed(space_, fitted[0].plan));
}

// Stages on slower devices get fewer layers: of float32 a V100 does 15.7
// TFLOP/s and an A100 19.5 or, in TF32, 156.
TEST(Fits, SharesOutStagesBySpeed) {
  const Graph graph = testing::MlpGraph(24, 8, 4, 64, 64, 2);
  const Cluster cluster =
      MakeCluster("dgx-a100-80gb:1x1+dgx1-v100-32gb:1x1").value();
  const SearchSpace space(graph, cluster);
  const testing::ToyObjective objective(graph);
  const auto fitted = FittedPlans(space, objective, {}, {Parsed("pp=2,mbs=4")},
                                  1, Score(), 1, Never);
  ASSERT_FALSE(fitted.empty());
  const Plan& plan = fitted[0].plan;
  std::vector<int> nodes(2, 0);
  for (const OpPlacement& op : plan.ops) ++nodes[op.group.index()];
  const bool first_is_fast =
      cluster.TypeOf(plan.groups[0].devices[0]).memory.value >
      cluster.TypeOf(plan.groups[1].devices[0]).memory.value;
  EXPECT_GT(nodes[first_is_fast ? 0 : 1],
            nodes[first_is_fast ? 1 : 0] * 11 / 10);
}

}  // namespace
}  // namespace tessera
