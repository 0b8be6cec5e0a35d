#include "tools/answer_time.h"

#include <gtest/gtest.h>

#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

// Of these plans one of two microbatches is quick, and no other.
class AnswerTimeTest : public ::testing::Test {
 protected:
  AnswerTimeTest() : AnswerTimeTest(testing::MlpGraph(4, 64, 4, 8, 16, 32)) {}

  Plan Of(int microbatches) const {
    Plan plan =
        PlanFromStrategy(space_.index, cluster_, ParseStrategy("dp=2").value())
            .value();
    plan.microbatches = microbatches;
    return plan;
  }

  const Graph graph_;
  const Cluster cluster_ = MakeCluster("local-cpu:2").value();
  const SearchSpace space_{graph_, cluster_};
  const Evaluator evaluator_{
      graph_, cluster_, nullptr, {}, 20 * 2 * std::ssize(graph_.nodes)};

 private:
  explicit AnswerTimeTest(Graph graph) : graph_(std::move(graph)) {}
};

TEST_F(AnswerTimeTest, WithoutALimitThereIsTimeForAll) {
  const SearchClock clock(0, nullptr);
  AnswerTime time(space_, evaluator_, clock, 0);
  EXPECT_TRUE(time.Allows(Of(32)));
  EXPECT_EQ(time.SecondsToKeep(Of(32)), 0);
}

TEST_F(AnswerTimeTest, BehindTheLimitThereIsTimeForWhatIsQuick) {
  const SearchClock clock(0, nullptr);
  AnswerTime time(space_, evaluator_, clock, 1e-9);
  EXPECT_TRUE(time.Allows(Of(2)));
  EXPECT_FALSE(time.Allows(Of(4)));
  // What takes longer than there is gets nothing.
  EXPECT_EQ(time.SecondsToKeep(Of(4)), 0);
}

// A shorter plan says what one takes, and then the last that took long.
TEST_F(AnswerTimeTest, GoesByWhatWasSeen) {
  const SearchClock clock(0, nullptr);
  AnswerTime time(space_, evaluator_, clock, 1000);
  const double expected = time.SecondsToExplain(Of(32));
  EXPECT_GT(expected, 0);
  EXPECT_DOUBLE_EQ(time.SecondsToExplain(Of(16)), expected / 2);
  EXPECT_GT(time.SecondsToKeep(Of(32)), expected);
  EXPECT_TRUE(time.Allows(Of(32)));

  const double before = clock.Seconds();
  const Evaluation step = time.Explain(Of(32), /*share_links=*/true);
  const double taken = clock.Seconds() - before;
  EXPECT_EQ(step.step_time, evaluator_.Explain(Of(32)).step_time);
  EXPECT_LE(time.SecondsToExplain(Of(32)), taken);
  EXPECT_DOUBLE_EQ(time.SecondsToExplain(Of(16)),
                   time.SecondsToExplain(Of(32)) / 2);
}

}  // namespace
}  // namespace tessera
