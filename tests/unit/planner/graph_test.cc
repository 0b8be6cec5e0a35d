#include "planner/ir/graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;

// Whether operator `name` takes a node's own rule.
bool Accepts(std::string_view name, std::string_view rule) {
  const auto op = FindOp(name);
  TESSERA_CHECK(op.has_value()) << op.error().message;
  const auto parsed = IndexRule::Parse(rule);
  TESSERA_CHECK(parsed.has_value()) << parsed.error().message;
  return (*op)->form.accepts(*parsed);
}

TEST(RuleForm, LinearIsMKAndNKToMN) {
  for (const char* rule :
       {"bsi,oi->bso", "bsi,oi+o->bso", "bsi,grdi+grd->bsgrd",
        "bsgre,ogre+o->bso", "bsi,i->bs", "i,oi->o"}) {
    EXPECT_TRUE(Accepts("linear", rule)) << rule;
  }
  for (const char* rule : {
           "bsi,io->bso",      // w is (K, N)
           "bis,oi->bso",      // x is (K, M) in part
           "bsi,oi->bos",      // y is (N, M) in part
           "bsgre,oerg->bso",  // K in two orders
           "bsi,bio->bso",     // b in x, w and y
           "bsi,oi->bs",       // o is summed
           "bsi,oi,o->bso",    // the bias is a factor of the product
           "bsi+oi->bso",      // no product
           "bsi,oi+s->bso",    // the bias is along M
           "bsi->bs",
       }) {
    EXPECT_FALSE(Accepts("linear", rule)) << rule;
  }
}

TEST(RuleForm, RotaryTurnsAWholeLastDimension) {
  EXPECT_TRUE(Accepts("rotary", "bsgrd!,bs->bsgrd"));
  EXPECT_FALSE(Accepts("rotary", "bsgd,bs->bsgd"));   // d may be split
  EXPECT_FALSE(Accepts("rotary", "bgsd!,bs->bgsd"));  // positions lie within
  EXPECT_FALSE(Accepts("rotary", "bs!,bs->bs"));      // a position a feature
}

TEST(RuleForm, NormIsOverAWholeLastDimension) {
  EXPECT_TRUE(Accepts("rms_norm", "bsgd!,d->bsgd,bsg"));
  EXPECT_FALSE(Accepts("rms_norm", "bsgd,d->bsgd,bsg"));    // d may be split
  EXPECT_FALSE(Accepts("rms_norm", "bsgd!,d->bsgd,bs"));    // other rows
  EXPECT_FALSE(Accepts("rms_norm", "bsgd!,gd->bsgd,bsg"));  // other scale
  EXPECT_TRUE(Accepts("layer_norm", "bsgd!,d,d->bsgd,bsg,bsg"));
}

// A form is asked for where a node gives its own rule, which Differentiate does
// not derive; a default has the operator's form.
TEST(RuleForm, EveryForwardOperatorHasARuleOrAForm) {
  for (const OpDef& op : Ops()) {
    const bool has_form = op.form.accepts != nullptr;
    EXPECT_TRUE(op.adjoints.empty() || has_form || !op.rule.empty()) << op.name;
    if (has_form && !op.rule.empty()) {
      EXPECT_TRUE(Accepts(op.name, op.rule)) << op.name;
    }
  }
}

TEST(GraphValidate, RefusesUnknownAttributesAndForeignRules) {
  GraphBuilder builder("g", 2, 3, DType::kFloat32);
  const TensorId tokens = builder.Input("tokens", {2, 3}, DType::kInt32);
  const TensorId count = builder.Add1("count_labels", "count", {tokens});
  Graph graph = *builder.Finish(count);
  ASSERT_TRUE(Validate(graph).empty());

  graph.nodes[0].attributes = {{"epsilom", 1}};
  auto errors = Validate(graph);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_THAT(errors[0].ToString(),
              HasSubstr("nodes[0] 'count': unknown attribute 'epsilom'"));

  graph.nodes[0].attributes.clear();
  graph.tensors[tokens.index()].sample_dim = 1;
  errors = Validate(graph);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_THAT(errors[0].ToString(), HasSubstr("'tokens' has the sample "
                                              "dimension 1"));
}

}  // namespace
}  // namespace tessera
