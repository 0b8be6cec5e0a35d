#include "planner/search/constraints.h"

#include <gmock/gmock.h>

#include "planner/base/rng.h"
#include "planner/plan/validate.h"
#include "planner/search/adapt.h"
#include "planner/search/mcmc.h"
#include "planner/search/move.h"
#include "planner/search/search_clock.h"
#include "planner/search/starts.h"
#include "planner/topology/topologies.h"
#include "tests/support/small_models.h"
#include "tests/support/uniform_plan.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MlpGraph;
using ::testing::Not;
using testing::ToyObjective;
using testing::Uniform;

class ConstraintsTest : public ::testing::Test {
 protected:
  int Violations(const ConstraintTexts& texts, std::string_view strategy) {
    const auto made = Constraints::Make(space_.index, cluster_, texts);
    TESSERA_CHECK(made.has_value()) << made.error().ToString();
    return made->Violations(space_.index, cluster_, Uniform(space_, strategy));
  }
  std::string ErrorOf(const ConstraintTexts& texts) {
    const auto made = Constraints::Make(space_.index, cluster_, texts);
    return made ? "no error" : made.error().ToString();
  }

  const Graph graph_ = MlpGraph(4, 8, 4, 8, 16, 32);
  const Cluster cluster_ = MakeCluster("local-cpu:4").value();
  const SearchSpace space_{graph_, cluster_};
};

TEST_F(ConstraintsTest, KnowWhatTheyRuleOut) {
  const auto rules_out = [&](const ConstraintTexts& texts) {
    return Constraints::Make(space_.index, cluster_, texts)->RuleOut("pp");
  };
  EXPECT_TRUE(rules_out({.forbid = {{"pp"}}}));
  EXPECT_TRUE(rules_out({.space = "dp"}));
  EXPECT_FALSE(rules_out({.forbid = {{"tp"}, {"gpipe"}}}));
  EXPECT_FALSE(rules_out({.space = "megatron"}));
  EXPECT_FALSE(rules_out({}));
}

TEST_F(ConstraintsTest, CountsWhatAPlanBreaks) {
  // Four layers of two products each.
  EXPECT_EQ(Violations({.fix = {{"h.*.up=tp:2"}}}, "tp=2"), 0);
  EXPECT_EQ(Violations({.fix = {{"h.*.up=tp:2"}}}, "tp=4"), 4);
  EXPECT_EQ(Violations({.fix = {{"h.1.up=tp:2"}}}, ""), 1);
  EXPECT_EQ(Violations({.fix = {{"*=dp:2"}}}, "tp=2"), 0);
  EXPECT_EQ(Violations({.fix = {{"h.*.down=zero:1"}}}, "zero=1"), 0);
  EXPECT_EQ(Violations({.fix = {{"h.*.down=zero:1"}}}, ""), 4);
  EXPECT_EQ(Violations({.fix = {{"h=recompute:full"}}}, "recompute=full"), 0);
  EXPECT_EQ(Violations({.fix = {{"h=recompute:full"}}}, ""), 4);

  EXPECT_EQ(Violations({.forbid = {{"zero3"}}}, "zero=3"), 1);
  EXPECT_EQ(Violations({.forbid = {{"zero3"}}}, "zero=2"), 0);
  EXPECT_EQ(Violations({.forbid = {{"tp"}, {"pp"}}}, "tp=2,pp=2,mbs=2"), 2);
  EXPECT_EQ(Violations({.forbid = {{"gpipe"}}}, "pp=2,schedule=gpipe"), 1);
  EXPECT_EQ(Violations({.forbid = {{"gpipe"}}}, "pp=2"), 0);

  EXPECT_EQ(Violations({.max_microbatch = 1}, "tp=2,mbs=2"), 1);
  EXPECT_EQ(Violations({.max_microbatch = 2}, "tp=2,mbs=2"), 0);

  EXPECT_EQ(Violations({.space = {"dp"}}, "zero=3"), 0);
  EXPECT_EQ(Violations({.space = {"dp"}}, "tp=2"), 1);
  EXPECT_EQ(Violations({.space = {"megatron"}}, "tp=2,pp=2"), 0);
  EXPECT_EQ(Violations({.space = {"megatron"}}, "tp=2,zero=1"), 0);
  EXPECT_EQ(Violations({.space = {"megatron"}}, "zero=3"), 1);
  EXPECT_EQ(Violations({.space = {"soap"}}, "tp=2,mbs=4"), 0);
  EXPECT_EQ(Violations({.space = {"soap"}}, "tp=2,mbs=2"), 1);
  EXPECT_EQ(Violations({.space = {"full"}}, "zero=3"), 0);
}

TEST_F(ConstraintsTest, CountsWhatIsSaidAgainOnce) {
  const ConstraintTexts texts = {.fix = {{"h.*.up=tp:2"}, {"h.*.up=tp:2"}}};
  const auto made = Constraints::Make(space_.index, cluster_, texts).value();
  EXPECT_EQ(made.FixedNodes().size(), 1u);
  EXPECT_EQ(Violations(texts, "tp=4"), 4);
}

TEST_F(ConstraintsTest, UnequalSamplesAreForbiddenOrNoMegatrons) {
  Plan plan = Uniform(space_, "mbs=2");
  for (const ConstraintTexts& texts :
       {ConstraintTexts{.forbid = {{"shares"}}},
        ConstraintTexts{.space = {"megatron"}}}) {
    const auto made = Constraints::Make(space_.index, cluster_, texts).value();
    plan.groups[0].axes[0].shares.clear();
    EXPECT_EQ(made.Violations(space_.index, cluster_, plan), 0);
    plan.groups[0].axes[0].shares = {3, 1};
    EXPECT_EQ(made.Violations(space_.index, cluster_, plan), 1);
  }
}

// 8 samples of a microbatch: 3 for each device of the first half, 1 of the
// other.
TEST_F(ConstraintsTest, TheLimitIsOfTheDeviceWithMostSamples) {
  Plan plan = Uniform(space_, "mbs=2");
  ASSERT_EQ(plan.microbatches, 1);
  const auto violations = [&](int most) {
    return Constraints::Make(space_.index, cluster_, {.max_microbatch = most})
        ->Violations(space_.index, cluster_, plan);
  };
  EXPECT_EQ(violations(2), 0);
  plan.groups[0].axes[0].shares = {3, 1};
  EXPECT_EQ(violations(2), 1);
  EXPECT_EQ(violations(3), 0);
}

TEST_F(ConstraintsTest, SaysWhatIsWrong) {
  EXPECT_THAT(ErrorOf({.fix = {{"h.*.up"}}}), HasSubstr("PATTERN=KEY:VALUE"));
  EXPECT_THAT(ErrorOf({.fix = {{"h.*.up=tq:8"}}}),
              HasSubstr("unknown key 'tq'; did you mean"));
  EXPECT_THAT(ErrorOf({.fix = {{"h.*.up=tp:x"}}}), HasSubstr("whole number"));
  // No key has a letter of it.
  EXPECT_THAT(ErrorOf({.fix = {{"h.*.up=xx:8"}}}),
              Not(HasSubstr("did you mean")));
  EXPECT_THAT(ErrorOf({.fix = {{"h.*.attn=tp:2"}}}),
              HasSubstr("no operator matches"));
  EXPECT_THAT(ErrorOf({.forbid = {{"zero4"}}}),
              HasSubstr("unknown constraint"));
  EXPECT_THAT(ErrorOf({.space = {"megatro"}}), HasSubstr("megatron"));
}

TEST_F(ConstraintsTest, ReadsAFile) {
  ConstraintTexts texts;
  ASSERT_TRUE(
      ParseConstraints("# all\nfix h.*.up=tp:2  # half\n\nforbid zero3\n"
                       "max-microbatch 4\nspace soap\n",
                       "c.txt", texts));
  ASSERT_EQ(texts.fix.size(), 1u);
  EXPECT_EQ(texts.fix[0].text, "h.*.up=tp:2");
  EXPECT_EQ(texts.fix[0].line, "c.txt:2");
  ASSERT_EQ(texts.forbid.size(), 1u);
  EXPECT_EQ(texts.forbid[0].text, "zero3");
  EXPECT_EQ(texts.max_microbatch, 4);
  EXPECT_EQ(texts.space.text, "soap");
  const auto wrong =
      ParseConstraints("fix a=tp:1\nforbit zero3", "c.txt", texts);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().ToString(), HasSubstr("c.txt:2"));
  EXPECT_THAT(wrong.error().ToString(), HasSubstr("did you mean 'forbid'"));
}

TEST_F(ConstraintsTest, SaysWhatALineOfAFileHas) {
  const auto error = [](std::string_view text) {
    ConstraintTexts texts;
    const auto read = ParseConstraints(text, "c.txt", texts);
    return read ? "no error" : read.error().ToString();
  };
  EXPECT_EQ(error("fix h.*=tp:2 forbid pp"),
            "c.txt:1: 'forbid' is too much: expected a key and one value in a "
            "line, such as 'fix h.*.attn=tp:8'");
  EXPECT_EQ(error("\nforbid zero3 zero2"),
            "c.txt:2: 'zero2' is too much: expected a key and one value in a "
            "line, such as 'forbid zero3'");
  EXPECT_EQ(error("space"),
            "c.txt:1: expected a value behind the key, such as 'space "
            "megatron'");
  EXPECT_EQ(error("max-microbatch # 4"),
            "c.txt:1: expected a value behind the key, such as "
            "'max-microbatch 4'");
  EXPECT_THAT(error("zero3"), HasSubstr("c.txt:1: unknown constraint 'zero3'"));
}

TEST_F(ConstraintsTest, ReadsWhatEditorsWrite) {
  ConstraintTexts texts;
  ASSERT_TRUE(
      ParseConstraints("\xEF\xBB\xBF"
                       "fix\th.*.up=tp:2\r\nspace dp\r\n",
                       "c.txt", texts));
  ASSERT_EQ(texts.fix.size(), 1u);
  EXPECT_EQ(texts.fix[0].text, "h.*.up=tp:2");
  EXPECT_EQ(texts.space.text, "dp");
}

// A file never loosens what the command line says.
TEST_F(ConstraintsTest, TheStricterOfFileAndFlagsHolds) {
  for (const int flag : {1, 8}) {
    ConstraintTexts texts = {.max_microbatch = flag};
    ASSERT_TRUE(ParseConstraints("max-microbatch 4", "c.txt", texts));
    EXPECT_EQ(texts.max_microbatch, std::min(flag, 4));
    const auto made = Constraints::Make(space_.index, cluster_, texts);
    EXPECT_THAT(
        made->Broken(space_.index, cluster_, Uniform(space_, "tp=4,mbs=8")),
        ElementsAre(flag == 1 ? "--max-microbatch 1"
                              : "c.txt:1: max-microbatch 4"));
  }
  const auto error = [](ConstraintTexts texts, std::string_view text) {
    const auto read = ParseConstraints(text, "c.txt", texts);
    return read ? "no error" : read.error().ToString();
  };
  EXPECT_EQ(error({.space = {"dp"}}, "space dp"), "no error");
  EXPECT_EQ(error({.space = {"soap"}}, "\nspace dp"),
            "c.txt:2: space dp: contradicts --space soap");
  EXPECT_EQ(error({}, "space dp\nspace dp"), "c.txt:2: 'space' is given twice");
  EXPECT_EQ(error({}, "max-microbatch 2\nmax-microbatch 1"),
            "c.txt:2: 'max-microbatch' is given twice");
}

TEST_F(ConstraintsTest, ErrorsNameTheLineOfAFile) {
  EXPECT_THAT(ErrorOf({.fix = {{"nope=tp:2", "c.txt:2"}}}),
              HasSubstr("c.txt:2: fix nope=tp:2: no operator matches"));
  EXPECT_THAT(ErrorOf({.forbid = {{"nosuch", "c.txt:1"}}}),
              HasSubstr("c.txt:1: forbid nosuch: unknown constraint"));
  EXPECT_THAT(ErrorOf({.space = {"nosuch", "c.txt:3"}}),
              HasSubstr("c.txt:3: space nosuch: unknown space"));
}

TEST_F(ConstraintsTest, ManyStarsTakeNoTime) {
  // 2^40 ways to share out the characters, if each were tried.
  std::string pattern;
  for (int i = 0; i < 40; ++i) pattern += "*o";
  EXPECT_THAT(ErrorOf({.fix = {{pattern + "x=tp:2"}}}),
              HasSubstr("no operator matches"));
  EXPECT_THAT(ErrorOf({.fix = {{std::string(40, '*') + "z=tp:2"}}}),
              HasSubstr("no operator matches"));
  for (const char* same : {"h.*.up", "h.*.u*", "*.*p", "h.**.*u*p*", "*up"}) {
    EXPECT_EQ(Violations({.fix = {{std::string(same) + "=tp:2"}}}, ""), 4)
        << same;
  }
}

// What no plan at all meets is an error before there is any search.
TEST_F(ConstraintsTest, RefusesWhatCannotBe) {
  EXPECT_THAT(ErrorOf({.fix = {{"h.*.norm=tp:2"}}}),
              HasSubstr("of the operators that match none is dense, nor looks "
                        "rows up"));
  EXPECT_THAT(ErrorOf({.fix = {{"h.*=ep:2"}}}),
              HasSubstr("of the operators that match none has experts"));
  EXPECT_THAT(ErrorOf({.fix = {{"h.*.act=zero:1"}}}),
              HasSubstr("of the operators that match none has weights"));
  EXPECT_THAT(ErrorOf({.fix = {{"lookup=recompute:full"}}}),
              HasSubstr("of the operators that match none is in a layer"));
  EXPECT_THAT(ErrorOf({.fix = {{"h.*=zero:4"}}}), HasSubstr("0 to 3"));
  EXPECT_THAT(ErrorOf({.fix = {{"h.*=tp:5"}}}), HasSubstr("4 devices"));
}

TEST_F(ConstraintsTest, RefusesContradictions) {
  EXPECT_EQ(ErrorOf({.fix = {{"h.*.up=tp:2"}, {"h.1=tp:4"}}}),
            "--fix h.1=tp:4: contradicts --fix h.*.up=tp:2");
  EXPECT_EQ(ErrorOf({.fix = {{"h.1.up=tp:2"}, {"h.2=tp:4"}}}), "no error");
  EXPECT_EQ(ErrorOf({.fix = {{"h.1.up=recompute:full"},
                             {"h.1.down=recompute:none"}}}),
            "--fix h.1.down=recompute:none: contradicts "
            "--fix h.1.up=recompute:full");
  EXPECT_EQ(ErrorOf({.fix = {{"*=tp:2"}}, .forbid = {{"tp", "c.txt:1"}}}),
            "--fix *=tp:2: contradicts c.txt:1: forbid tp");
  EXPECT_EQ(ErrorOf({.fix = {{"*=tp:1"}}, .forbid = {{"tp"}}}), "no error");
  EXPECT_EQ(ErrorOf({.fix = {{"*=zero:2"}}, .forbid = {{"zero2"}}}),
            "--fix *=zero:2: contradicts --forbid zero2");
  EXPECT_EQ(ErrorOf({.fix = {{"*=tp:2"}}, .space = {"dp"}}),
            "--fix *=tp:2: contradicts --space dp");
  EXPECT_EQ(ErrorOf({.fix = {{"*=dp:2"}, {"h.*.up=tp:4"}}}),
            "--fix h.*.up=tp:4: with what else is fixed 'h.0.up' is split in 8 "
            "ways, but the cluster has 4 devices");
}

// What is forbidden as tensor parallelism are splits of dense operators.
TEST_F(ConstraintsTest, TablesMayBeSplitWhereTensorParallelismIsForbidden) {
  EXPECT_EQ(ErrorOf({.fix = {{"lookup=tp:2"}}, .forbid = {{"tp"}}}),
            "no error");
  EXPECT_EQ(ErrorOf({.fix = {{"lookup=tp:2"}}, .space = {"dp"}}),
            "--fix lookup=tp:2: contradicts --space dp");
}

// Each operator that matches, not one for all.
TEST_F(ConstraintsTest, HoldsEveryOperatorThatMatches) {
  Plan plan = Uniform(space_, "tp=4");
  const auto broken = [&](const char* fix) {
    const auto made =
        Constraints::Make(space_.index, cluster_, {.fix = {{fix}}});
    TESSERA_CHECK(made.has_value()) << made.error().ToString();
    return made->Violations(space_.index, cluster_, plan);
  };
  EXPECT_EQ(broken("h.*=tp:4"), 0);
  EXPECT_EQ(broken("h.*=dp:1"), 0);
  // "up" of the second layer splits its samples instead.
  for (size_t i = 0; i < space_.index.forward_nodes; ++i) {
    if (graph_.nodes[i].name != "h.1.up") continue;
    plan.ops[i].axes = {};
    plan.ops[i]
        .axes[static_cast<size_t>(space_.index.SampleFactor(NodeId(i)))] =
        plan.groups[0].all_axes();
  }
  EXPECT_EQ(broken("h.*=tp:4"), 1);
  EXPECT_EQ(broken("h.*=dp:1"), 1);
}

// A uniform plan has what its strategy says.
TEST(ConstraintsOfStrategies, UniformPlansKeepTheirDegrees) {
  const Cluster cluster = MakeCluster("local-cpu:4").value();
  struct Row {
    Graph graph;
    const char* strategy;
    std::vector<ConstraintText> fix;
  };
  const Graph attention = testing::AttentionGraph(2, 4, 8, 8, 4, 16);
  const Graph moe = testing::MoeGraph(2, 4, 4, 4, 4, 4, 16);
  const std::vector<Row> rows = {
      {attention, "tp=2,sp=1", {{"*=tp:2"}, {"*=dp:2"}}},
      {attention, "cp=2,tp=2,sp=1", {{"*=cp:2"}, {"*=tp:2"}, {"*=dp:1"}}},
      {attention, "cp=2,tp=2,cp-kind=ulysses", {{"*=cp:2"}, {"*=tp:2"}}},
      {moe, "ep=2,tp=2,sp=1", {{"*=ep:2"}, {"*=tp:2"}, {"*=dp:2"}}},
      {moe, "ep=2", {{"*=ep:2"}, {"*=tp:1"}, {"*=dp:4"}}},
      {moe, "cp=2,tp=2,sp=1", {{"*=cp:2"}, {"*=ep:1"}}},
      {testing::BranchesGraph(4, 2, 4, 8, 16), "tp=2", {{"*=tp:2"}}},
  };
  for (const Row& row : rows) {
    const SearchSpace space(row.graph, cluster);
    const auto plan = PlanFromStrategy(space.index, cluster,
                                       ParseStrategy(row.strategy).value());
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    const auto made = Constraints::Make(space.index, cluster, {.fix = row.fix});
    ASSERT_TRUE(made.has_value()) << made.error().ToString();
    EXPECT_THAT(made->Broken(space.index, cluster, *plan), ElementsAre())
        << row.strategy;
  }
}

class ConstraintsOfAttention : public ::testing::Test {
 protected:
  std::vector<std::string> Broken(const ConstraintTexts& texts,
                                  const Plan& plan) const {
    const auto made = Constraints::Make(space_.index, cluster_, texts);
    TESSERA_CHECK(made.has_value()) << made.error().ToString();
    return made->Broken(space_.index, cluster_, plan);
  }
  std::string ErrorOf(const ConstraintTexts& texts) const {
    const auto made = Constraints::Make(space_.index, cluster_, texts);
    return made ? "no error" : made.error().ToString();
  }

  const Graph graph_ = testing::AttentionGraph(2, 4, 8, 16, 4, 16);
  const Cluster cluster_ = MakeCluster("local-cpu:4").value();
  const SearchSpace space_{graph_, cluster_};
};

// Heads that context axes split in place of the sequence are context
// parallelism, and no tensor parallelism.
TEST_F(ConstraintsOfAttention, ForbidWhatUlyssesSplits) {
  const ConstraintTexts cp = {.forbid = {{"cp"}}};
  const ConstraintTexts tp = {.forbid = {{"tp"}}};
  for (const char* kind : {"gather", "ring", "ulysses"}) {
    const Plan plan = Uniform(space_, std::string("cp=4,cp-kind=") + kind);
    EXPECT_THAT(Broken(cp, plan), ElementsAre("--forbid cp")) << kind;
    EXPECT_THAT(Broken(tp, plan), ElementsAre()) << kind;
  }
  for (const char* text : {"tp=4", "tp=2,sp=1", "tp=4,sp=1"}) {
    EXPECT_THAT(Broken(cp, Uniform(space_, text)), ElementsAre()) << text;
    EXPECT_THAT(Broken(tp, Uniform(space_, text)), ElementsAre("--forbid tp"))
        << text;
  }
  const Plan both = Uniform(space_, "cp=2,tp=2,cp-kind=ulysses");
  EXPECT_THAT(Broken(cp, both), ElementsAre("--forbid cp"));
  EXPECT_THAT(Broken(tp, both), ElementsAre("--forbid tp"));
  EXPECT_EQ(ErrorOf({.fix = {{"h.*=cp:4"}}, .forbid = {{"cp"}}}),
            "--fix h.*=cp:4: contradicts --forbid cp");
  EXPECT_EQ(ErrorOf({.fix = {{"h.*=cp:1"}}, .forbid = {{"cp"}}}), "no error");
  // Its sequence may be split without attention's.
  EXPECT_EQ(ErrorOf({.fix = {{"h.*.out=cp:4"}}, .forbid = {{"cp"}}}),
            "no error");
}

// The heads alone are split, or in more ways than what they are made of.
TEST_F(ConstraintsOfAttention, TensorRanksAreOfTheHeadsToo) {
  const Plan of_four = Uniform(space_, "tp=4");
  for (const auto& [text, ways] : {std::pair("", 1), {"tp=2", 2}}) {
    Plan plan = Uniform(space_, text);
    const std::string fix = "h.*=tp:" + std::to_string(ways);
    EXPECT_THAT(Broken({.fix = {{fix}}}, plan), ElementsAre()) << fix;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      if (graph_.nodes[i].op->op_class != OpClass::kAttention) continue;
      plan.ops[i] = of_four.ops[i];
    }
    ASSERT_TRUE(IsValid(space_.index, cluster_, plan));
    EXPECT_THAT(Broken({.fix = {{fix}}}, plan), ElementsAre("--fix " + fix));
  }
}

// What is looked at where an edit touches a plan is enough.
TEST_F(ConstraintsOfAttention, HoldWalks) {
  for (const auto& [texts, start] :
       {std::pair(ConstraintTexts{.forbid = {{"cp"}}}, "tp=2,sp=1"),
        {ConstraintTexts{.forbid = {{"tp"}}}, "cp=2,cp-kind=ulysses"},
        {ConstraintTexts{.fix = {{"h.0=tp:2"}}}, "tp=2,sp=1"}}) {
    SearchSpace space(graph_, cluster_);
    space.constraints = Constraints::Make(space.index, cluster_, texts).value();
    Draft draft(space, Uniform(space_, start));
    ASSERT_TRUE(Allowed(space, draft.plan()));
    Rng rng(7);
    int kept = 0;
    for (int i = 0; i < 4000; ++i) {
      if (!DrawMove(Moves(), rng).Propose(draft, rng)) continue;
      draft.Keep();
      ++kept;
      ASSERT_TRUE(Allowed(space, draft.plan()));
    }
    EXPECT_GT(kept, 100);
  }
}

// The embedding splits samples 4 ways, the layers only 2.
TEST_F(ConstraintsTest, TheLimitIsOfTheNodeWithMostSamples) {
  Plan plan = Uniform(space_, "tp=2,mbs=1");
  ASSERT_EQ(plan.microbatches, 4);
  const auto broken = [&] {
    const auto made =
        Constraints::Make(space_.index, cluster_, {.max_microbatch = 1});
    return made->Broken(space_.index, cluster_, plan);
  };
  EXPECT_THAT(broken(), ElementsAre());
  plan.microbatches = 2;
  EXPECT_THAT(broken(), ElementsAre("--max-microbatch 1"));
  plan.ops[0].axes[static_cast<size_t>(space_.index.SampleFactor(NodeId(0)))] =
      plan.groups[0].all_axes();
  EXPECT_THAT(broken(), ElementsAre("--max-microbatch 1"));
}

// All that the search returns keeps to them, also where no uniform plan does.
TEST_F(ConstraintsTest, HoldTheSearch) {
  const ToyObjective objective(graph_);
  for (const ConstraintTexts& texts :
       {ConstraintTexts{.fix = {{"h.*.up=tp:2"}}},
        ConstraintTexts{.forbid = {{"tp"}, {"zero3"}}, .max_microbatch = 2},
        ConstraintTexts{.space = {"megatron"}},
        ConstraintTexts{.space = {"dp"}},
        ConstraintTexts{.fix = {{"h.0=tp:4"}, {"h.3=tp:1"}}}}) {
    SearchSpace space(graph_, cluster_);
    space.constraints = Constraints::Make(space.index, cluster_, texts).value();
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
      Constraints::Make(space.index, cluster_, {.fix = {{"h.0.up=tp:3"}}})
          .value();
  SearchOptions options;
  options.proposals = 10;
  options.time_limit = 0.5;
  const auto none = Search(space, objective, options);
  ASSERT_FALSE(none.has_value());
  EXPECT_THAT(none.error().ToString(), HasSubstr("constraints allow"));
}

// A layer that is not split by samples has all eight of them in a data parallel
// plan, two more than it may: that plan is cut into more microbatches.
TEST_F(ConstraintsTest, LeaveBaselinesWithWhatIsFixedInMoreMicrobatches) {
  const ToyObjective objective(graph_);
  SearchSpace space(graph_, cluster_);
  space.constraints =
      Constraints::Make(space.index, cluster_,
                        {.fix = {{"h.0=tp:4"}}, .max_microbatch = 6})
          .value();
  SearchOptions options;
  options.proposals = 0;
  options.time_limit = 0;
  SearchClock clock(0, nullptr);
  const Starts starts = FindStarts(space, objective, options, clock).value();
  EXPECT_TRUE(std::ranges::any_of(starts.priced, [&](const FoundPlan& found) {
    const Plan& plan = found.plan;
    if (plan.microbatches != 2 || plan.groups.size() != 1) return false;
    const AxisSet all = plan.groups[0].all_axes();
    size_t by_samples = 0;
    for (size_t i = 0; i < space.index.forward_nodes; ++i) {
      const int samples = space.index.sample_factor[i];
      by_samples += plan.ops[i].axes[static_cast<size_t>(samples)] == all;
    }
    return 2 * by_samples > space.index.forward_nodes;
  }));
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
