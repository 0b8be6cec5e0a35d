// A product of two tensors, summed over the factors that the result lacks:
// "bhqd,bhkd->bhqk". The node's rule names them, in any order. Both adjoints
// are such products.

#include "planner/ir/op.h"

namespace tessera {
namespace {

// Whether each factor of a tensor is one of another, too, or cannot be split
// (then its extent is 1): a sum over a factor of one operand alone would not
// have such adjoints.
bool IsEinsum(const IndexRule& rule) {
  if (rule.operands.size() != 2 || rule.results.size() != 1) return false;
  for (size_t i = 0; i < rule.factors.size(); ++i) {
    const int f = static_cast<int>(i);
    const int times = Holds(rule.operands[0], f) + Holds(rule.operands[1], f) +
                      Holds(rule.results[0], f);
    if (times < 2 && rule.factors[i].splittable) return false;
  }
  return true;
}

std::string EinsumProblem(const OpCall& call) {
  for (size_t i = 0; i < call.extents.size(); ++i) {
    const int f = static_cast<int>(i);
    const IndexRule& rule = *call.rule;
    const int times = Holds(rule.operands[0], f) + Holds(rule.operands[1], f) +
                      Holds(rule.results[0], f);
    if (times < 2 && call.extents[i] > 1) {
      return std::string("factor '") + rule.factors[i].letter +
             "' is of one tensor alone, and its extent is not 1";
    }
  }
  return "";
}

}  // namespace

std::vector<OpDef> EinsumOps() {
  return {
      {.name = "einsum",
       .summary = "product of two tensors, summed over factors of both",
       .form = {"two operands; each factor is of two of the three tensors, as "
                "in 'bhqd,bhkd->bhqk'",
                IsEinsum},
       .op_class = OpClass::kMatmul,
       .adjoints = {{"einsum", "dy0,x1->dx0"}, {"einsum", "dy0,x0->dx1"}},
       .flops = FlopsPerPoint<2>,
       .problem = EinsumProblem,
       .linear = {{0}, {1}},
       .accumulation = Accumulation::kAll},
  };
}

}  // namespace tessera
