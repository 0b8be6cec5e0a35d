#include "planner/ir/index_rule.h"

#include <gtest/gtest.h>

#include "planner/plan/plan.h"

namespace tessera {
namespace {

Role RoleOf(const IndexRule& rule, char letter) {
  return rule.factors[static_cast<size_t>(rule.FactorOf(letter))].role;
}

TEST(IndexRule, GivesEachFactorItsSoapRole) {
  const IndexRule rule = *IndexRule::Parse("bsi,oi+o->bso");
  EXPECT_EQ(RoleOf(rule, 'b'), Role::kSample);
  EXPECT_EQ(RoleOf(rule, 's'), Role::kAttribute);
  EXPECT_EQ(RoleOf(rule, 'o'), Role::kParameter);
  EXPECT_EQ(RoleOf(rule, 'i'), Role::kReduction);
  EXPECT_EQ(rule.terms, (std::vector<uint8_t>{0, 0, 1}));
}

TEST(IndexRule, ReadsMarksScalarsAndSeveralResults) {
  const IndexRule norm = *IndexRule::Parse("bsh!,h,h->bsh,bs,bs");
  EXPECT_FALSE(
      norm.factors[static_cast<size_t>(norm.FactorOf('h'))].splittable);
  EXPECT_EQ(norm.results.size(), 3u);
  const IndexRule count = *IndexRule::Parse("bs->");
  ASSERT_EQ(count.results.size(), 1u);
  EXPECT_TRUE(count.results[0].empty());
  EXPECT_EQ(IndexRule::Parse("->")->operands.size(), 1u);
}

TEST(IndexRule, TextRoundTrips) {
  for (const char* text :
       {"bsi,oi+o->bso", "bsh!,h,h->bsh,bs,bs", "bs->", "->", "n,->n,n,n",
        "bsgrd!,bt!gd,btge!,bs,bt->bsgre,bsgr", "bsv,bs,->,bs"}) {
    const auto rule = IndexRule::Parse(text);
    ASSERT_TRUE(rule.has_value()) << text;
    EXPECT_EQ(rule->ToString(), text);
    EXPECT_EQ(*IndexRule::Parse(rule->ToString()), *rule);
  }
}

TEST(IndexRule, RefusesWhatItCannotMean) {
  for (const char* text : {"bsi", "b1->b", "bb->b", "b->bb", "b;c->b",
                           "abcdefg->a", "abcdef,ghijk->a"}) {
    EXPECT_FALSE(IndexRule::Parse(text).has_value()) << text;
  }
}

TEST(IndexRule, ExtentsNameTheFactorThatDisagrees) {
  const IndexRule rule = *IndexRule::Parse("bsi,oi->bso");
  const std::vector<Shape> operands = {{2, 3, 4}, {5, 6}};
  const std::vector<Shape> results = {{2, 3, 5}};
  const auto extents = Extents(rule, operands, results);
  ASSERT_FALSE(extents.has_value());
  EXPECT_NE(extents.error().message.find("factor 'i'"), std::string::npos);
  EXPECT_NE(extents.error().message.find("found 6"), std::string::npos);
}

// Of a node whose rule says all.
Layout OperandLayoutOf(const Node& node, const OpPlacement& placement,
                       size_t operand) {
  return OperandLayout(Graph(), node, placement, DeviceGroup(), operand);
}
Layout ResultLayoutOf(const Node& node, const OpPlacement& placement,
                      size_t result) {
  return ResultLayout(Graph(), node, placement, DeviceGroup(), result);
}

// Layouts of y[b,s,o] = x[b,s,i] w[o,i] + bias[o] on a mesh of axis 0 (size 2)
// and axis 1 (size 4), worked by hand.
class LinearLayouts : public ::testing::Test {
 protected:
  void SetUp() override {
    node_.op = *FindOp("linear");
    node_.rule = *IndexRule::Parse("bsi,oi+o->bso");
  }
  OpPlacement Split(char letter, AxisSet axes) {
    OpPlacement placement;
    placement.axes[static_cast<size_t>(node_.rule.FactorOf(letter))] = axes;
    return placement;
  }
  static Layout Dims(AxisSet a, AxisSet b = 0, AxisSet c = 0) {
    Layout layout;
    layout.dims[0] = a;
    layout.dims[1] = b;
    layout.dims[2] = c;
    return layout;
  }
  Node node_;
};

TEST_F(LinearLayouts, DataParallelSplitsTheBatchAndReplicatesWeights) {
  const OpPlacement dp = Split('b', 1);
  EXPECT_EQ(OperandLayoutOf(node_, dp, 0), Dims(1));
  EXPECT_EQ(OperandLayoutOf(node_, dp, 1), Dims(0));
  EXPECT_EQ(ResultLayoutOf(node_, dp, 0), Dims(1));
}

TEST_F(LinearLayouts, ColumnParallelSplitsTheWeightAndTheResult) {
  const OpPlacement column = Split('o', 2);
  EXPECT_EQ(OperandLayoutOf(node_, column, 0), Dims(0));
  EXPECT_EQ(OperandLayoutOf(node_, column, 1), Dims(2));
  EXPECT_EQ(OperandLayoutOf(node_, column, 2), Dims(2));  // the bias too
  EXPECT_EQ(ResultLayoutOf(node_, column, 0), Dims(0, 0, 2));
}

TEST_F(LinearLayouts, RowParallelLeavesAPartialSum) {
  const OpPlacement row = Split('i', 2);
  EXPECT_EQ(OperandLayoutOf(node_, row, 0), Dims(0, 0, 2));
  EXPECT_EQ(OperandLayoutOf(node_, row, 1), Dims(0, 2));
  Layout partial;
  partial.partial = 2;
  EXPECT_EQ(ResultLayoutOf(node_, row, 0), partial);
}

TEST_F(LinearLayouts, SequenceParallelSplitsTheTokens) {
  const OpPlacement sequence = Split('s', 2);
  EXPECT_EQ(OperandLayoutOf(node_, sequence, 0), Dims(0, 2));
  EXPECT_EQ(ResultLayoutOf(node_, sequence, 0), Dims(0, 2));
}

TEST(Layouts, VocabularyParallelLookupIsPartialAndTheLossIsNot) {
  Node lookup;
  lookup.op = *FindOp("embedding");
  lookup.rule = *IndexRule::Parse(lookup.op->rule);
  OpPlacement split;
  split.axes[static_cast<size_t>(lookup.rule.FactorOf('v'))] = 1;
  EXPECT_EQ(ResultLayoutOf(lookup, split, 0).partial, AxisSet{1});
  // Cross-entropy merges its vocabulary shards' states itself.
  Node loss;
  loss.op = *FindOp("cross_entropy");
  loss.rule = *IndexRule::Parse(loss.op->rule);
  OpPlacement vocabulary;
  vocabulary.axes[static_cast<size_t>(loss.rule.FactorOf('v'))] = 1;
  vocabulary.axes[static_cast<size_t>(loss.rule.FactorOf('b'))] = 2;
  EXPECT_EQ(ResultLayoutOf(loss, vocabulary, 0).partial, AxisSet{2});
  EXPECT_EQ(ResultLayoutOf(loss, vocabulary, 1).partial, AxisSet{0});
}

}  // namespace
}  // namespace tessera
