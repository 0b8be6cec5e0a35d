// Softmax cross-entropy, summed over the counted tokens and divided by their
// number in the global batch (an operand, so that the loss is never a mean of
// means). A negative label is not counted. The vocabulary can be split: the
// state of a shard is, for each token, (maximum, sum of exp(x - maximum),
// logit of the target or 0), merged by the log-sum-exp rule (Megatron-LM's
// vocabulary-parallel loss, Shoeybi et al. 2019, section 3).
//
// Columns behind the first `vocabulary`, where that is given, are padding
// (planner/ir/vocabulary.h): they have no probability and no gradient.

#include "planner/ir/op.h"
#include "planner/ir/vocabulary.h"

namespace tessera {
namespace {

std::string Problem(const OpCall& call) {
  return VocabularyProblem(call.attributes, call.Extent('v'));
}

}  // namespace

std::vector<OpDef> CrossEntropyOps() {
  return {
      // Number of labels >= 0, as a float.
      {.name = "count_labels",
       .summary = "counted tokens of the global batch",
       .rule = "bs->",
       .rule_of_samples = "b->",
       .flops = FlopsPerPoint<1>,
       .integer_operands = {0},
       .once_per_step = true,
       .accumulation = Accumulation::kAll},
      // Results: the loss, and the log-sum-exp of each token's logits.
      {.name = "cross_entropy",
       .summary = "softmax cross-entropy over the last dimension",
       .rule = "bsv,bs,->,bs",
       .rule_of_samples = "bv,b,->,b",
       .adjoints = {{"cross_entropy_dx", "x0,x1,x2,y1->dx0"}},
       .flops = FlopsPerPoint<4>,
       .attributes = {{.name = kVocabulary,
                       .least = 1,
                       .whole = true,
                       .list = true}},  // of none or one
       .problem = Problem,
       .integer_operands = {1},
       .coupling = {"v", "bs", 3},
       .accumulation = Accumulation::kFirst},
      // In fp16 multiplied by the loss scale, which stands behind the operands.
      {.name = "cross_entropy_dx",
       .summary = "(softmax - onehot) / counted tokens",
       .flops = FlopsPerPoint<4>},
  };
}

}  // namespace tessera
