#include "planner/search/constraints.h"

#include <gmock/gmock.h>

#include "planner/search/adapt.h"
#include "planner/search/mcmc.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MlpGraph;
using testing::ToyObjective;

class ConstraintsTest : public ::testing::Test {
 protected:
  static Plan Uniform(const SearchSpace& space, std::string_view text) {
    auto plan = PlanFromStrategy(space.index, *space.cluster,
                                 ParseStrategy(text).value());
    TESSERA_CHECK(plan.has_value()) << plan.error().ToString();
    return *std::move(plan);
  }
  int Violations(const ConstraintTexts& texts, std::string_view strategy) {
    const auto made = Constraints::Make(space_.index, texts);
    TESSERA_CHECK(made.has_value()) << made.error().ToString();
    return made->Violations(space_.index, cluster_, Uniform(space_, strategy));
  }
  std::string ErrorOf(const ConstraintTexts& texts) {
    const auto made = Constraints::Make(space_.index, texts);
    return made ? "no error" : made.error().ToString();
  }

  const Graph graph_ = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster_ = MakeCluster("local-cpu:4").value();
  const SearchSpace space_{graph_, cluster_};
};

TEST_F(ConstraintsTest, CountsWhatAPlanBreaks) {
  // Four layers of two products each.
  EXPECT_EQ(Violations({.fix = {"h.*.up=tp:2"}}, "tp=2"), 0);
  EXPECT_EQ(Violations({.fix = {"h.*.up=tp:2"}}, "tp=4"), 4);
  EXPECT_EQ(Violations({.fix = {"h.1.up=tp:2"}}, ""), 1);
  EXPECT_EQ(Violations({.fix = {"*=dp:2"}}, "tp=2"), 0);
  EXPECT_EQ(Violations({.fix = {"h.*.down=zero:1"}}, "zero=1"), 0);
  EXPECT_EQ(Violations({.fix = {"h.*.down=zero:1"}}, ""), 4);
  EXPECT_EQ(Violations({.fix = {"h=recompute:full"}}, "recompute=full"), 0);
  EXPECT_EQ(Violations({.fix = {"h=recompute:full"}}, ""), 4);

  EXPECT_EQ(Violations({.forbid = {"zero3"}}, "zero=3"), 1);
  EXPECT_EQ(Violations({.forbid = {"zero3"}}, "zero=2"), 0);
  EXPECT_EQ(Violations({.forbid = {"tp", "pp"}}, "tp=2,pp=2,mbs=2"), 2);
  EXPECT_EQ(Violations({.forbid = {"gpipe"}}, "pp=2,schedule=gpipe"), 1);
  EXPECT_EQ(Violations({.forbid = {"gpipe"}}, "pp=2"), 0);

  EXPECT_EQ(Violations({.max_microbatch = 1}, "tp=2,mbs=2"), 1);
  EXPECT_EQ(Violations({.max_microbatch = 2}, "tp=2,mbs=2"), 0);

  EXPECT_EQ(Violations({.space = "dp"}, "zero=3"), 0);
  EXPECT_EQ(Violations({.space = "dp"}, "tp=2"), 1);
  EXPECT_EQ(Violations({.space = "megatron"}, "tp=2,pp=2"), 0);
  EXPECT_EQ(Violations({.space = "megatron"}, "tp=2,zero=1"), 0);
  EXPECT_EQ(Violations({.space = "megatron"}, "zero=3"), 1);
  EXPECT_EQ(Violations({.space = "soap"}, "tp=2,mbs=4"), 0);
  EXPECT_EQ(Violations({.space = "soap"}, "tp=2,mbs=2"), 1);
  EXPECT_EQ(Violations({.space = "full"}, "zero=3"), 0);
}

TEST_F(ConstraintsTest, SaysWhatIsWrong) {
  EXPECT_THAT(ErrorOf({.fix = {"h.*.up"}}), HasSubstr("PATTERN=KEY:VALUE"));
  EXPECT_THAT(ErrorOf({.fix = {"h.*.up=tq:8"}}),
              HasSubstr("unknown key 'tq'; did you mean"));
  EXPECT_THAT(ErrorOf({.fix = {"h.*.up=tp:x"}}), HasSubstr("whole number"));
  EXPECT_THAT(ErrorOf({.fix = {"h.*.attn=tp:2"}}),
              HasSubstr("no operator matches"));
  EXPECT_THAT(ErrorOf({.forbid = {"zero4"}}), HasSubstr("unknown constraint"));
  EXPECT_THAT(ErrorOf({.space = "megatro"}), HasSubstr("megatron"));
}

TEST_F(ConstraintsTest, ReadsAFile) {
  ConstraintTexts texts;
  ASSERT_TRUE(
      ParseConstraints("# all\nfix h.*.up=tp:2  # half\n\nforbid zero3\n"
                       "max-microbatch 4\nspace soap\n",
                       "c.txt", texts));
  EXPECT_THAT(texts.fix, ElementsAre("h.*.up=tp:2"));
  EXPECT_THAT(texts.forbid, ElementsAre("zero3"));
  EXPECT_EQ(texts.max_microbatch, 4);
  EXPECT_EQ(texts.space, "soap");
  const auto wrong =
      ParseConstraints("fix a=tp:1\nforbit zero3", "c.txt", texts);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().ToString(), HasSubstr("c.txt:2"));
  EXPECT_THAT(wrong.error().ToString(), HasSubstr("did you mean 'forbid'"));
}

// All that the search returns keeps to them, also where no uniform plan does.
TEST_F(ConstraintsTest, HoldTheSearch) {
  const ToyObjective objective(graph_);
  for (const ConstraintTexts& texts :
       {ConstraintTexts{.fix = {"h.*.up=tp:2"}},
        ConstraintTexts{.forbid = {"tp", "zero3"}, .max_microbatch = 2},
        ConstraintTexts{.space = "megatron"}, ConstraintTexts{.space = "dp"},
        ConstraintTexts{.fix = {"h.0=tp:4", "h.3=tp:1"}}}) {
    SearchSpace space(graph_, cluster_);
    space.constraints = Constraints::Make(space.index, texts).value();
    SearchOptions options;
    options.proposals = 400;
    options.time_limit = 0;
    options.candidates = 5;
    const auto result = Search(space, objective, options);
    ASSERT_TRUE(result.has_value()) << result.error().ToString();
    EXPECT_TRUE(Allowed(space, result->best));
    EXPECT_GT(result->accepted, 0);
    for (const FoundPlan& candidate : result->candidates) {
      EXPECT_TRUE(Allowed(space, candidate.plan));
      EXPECT_EQ(candidate.evaluation, objective.Evaluate(candidate.plan));
    }
    EXPECT_EQ(result->candidates.at(0).evaluation, result->evaluation);
  }
  SearchSpace space(graph_, cluster_);
  space.constraints =
      Constraints::Make(space.index, {.fix = {"h.0.up=tp:3"}}).value();
  SearchOptions options;
  options.proposals = 10;
  options.time_limit = 0.5;
  const auto none = Search(space, objective, options);
  ASSERT_FALSE(none.has_value());
  EXPECT_THAT(none.error().ToString(), HasSubstr("constraints allow"));
}

// A plan of two ranks on four: its tensor parallelism stays.
TEST_F(ConstraintsTest, PlansAreAdaptedToAnotherCluster) {
  const Cluster two = MakeCluster("local-cpu:2").value();
  const SearchSpace of_two(graph_, two);
  const Plan old = Uniform(of_two, "tp=2,zero=0,mbs=2,recompute=full");
  const auto adapted = AdaptedPlans(space_, old, 3);
  ASSERT_EQ(adapted.size(), 3u);
  // As it is it leaves two ranks idle.
  EXPECT_TRUE(SameUpToNames(adapted[0], old));
  EXPECT_TRUE(SameUpToNames(adapted[1],
                            Uniform(space_, "dp=2,tp=2,mbs=2,recompute=full")));
  for (const Plan& plan : adapted) {
    EXPECT_TRUE(Validate(graph_, cluster_, plan).empty());
  }
  // The other way round there are fewer ranks than it has.
  const Plan wide = Uniform(space_, "dp=2,tp=2,mbs=2,recompute=full");
  EXPECT_TRUE(SameUpToNames(AdaptedPlans(of_two, wide, 1).at(0), old));
}

}  // namespace
}  // namespace tessera
