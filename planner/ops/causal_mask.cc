// Scores of places 'q' for places 'k' with those of later places hidden: x
// where k <= q, else a number, as in "bhqk->bhqk". For attention that is
// written out: `attention` has its mask inside.

#include "planner/ir/op.h"

namespace tessera {
namespace {

bool IsOfPlaces(const IndexRule& rule) {
  return IsElementwise<1>(rule) && rule.FactorOf('q') >= 0 &&
         rule.FactorOf('k') >= 0;
}

}  // namespace

std::vector<OpDef> CausalMaskOps() {
  return {
      {.name = "causal_mask",
       .summary = "a number for scores of places k behind their place q",
       .form = {"one operand, with the indices of the result, among them 'q' "
                "and 'k'",
                IsOfPlaces},
       .adjoints = {{"causal_mask_dx", "dy0->dx0"}},
       .flops = FlopsPerPoint<1>,
       .attributes = {{.name = "value"}}},
      {.name = "causal_mask_dx",
       .summary = "gradient of causal_mask",
       .flops = FlopsPerPoint<1>,
       .linear = {{0}}},
  };
}

}  // namespace tessera
