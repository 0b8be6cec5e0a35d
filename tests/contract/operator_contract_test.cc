// Every operator of the table: what is derived from its index rule adds up.

#include <gtest/gtest.h>

#include "planner/ir/op.h"
#include "planner/plan/layout.h"
#include "tests/support/kernel_cases.h"

namespace tessera {
namespace {

// Rules of operators that leave the rule to the node.
std::string_view RuleOf(const OpDef& op) {
  if (!op.rule.empty()) return op.rule;
  if (op.name == "linear" || op.name == "linear_fp32") return "bsi,oi+o->bso";
  if (op.name == "linear_dx") return "bso,oi->bsi";
  if (op.name == "linear_dw") return "bso,bsi->oi";
  if (op.name == "linear_db") return "bso->o";
  if (op.name.starts_with("rotary")) return "bsgd!,bs->bsgd";
  if (op.name == "concat") return "bsm!,bsgn!->bsgd!";
  if (op.name == "stack") return "bh,bh,bh->bd!h";
  if (op.name == "unstack") return "bd!h->bh,bh,bh";
  if (op.name == "lstm_gates") return "bg!j,bj->bj,bj";
  if (op.name == "gru_gates") return "bg!j,j,bg!j,bj->bj";
  if (op.name == "concat_channels") return "bm!hw,bn!hw,bo!hw->bd!hw";
  if (op.name == "batch_norm") return "bchw,c,c->bchw,c,c";
  if (op.name == "ghost_batch_norm") return "bchw,c,c->bchw,bc,bc";
  if (op.name == "tracked_batch_norm") return "bchw,c,c,c,c->bchw,c,c";
  if (op.name == "tracked_ghost_batch_norm") return "bchw,c,c,c,c->bchw,bc,bc";
  if (op.name.ends_with("_pool")) return "bch!w!->bcyx";
  if (op.name == "conv2d") return "bgch!w!,gnck!l!+gn->bgnyx";
  if (op.name == "reshape") return "bm!n!h->bd!h";
  if (op.name == "conv_transpose2d") return "bgnyx,gnck!l!->bgch!w!";
  if (op.name == "einsum") return "bhqd,bhkd->bhqk";
  if (op.name == "broadcast_add" || op.name == "subtract" ||
      op.name == "divide" || op.name == "maximum" || op.name == "minimum" ||
      op.name.ends_with("equal") || op.name.starts_with("less") ||
      op.name.starts_with("greater")) {
    return "bsh,h->bsh";
  }
  if (op.name.starts_with("reduce_")) return "bsh!->bs";
  if (op.name.find("softmax") != std::string_view::npos) return "bsz->bsz";
  if (op.name.starts_with("causal_mask")) return "bqk->bqk";
  if (op.name == "mean_squared_error" || op.name == "binary_cross_entropy") {
    return "bsf,bsf->";
  }
  if (op.name == "where") return "bs,bsh,h->bsh";
  if (op.name == "gather") return "bvh,bt->bth";
  if (op.name == "scatter_add") return "bth,bt->bvh";
  if (op.name == "one_hot") return "bs->bsv";
  if (op.name == "top_k") return "bsv!->bsk!,bsk!";
  if (op.name == "transpose") return "bsh->hbs";
  if (op.name == "slice" || op.name == "pad" || op.name == "resample") {
    return "bm!h->bd!h";
  }
  if (op.name == "multiply" || op.name == "add" || op.name == "sum" ||
      op.name.ends_with("_dx")) {
    return "bsh,bsh->bsh";
  }
  return "bsh->bsh";
}

// Rules of adjoints, read off the forward operator's declaration.
std::string AdjointRule(const OpDef& forward, std::string_view signature) {
  const IndexRule rule = *IndexRule::Parse(RuleOf(forward));
  const size_t arrow = signature.find("->");
  std::string text;
  for (const std::string_view symbols :
       {signature.substr(0, arrow), signature.substr(arrow + 2)}) {
    size_t tensors = 0;
    for (const Symbol& symbol : Symbols(symbols)) {
      const auto& side = symbol.of_result ? rule.results : rule.operands;
      if (symbol.index >= side.size()) continue;  // the node lacks it
      if (tensors++ > 0) text += ',';
      for (uint8_t f : side[symbol.index]) {
        text += rule.factors[f].letter;
        if (!rule.factors[f].splittable) text += '!';
      }
    }
    if (tensors == 0) return "";
    if (text.find("->") == std::string::npos) text += "->";
  }
  return text;
}

int64_t ExtentOf(char letter) {
  return letter == 'n' ? 37 : 11 + (letter - 'a');  // ragged for 2, 3 and 5
}

double FlopsOf(const OpDef& op, const IndexRule& rule,
               const std::vector<int64_t>& extents,
               const std::vector<Attribute>& attributes) {
  const std::vector<DType> dtypes(10, DType::kFloat32);
  const OpCall call = {
      &rule, extents, std::span(dtypes).first(rule.operands.size()),
      std::span(dtypes).first(rule.results.size()), attributes};
  EXPECT_GT(CallBytes(op, call).value, 0) << op.name;
  return op.flops == nullptr ? 0 : op.flops(call).value;
}

// `defs`: the attributes of a node.
void ShardsAddUp(const OpDef& op, const std::string& text,
                 const std::vector<AttributeDef>& defs) {
  const auto rule = IndexRule::Parse(text);
  ASSERT_TRUE(rule.has_value()) << op.name << " " << text;
  std::vector<int64_t> extents;
  for (const Factor& factor : rule->factors) {
    extents.push_back(ExtentOf(factor.letter));
  }
  std::vector<Attribute> attributes;
  for (const AttributeDef& def : defs) {
    attributes.push_back({std::string(def.name), std::min(3.0, def.most)});
  }
  const double whole = FlopsOf(op, *rule, extents, attributes);
  for (size_t f = 0; f < extents.size(); ++f) {
    if (!rule->factors[f].splittable) continue;
    for (int64_t parts : {2, 3, 5}) {
      double sum = 0;
      for (int64_t i = 0; i < parts; ++i) {
        std::vector<int64_t> local = extents;
        local[f] = ShardRange(extents[f], parts, i).size();
        sum += FlopsOf(op, *rule, local, attributes);
      }
      EXPECT_DOUBLE_EQ(sum, whole)
          << op.name << " " << text << " split on " << rule->factors[f].letter
          << " over " << parts;
    }
  }
}

TEST(OperatorContract, ShardsFlopsAddUpToTheWhole) {
  int adjoints = 0;
  for (const OpDef& op : Ops()) {
    const bool is_adjoint_only = op.rule.empty() && op.adjoints.empty() &&
                                 op.name.find("_d") != std::string_view::npos;
    if (!is_adjoint_only) {
      ShardsAddUp(op, std::string(RuleOf(op)), op.attributes);
      if (!op.rule_of_samples.empty()) {
        ShardsAddUp(op, std::string(op.rule_of_samples), op.attributes);
      }
    }
    for (const AdjointDef& adjoint : op.adjoints) {
      if (adjoint.op.empty()) continue;
      const auto backward = FindOp(adjoint.op);
      ASSERT_TRUE(backward.has_value()) << op.name << " names " << adjoint.op;
      const std::string rule = AdjointRule(op, adjoint.signature);
      if (rule.empty()) continue;  // an optional operand
      ShardsAddUp(**backward, rule, op.attributes);
      ++adjoints;
    }
  }
  EXPECT_GE(adjoints, 15);
}

TEST(OperatorContract, NamesAreUniqueAndSummariesPresent) {
  const auto ops = Ops();
  for (size_t i = 0; i < ops.size(); ++i) {
    EXPECT_FALSE(ops[i].summary.empty()) << ops[i].name;
    for (size_t j = 0; j < i; ++j) EXPECT_NE(ops[i].name, ops[j].name);
    if (!ops[i].rule.empty()) {
      EXPECT_TRUE(IndexRule::Parse(ops[i].rule).has_value()) << ops[i].name;
    }
  }
}

}  // namespace
}  // namespace tessera
